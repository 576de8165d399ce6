"""SwiGLU experts as one operation, which keeps for backward its input and the first projection alone.

Four operations in a row keep the rows sorted by expert, the first projection and the second one's input: D + 3F
numbers a row. The sorted rows are copies of the input, and the second projection's input is cheap to make again from
the first's output: here 2F a row, and the input once. The engine's own blocks do not use it: there weight gradients
may have to wait, and `recompute` decides what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_engine.ops import expert_walk
from moe_engine.ops.autocast import cast_operands, without_autocast
from moe_engine.ops.backend import kernels_of
from moe_engine.ops.expert_walk import Gradients, Operands
from moe_engine.ops.first_order import first_order
from moe_engine.ops.permute import ExpertOrder
from moe_engine.ops.wgrad_queue import gradient_dtype


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        down: Tensor,
        weights: Tensor,
        order: ExpertOrder,
        dtype: torch.dtype,
        backend: str,
        recorded: bool,
    ) -> Tensor:
        ctx.kernels = kernels_of(backend, x, dtype)
        ctx.walks = backend in ("auto", "torch") and expert_walk.walks(x, up, down)
        keep = recorded and any(ctx.needs_input_grad)
        operands = Operands(x, up, down, weights, order.rows, order.counts, dtype)
        out, gate_up = expert_walk.forward(operands, keep) if ctx.walks else _forward(ctx.kernels, operands, keep)
        ctx.save_for_backward(x, up, down, weights, gate_up)
        ctx.rows, ctx.counts, ctx.dtype = order.rows, order.counts, dtype
        ctx.grad_dtypes = _gradient_dtype(up), _gradient_dtype(down)
        return out

    @staticmethod
    @without_autocast
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, weights, gate_up = ctx.saved_tensors
        operands = Operands(x, up, down, weights, ctx.rows, ctx.counts, ctx.dtype)
        *needs, needs_weights = ctx.needs_input_grad[:4]
        if ctx.walks:
            found = expert_walk.backward(grads[0], operands, gate_up, needs, ctx.grad_dtypes)
        else:
            found = _backward(ctx.kernels, grads[0], operands, gate_up, needs)
        return found.x, found.up, found.down, found.weights if needs_weights else None, None, None, None, None


def _gradient_dtype(weight: Tensor) -> torch.dtype:
    return gradient_dtype(weight) if weight.is_leaf else weight.dtype


def _forward(kernels: Any, operands: Operands, keep: bool) -> tuple[Tensor, Tensor | None]:
    """`expert_walk.forward`, an operator after the other."""
    x, up, down, weights, rows, counts, dtype = operands
    gate_up = kernels.grouped_gemm(kernels.permute(x, rows.source).to(dtype), up.transpose(1, 2), counts)
    out = kernels.grouped_gemm(kernels.swiglu(gate_up, weights), down.transpose(1, 2), counts)
    return kernels.unpermute(out, rows.places), gate_up if keep else None


def _backward(kernels: Any, d_out: Tensor, operands: Operands, gate_up: Tensor, needs: Sequence[bool]) -> Gradients:
    """`expert_walk.backward`, an operator after the other; autograd brings the gradients into their formats."""
    x, up, down, weights, rows, counts, dtype = operands
    needs_x, needs_up, needs_down = needs
    d_x, d_up, d_down = None, None, None
    d_out = kernels.permute(d_out, rows.source)
    if needs_down:
        d_down = kernels.grouped_wgrad(d_out, kernels.swiglu(gate_up, weights), counts)
    d_hidden = kernels.grouped_gemm(d_out, down, counts)
    d_gate_up, d_weights = kernels.swiglu_backward(d_hidden, gate_up, weights)
    del d_out, d_hidden
    if needs_up:
        d_up = kernels.grouped_wgrad(d_gate_up, kernels.permute(x, rows.source).to(dtype), counts)
    if needs_x:
        d_rows = kernels.grouped_gemm(d_gate_up, up, counts).to(x.dtype)
        d_x = kernels.unpermute(d_rows, rows.places)
    return Gradients(d_x, d_up, d_down, d_weights)


def expert_mlp(
    x: Tensor, up: Tensor, down: Tensor, weights: Tensor, order: ExpertOrder, backend: str = "auto"
) -> Tensor:
    """Received rows x [R, D] through their experts, each expert's times its weight, summed in slot order: [R, D].

    up [e, 2F, D], gate rows first; down [e, D, F]; weights [N]. The bits, forward and backward, are those of
    `permute`, `grouped_linear`, `swiglu`, `grouped_linear` and `unpermute` one after the other; on a CPU calculated a
    few experts at a time (`ops.expert_walk`). backend: whose kernels compute (`ops.backend`).
    """
    like, up, down = cast_operands(x[:0], up, down)
    out: Tensor = _ExpertMLP.apply(x, up, down, weights, order, like.dtype, backend, torch.is_grad_enabled())
    return out
