"""A row times the sigmoid of a score of its own: the gate of a shared expert (Qwen2-MoE), in fp32 inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.ops.activation import sigmoid
from moe_engine.ops.first_order import first_order


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        gate = sigmoid((x.to(wide) * weight.to(wide)).sum(dim=-1, keepdim=True))  # [T, 1]
        ctx.save_for_backward(rows, x, weight, gate)
        return (rows * gate).to(rows.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, x, weight, gate = ctx.saved_tensors
        d_out = grads[0].to(gate.dtype)
        d_score = (d_out * rows).sum(dim=-1, keepdim=True) * gate * (1 - gate)  # [T, 1]
        d_weight = (d_score * x).sum(dim=0, keepdim=True)
        return (d_out * gate).to(rows.dtype), (d_score * weight.to(gate.dtype)).to(x.dtype), d_weight


def gate_rows(rows: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """rows * sigmoid(x w): rows [..., D], x [..., I], weight [1, I] -> [..., D] in the rows' dtype.

    The score is a sum of products and no matrix product, which for one column would not be the same in every batch.
    The weight's gradient leaves in fp32 (fp64) and never waits.
    """
    out: Tensor = _Gate.apply(rows.reshape(-1, rows.shape[-1]), x.reshape(-1, x.shape[-1]), weight)
    return out.view(rows.shape)
