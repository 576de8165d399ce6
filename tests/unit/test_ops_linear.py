"""Linear, grouped linear and the queue of weight gradients against ordinary autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_engine.ops.grouped_linear import grouped_linear
from moe_engine.ops.linear import Linear, linear, wide_linear
from moe_engine.ops.wgrad_queue import WgradQueue


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6), (0, 6), (3, 0, 6)])
def test_linear_and_its_gradients_equal_torch(shape: tuple[int, ...]) -> None:
    x, weight = randn(*shape).requires_grad_(), randn(10, 6, seed=1).requires_grad_()
    out = linear(x, weight)
    expected = torch.nn.functional.linear(x, weight)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    d_out = randn(*expected.shape, seed=2)
    torch.testing.assert_close(
        torch.autograd.grad(out, (x, weight), d_out),
        torch.autograd.grad(expected, (x, weight), d_out),
        rtol=1e-12,
        atol=1e-12,
    )


def test_grouped_linear_and_its_gradients_equal_a_loop() -> None:
    counts = [3, 0, 20, 1]
    x, weight = randn(24, 6).requires_grad_(), randn(4, 10, 6, seed=1).requires_grad_()
    out = grouped_linear(x, weight, counts)
    expected = torch.cat([rows @ w.T for rows, w in zip(x.split(counts), weight, strict=True)])
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    d_out = randn(24, 10, seed=2)
    grads = torch.autograd.grad(out, (x, weight), d_out)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (x, weight), d_out), rtol=1e-12, atol=1e-12)
    assert torch.equal(grads[1][1], torch.zeros(10, 6, dtype=torch.float64))


def test_wide_linear_is_fp32_for_bf16_input_also_under_autocast() -> None:
    x, weight = randn(9, 16, dtype=torch.bfloat16).requires_grad_(), randn(5, 16, dtype=torch.bfloat16).requires_grad_()
    expected = x.detach().float() @ weight.detach().float().T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = wide_linear(x, weight)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        out.backward(torch.full_like(out, 2.0**-40))
    assert x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(
        x.grad.float() * 2.0**40, weight.detach().float().sum(0).expand(9, 16), rtol=2**-8, atol=0
    )
    torch.testing.assert_close(
        weight.grad.float() * 2.0**40, x.detach().float().sum(0).expand(5, 16), rtol=2**-8, atol=1e-6
    )


def test_linear_under_autocast_computes_in_its_dtype_and_gives_fp32_gradients() -> None:
    layer = Linear(16, 8)
    nn.init.normal_(layer.weight)
    x = torch.randn(5, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        expected = torch.nn.functional.linear(x, layer.weight)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-7)
    out.float().sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(layer.weight.grad, x.detach().sum(0).expand(8, 16), rtol=0.02, atol=0.02)


def test_bf16_weight_gradients_reach_an_fp32_grad() -> None:
    weight = nn.Parameter(randn(4, 16, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    queue = WgradQueue()
    for deferring in (False, True):
        x = randn(8, 16, dtype=torch.bfloat16).requires_grad_()
        loss = linear(x, weight, queue).float().sum()
        with queue.defer("w", deferring):
            loss.backward()
        if deferring:
            queue.run("w")
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, 2 * x.detach().float().sum(0).expand(4, 16), rtol=2**-7, atol=2**-7)


class _SwapAndScale(torch.autograd.Function):
    """Two inputs, two outputs, and a backward of its own."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * b, a.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[1], 2 * grads[0]


def two_uses(queue: WgradQueue | None, weight: Tensor, other: Tensor, x: Tensor) -> Tensor:
    """A weight used twice, and one that is no leaf where it is used, so that it never waits.

    Between the uses, operations with several outputs: the halves of the hidden state swap, one is used twice.
    """
    first, second = linear(x, weight, queue).tanh().chunk(2, dim=-1)
    first, second = _SwapAndScale.apply(first, second)
    hidden = linear(torch.cat([first, first * second], dim=-1), weight, queue)
    return linear(hidden, other * 2, queue).tanh().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deferring_changes_no_bit_of_any_gradient_over_micro_batches(dtype: torch.dtype) -> None:
    results = []
    for deferring in (False, True):
        weight, other = nn.Parameter(randn(8, 8, dtype=dtype)), nn.Parameter(randn(8, 8, dtype=dtype, seed=1))
        fired: list[str] = []
        weight.register_post_accumulate_grad_hook(lambda p, fired=fired: fired.append("weight"))
        queue, inputs = WgradQueue(), []
        for m in range(3):
            inputs.append(randn(5, 8, dtype=dtype, seed=m).requires_grad_())
            with queue.defer(m, deferring):
                two_uses(queue, weight, other, inputs[-1]).backward()
            assert len(queue) == 2 * deferring * (m + 1)
            if not deferring:
                assert fired == ["weight"] * (m + 1)
        assert fired == [] or not deferring
        if deferring:
            for m in range(3):
                queue.run(m)
                assert fired == ["weight"] * (m + 1)
        assert len(queue) == 0
        results.append([weight.grad, other.grad] + [x.grad for x in inputs])
    for plain, deferred in zip(*results, strict=True):
        assert torch.equal(plain, deferred)


@pytest.mark.parametrize("deferring", [False, True])
def test_products_add_to_a_wide_gradient_that_is_there(deferring: bool) -> None:
    """As the optimizer leaves it: an fp32 buffer at a bf16 weight. Hooks fire as if autograd had added."""
    weight, before = nn.Parameter(randn(8, 12, dtype=torch.bfloat16)), randn(8, 12, dtype=torch.float32, seed=1)
    weight.grad_dtype = torch.float32
    weight.grad = buffer = before.clone()
    x, d_out = randn(20, 12, dtype=torch.bfloat16, seed=2), randn(20, 8, dtype=torch.bfloat16, seed=3)
    fired: list[int] = []
    weight.register_post_accumulate_grad_hook(lambda p: fired.append(1))
    queue = WgradQueue()
    with queue.defer("a", deferring):
        linear(x.requires_grad_(), weight, queue).backward(d_out)
    assert torch.equal(buffer, before) == deferring and len(fired) == (not deferring)
    if deferring:
        queue.run("a")
    assert weight.grad is buffer and fired == [1]
    torch.testing.assert_close(buffer, before + d_out.float().T @ x.detach().float(), rtol=1e-6, atol=1e-5)


def test_a_queue_that_gives_adds_to_nothing() -> None:
    """Where gradients are asked for by `torch.autograd.grad`, one that is there stays as it is."""
    weight, x = nn.Parameter(randn(8, 12)), randn(20, 12, seed=2)
    weight.grad = torch.ones_like(weight)
    (found,) = torch.autograd.grad(linear(x, weight, WgradQueue().without_waiting()).sum(), weight)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    torch.testing.assert_close(found, x.sum(dim=0).expand(8, 12))


def test_the_queue_runs_one_batch_in_order_and_frees_as_it_goes() -> None:
    queue, order = WgradQueue(), []
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]

    def make(i: int) -> Tensor:
        order.append((i, len(queue)))
        return torch.full((1,), float(i))

    for key in ("a", "b"):
        with queue.defer(key):
            assert queue.deferring
            for i in range(3):
                queue.push(parameters[i], lambda i=i: make(i))
    assert not queue.deferring and len(queue) == 6
    queue.run("b")
    assert [i for i, _ in order] == [0, 1, 2] and len(queue) == 3
    assert [p.grad.item() for p in parameters] == [0, 1, 2]
    queue.run("a")
    assert [p.grad.item() for p in parameters] == [0, 2, 4]


def test_the_queue_refuses_wrong_use_and_recovers() -> None:
    queue, parameter = WgradQueue(), nn.Parameter(torch.zeros(1))
    fired: list[int] = []
    parameter.register_post_accumulate_grad_hook(lambda p: fired.append(1))
    with pytest.raises(ValueError, match="not deferring"):
        queue.push(parameter, lambda: torch.ones(1))
    with pytest.raises(RuntimeError, match="broken"), queue.defer("a"):
        queue.push(parameter, lambda: torch.ones(1))
        raise RuntimeError("broken")
    with pytest.raises(ValueError, match="still queued"), queue.defer("a"):
        pass
    with queue.defer("b"), pytest.raises(ValueError, match="another backward"), queue.defer("c"):
        pass
    with pytest.raises(KeyError):
        queue.run("c")
    queue.run("a")
    assert parameter.grad.item() == 1 and fired == [1]
    (parameter * 2).sum().backward()
    assert fired == [1, 1]
