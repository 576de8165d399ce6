"""Biases: one for all rows, or each row's expert's, times the row's weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import moe_kernels
from moe_engine.ops.first_order import first_order


class _AddVector(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor) -> Tensor:
        return rows + bias.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        if not ctx.needs_input_grad[1]:
            return grads[0], None
        wide = grads[0].to(torch.promote_types(grads[0].dtype, torch.float32))
        return grads[0], wide.reshape(-1, wide.shape[-1]).sum(dim=0)


def add_vector(rows: Tensor, bias: Tensor) -> Tensor:
    """rows [..., D] plus bias [D], in the rows' dtype; the bias' gradient is summed, and leaves, in fp32 (fp64).

    It is small, so it never waits for W as the weights' do.
    """
    out: Tensor = _AddVector.apply(rows, bias)
    return out


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, counts: list[int] | Tensor) -> Tensor:
        ctx.save_for_backward(weight, bias)
        ctx.counts = counts
        return moe_kernels.add_bias(rows, weight, bias, counts)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        weight, bias = ctx.saved_tensors
        d_weight, d_bias = moe_kernels.add_bias_backward(grads[0], weight, bias, ctx.counts)
        return grads[0], d_weight, d_bias.to(bias.dtype), None


def add_bias(rows: Tensor, weight: Tensor | None, bias: Tensor, counts: list[int] | Tensor) -> Tensor:
    """rows [N, D] sorted by expert plus weight [N] (None: 1) times their expert's bias [e, D], in fp32, rounded once.

    counts [e]: rows of each expert. An expert without rows gets a zero gradient, not None.
    """
    if weight is None:
        weight = torch.ones(rows.shape[0], dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
    out: Tensor = _AddBias.apply(rows, weight, bias, counts)
    return out
