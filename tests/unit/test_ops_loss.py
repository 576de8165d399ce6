"""Chunked cross entropy against torch in float64, and its memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.ops import loss
from moe_engine.ops.loss import IGNORE, cross_entropy


def example(T: int, V: int, dtype: torch.dtype, D: int = 12) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, D, generator=generator, dtype=torch.float64).to(dtype)
    head = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(V, (T,), generator=generator)
    labels[::3] = IGNORE
    return x, head, labels, torch.rand(T, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("chunk", [16, 32, 1024])
@pytest.mark.parametrize("T", [0, 1, 33, 64])
def test_losses_and_gradients_equal_torch_for_any_chunk(T: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "MAX_CHUNK_ROWS", chunk)
    x, head, labels, d_losses = example(T, 37, torch.float64)
    x.requires_grad_()
    head.requires_grad_()
    losses = cross_entropy(x, head, labels)
    expected = F.cross_entropy(x @ head.T, labels, ignore_index=IGNORE, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-13)
    assert not losses[labels == IGNORE].any()
    grads = torch.autograd.grad(losses, (x, head), d_losses)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (x, head), d_losses), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_losses_have_the_same_bits_under_any_split(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "MAX_CHUNK_ROWS", 16)
    x, head, labels, _ = example(53, 257, dtype)
    whole = cross_entropy(x, head, labels)
    assert whole.dtype == torch.float32
    for cuts in ([1] * 53, [2, 5, 46], [20, 33]):
        parts = zip(x.split(cuts), labels.split(cuts), strict=True)
        assert torch.equal(torch.cat([cross_entropy(a, head, b) for a, b in parts]), whole)


def test_bf16_gradients_of_a_huge_batch_do_not_flush_to_zero() -> None:
    x, head, labels, _ = example(64, 257, torch.bfloat16)
    x.requires_grad_()
    head.requires_grad_()
    head.grad_dtype = torch.float32
    count = 6e7
    (cross_entropy(x, head, labels).sum() / count).backward()
    wide_x, wide_head = x.detach().double().requires_grad_(), head.detach().double().requires_grad_()
    (F.cross_entropy(wide_x @ wide_head.T, labels, ignore_index=IGNORE, reduction="sum")).backward()
    assert head.grad.dtype == torch.float32
    for grad, expected in ((x.grad, wide_x.grad), (head.grad, wide_head.grad)):
        grad = grad.double() * count
        assert (grad - expected).norm() < 0.01 * expected.norm()


def test_the_head_gradient_is_summed_over_chunks_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same 16 tokens 256 times: a bf16 sum would stop growing long before 256 times the gradient of one chunk."""
    monkeypatch.setattr(loss, "MAX_CHUNK_ROWS", 16)
    x, head, labels, _ = example(16, 37, torch.bfloat16)
    grads = []
    for repeats in (1, 256):
        weight = head.clone().requires_grad_()
        weight.grad_dtype = torch.float32
        cross_entropy(x.repeat(repeats, 1), weight, labels.repeat(repeats)).sum().backward()
        grads.append(weight.grad)
    torch.testing.assert_close(grads[1], 256 * grads[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("T", "V"), [(32, 300), (200, 2048), (1024, 2048), (1024, 9000)])
def test_no_tensor_of_all_logits_exists(T: int, V: int) -> None:
    """Nor does one outlive its chunk: what is saved for backward is the inputs and a number a row."""
    x, head, labels, _ = example(T, V, torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), Watch():
        losses = cross_entropy(x, head, labels)
        losses.sum().backward()
    assert 16 * V <= largest <= T * V / 2 and largest <= max(loss.CHUNK_ELEMENTS, loss.MIN_CHUNK_ROWS * V)
    assert sum(saved) == x.numel() + head.numel() + 2 * T


def test_all_ignored_gives_zero_loss_and_zero_gradients() -> None:
    x, head, labels, _ = example(20, 37, torch.float32)
    x.requires_grad_()
    head.requires_grad_()
    cross_entropy(x, head, torch.full_like(labels, IGNORE)).sum().backward()
    assert not x.grad.any() and not head.grad.any()
