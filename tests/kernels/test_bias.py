"""The weighted bias of the down projection: reference and Triton kernels against float64 autograd."""

from __future__ import annotations

import pytest
import torch
from interpreter import interpreted
from measures import calc_diff, randn

import moe_kernels

device = interpreted("bias")


@pytest.mark.parametrize("counts", [[0, 1, 7], [44, 0, 31], [5, 3, 0], [0, 0, 0]])
@pytest.mark.parametrize("dim", [24, 600])
def test_bias_and_its_gradients(counts: list[int], dim: int) -> None:
    used, sizes = sum(counts), torch.tensor(counts)
    rows, d_rows = randn(used + 5, dim), randn(used + 5, dim, seed=1)
    weight, bias = randn(used + 5, dtype=torch.float32, seed=2), randn(3, dim, seed=3)
    d_rows[used:], weight[used:] = float("nan"), float("nan")  # belong to nobody

    w, b = weight.double().requires_grad_(), bias.double().requires_grad_()
    group = torch.arange(3).repeat_interleave(sizes)
    exact = rows[:used].double() + w[:used, None] * b[group]
    exact.backward(d_rows[:used].double())
    for implementation in (moe_kernels, device):
        out = implementation.add_bias(rows, weight, bias, sizes)
        assert calc_diff(out[:used], exact.detach()) < 1e-5 and torch.equal(out[used:], rows[used:])
        d_weight, d_bias = implementation.add_bias_backward(d_rows, weight, bias, sizes)
        assert d_weight.dtype == d_bias.dtype == torch.float32 and not d_weight[used:].any()
        assert calc_diff(d_weight[:used], w.grad[:used]) < 1e-9 and calc_diff(d_bias, b.grad) < 1e-9
        for index, count in enumerate(counts):
            assert count or not d_bias[index].any()
    assert torch.equal(device.add_bias(rows, weight, bias, counts), moe_kernels.add_bias(rows, weight, bias, sizes))
