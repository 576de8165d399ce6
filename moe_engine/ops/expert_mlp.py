"""SwiGLU experts as one operation, which keeps for backward its input and the first projection alone.

Three operations in a row keep the rows sorted by expert, the first projection and the second one's input: D + 3F
numbers a row. The sorted rows are copies of the input, and the second projection's input is cheap to make again from
the first's output: here 2F a row, and the input once. The engine's own blocks do not use it: there weight gradients
may have to wait, and `recompute` decides what is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.ops.autocast import cast_operands, without_autocast
from moe_engine.ops.linear import widened
from moe_engine.ops.permute import ExpertOrder
from moe_kernels import grouped_gemm, grouped_wgrad, permute, swiglu, swiglu_backward, unpermute


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, x: Tensor, up: Tensor, down: Tensor, weights: Tensor, order: ExpertOrder, dtype: torch.dtype
    ) -> Tensor:
        rows = permute(x, order.rows.source).to(dtype)
        gate_up = grouped_gemm(rows, up.transpose(1, 2), order.counts)
        ctx.save_for_backward(x, up, down, weights, gate_up)
        ctx.rows, ctx.counts, ctx.dtype = order.rows, order.counts, dtype
        return grouped_gemm(swiglu(gate_up, weights), down.transpose(1, 2), order.counts)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, weights, gate_up = ctx.saved_tensors
        needs_x, needs_up, needs_down, needs_weights, *_ = ctx.needs_input_grad
        counts, wide = ctx.counts, widened(grads[0])
        d_x, d_up, d_down, d_weights = None, None, None, None
        if needs_down:
            d_down = grouped_wgrad(wide, swiglu(gate_up, weights), counts)
        d_hidden = grouped_gemm(wide, down, counts).to(gate_up.dtype)
        d_gate_up, d_weights = swiglu_backward(d_hidden, gate_up, weights)
        del wide, d_hidden
        wide = widened(d_gate_up)
        if needs_up:
            rows = permute(x, ctx.rows.source).to(ctx.dtype)
            d_up = grouped_wgrad(wide, rows, counts)
        if needs_x:
            d_rows = grouped_gemm(wide, up, counts).to(ctx.dtype).to(x.dtype)
            d_x = unpermute(d_rows, ctx.rows.places)
        return d_x, d_up, d_down, d_weights if needs_weights else None, None, None


def expert_mlp(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, order: ExpertOrder) -> Tensor:
    """Received rows x [R, D] through their experts: [N, D] in the order of the experts, each row times its weight.

    up [e, 2F, D], gate rows first; down [e, D, F]; weights [N]. The bits, forward and backward, are those of
    `permute`, `grouped_linear`, `swiglu` and `grouped_linear` one after the other.
    """
    like, up, down = cast_operands(x[:0], up, down)
    out: Tensor = _ExpertMLP.apply(x, up, down, weights, order, like.dtype)
    return out
