"""Blocked causal attention against the formula, forward and every gradient, masks and grouped heads included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_engine.ops.attention import HEADS, QUERY_BLOCK, causal_attention


def inputs(B: int, H: int, G: int, S: int, d: int, e: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and a gradient, laid out [B, S, heads, …] in memory as projections leave them."""
    chance = torch.Generator().manual_seed(S)
    sizes = ((H, d), (G, d), (G, e), (H, e))
    return [torch.randn(B, S, *size, generator=chance, dtype=torch.float64).to(dtype).transpose(1, 2) for size in sizes]


def formula(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if allowed is None:
        allowed = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return (q @ k.transpose(2, 3) * scale).masked_fill(~allowed, float("-inf")).softmax(dim=-1) @ v


def documents(B: int, S: int) -> Tensor:
    """Each row cut in two at a place of its own: bool [B, 1, S, S]."""
    ids = torch.arange(S)[None] >= torch.arange(1, B + 1)[:, None] * S // (B + 1)
    return (ids[:, None, :, None] == ids[:, None, None, :]).tril()


@pytest.mark.parametrize("S", [0, 1, 3, QUERY_BLOCK - 1, QUERY_BLOCK, QUERY_BLOCK + 1, 2 * QUERY_BLOCK + 17])
@pytest.mark.parametrize(("H", "G"), [(1, 1), (HEADS + 2, HEADS + 2), (12, 6), (8, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_forward_and_gradients_are_those_of_the_formula(S: int, H: int, G: int, masked: bool) -> None:
    B, scale = 2, 0.3
    *tensors, d_out = inputs(B, H, G, S, 6, 5)
    allowed = documents(B, S) if masked else None
    results = []
    for function in (causal_attention, formula):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = function(*leaves, allowed, scale)
        results.append([out, *torch.autograd.grad(out, leaves, d_out)])
    for ours, true in zip(*results, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    *tensors, d_out = inputs(5, 6, 6, 90, 20, 12, dtype)

    def run(rows: slice) -> list[Tensor]:
        leaves = [x[rows].clone().requires_grad_() for x in tensors]
        out = causal_attention(*leaves, None, 0.2)
        return [out, *torch.autograd.grad(out, leaves, d_out[rows])]

    whole = run(slice(0, 5))
    for start, stop in ((0, 1), (2, 5), (4, 5)):
        for part, all_rows in zip(run(slice(start, stop)), whole, strict=True):
            assert torch.equal(part, all_rows[start:stop])


def test_sixteen_bit_tensors_are_rounded_once() -> None:
    *tensors, d_out = inputs(2, 4, 4, 100, 32, 16, torch.bfloat16)
    results = []
    for leaves in ([x.clone().requires_grad_() for x in tensors], [x.float().requires_grad_() for x in tensors]):
        out = causal_attention(*leaves, None, 0.2)
        results.append([out, *torch.autograd.grad(out, leaves, d_out.to(out.dtype))])
    for ours, wide in zip(*results, strict=True):
        assert ours.dtype == torch.bfloat16 and torch.equal(ours, wide.bfloat16())


def test_nothing_is_kept_of_the_upper_half() -> None:
    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    S, H = 4 * QUERY_BLOCK, 4
    q, k, v, _ = inputs(1, H, H, S, 8, 8)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        causal_attention(q.requires_grad_(), k, v, None, 0.3)
    scores = sum(saved) - q.numel() - k.numel() - v.numel()
    assert scores == H * sum(QUERY_BLOCK * (i + 1) * QUERY_BLOCK for i in range(4))  # 10/16 of H S^2


def test_works_under_autocast() -> None:
    q, k, v, _ = inputs(1, 2, 2, 20, 8, 8, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(causal_attention(q, k, v, None, 0.3), causal_attention(q, k, v, None, 0.3))
    assert causal_attention(q, k, v, None, 0.3).dtype == torch.float32
