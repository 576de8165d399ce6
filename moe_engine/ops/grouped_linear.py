"""One linear layer per expert over rows grouped by expert, with a weight gradient that can be deferred."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.ops.autocast import cast_operands, without_autocast
from moe_engine.ops.first_order import first_order
from moe_engine.ops.linear import widened
from moe_engine.ops.wgrad_queue import WgradQueue, launch, leaf, waits, weight_gradient
from moe_kernels import grouped_gemm, grouped_wgrad


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int] | Tensor, queue: WgradQueue | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.queue, ctx.parameter = counts, queue, leaf(weight)
        return grouped_gemm(x, weight.transpose(1, 2), counts, **launch(queue))

    @staticmethod
    @without_autocast
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (d_out,), (x, weight), counts, queue = grads, ctx.saved_tensors, ctx.counts, ctx.queue
        wide, d_x, d_weight = widened(d_out), None, None
        if ctx.needs_input_grad[0]:
            d_x = grouped_gemm(wide, weight, counts, **launch(queue)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            kept = d_out if waits(queue, ctx.parameter) else wide
            x = x.detach()  # with its graph, all that led to it would wait too

            def make(to: Tensor | None = None) -> Tensor:
                return grouped_wgrad(kept, x, counts, to, **launch(queue))

            d_weight = weight_gradient(queue, ctx.parameter, make, make)
        return d_x, d_weight, None, None


def grouped_linear(x: Tensor, weight: Tensor, counts: list[int] | Tensor, queue: WgradQueue | None = None) -> Tensor:
    """Rows of expert i times weight[i]^T: x [N, in] sorted by expert, weight [e, out, in] -> [N, out].

    counts: rows of each expert, summing to N. An expert without rows gets a zero gradient, not None.
    """
    x, weight = cast_operands(x, weight)
    out: Tensor = _GroupedLinear.apply(x, weight, counts, queue)
    return out
