"""SwiGLU (Shazeer, arXiv 2002.05202) with the routing weight inside, and batch-invariant sigmoids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import moe_kernels
from moe_engine.ops.first_order import first_order
from moe_kernels.reference.route import log_sigmoid, sigmoid

__all__ = ["log_sigmoid", "sigmoid", "swiglu"]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return moe_kernels.swiglu(gate_up, weight)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate_up, weight = ctx.saved_tensors
        return moe_kernels.swiglu_backward(grads[0], gate_up, weight)


def swiglu(gate_up: Tensor, weight: Tensor | None = None) -> Tensor:
    """silu(gate) * up [* weight], in fp32 inside: gate_up [..., 2F], gate first; weight [...] -> [..., F].

    `weight` is an expert's weight for the row: applied here, before the down projection, the projection's output
    is needed neither for the weight's gradient nor row by row.
    """
    flat = gate_up.reshape(-1, gate_up.shape[-1])
    out: Tensor = _SwiGLU.apply(flat, None if weight is None else weight.reshape(-1))
    return out.view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
