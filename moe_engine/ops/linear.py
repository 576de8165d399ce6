"""Linear layers whose weight gradient can be deferred, and the router's fp32 linear.

Forward and input gradient are batch-invariant. The weight gradient is one matrix product over all rows; under a
deferring queue it is left there as a closure (see `wgrad_queue`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_engine.ops.autocast import cast_operands, without_autocast
from moe_engine.ops.bias import add_vector
from moe_engine.ops.first_order import first_order
from moe_engine.ops.fp8 import Fp8
from moe_engine.ops.fp8_linear import fp8_linears
from moe_engine.ops.wgrad_queue import WgradQueue, leaf, waits, weight_gradient
from moe_kernels import gemm, matmul_dtype, wgrad


def widened(x: Tensor) -> Tensor:
    """x in the dtype in which its matrix products are computed: itself, but for 16-bit numbers on most CPUs.

    A gradient is so converted once for its two products. What comes of wide rows and a weight is wide again: inside a
    block all stays so from the first product to the last, and where that is a conversion less, nothing is rounded.
    """
    return x.to(matmul_dtype(x.dtype, x.device))


def narrowed(x: Tensor, weight: Tensor) -> Tensor:
    """What a last product gave for `widened` rows, rounded to its weight's format."""
    return x.to(weight.dtype) if x.dtype.itemsize > weight.dtype.itemsize else x


class _Linear(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, queue: WgradQueue | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue, ctx.parameter = queue, leaf(weight)
        return gemm(x, weight.T)

    @staticmethod
    @without_autocast
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (d_out,), (x, weight) = grads, ctx.saved_tensors
        wide = widened(d_out)
        d_x = gemm(wide, weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        d_weight = None
        if ctx.needs_input_grad[1]:
            kept = d_out if waits(ctx.queue, ctx.parameter) else wide
            x = x.detach()  # with its graph, all that led to it would wait too
            d_weight = weight_gradient(
                ctx.queue, ctx.parameter, lambda: wgrad(kept, x), lambda to: wgrad(kept, x, out=to)
            )
        return d_x, d_weight, None


def linear(x: Tensor, weight: Tensor, queue: WgradQueue | None = None) -> Tensor:
    """x W^T: x [..., in], weight [out, in] -> [..., out] in x's dtype: the weight's, or `widened`. Without a queue:
    ordinary autograd."""
    x, weight = cast_operands(x, weight)
    flat = x.reshape(-1, weight.shape[1])
    out: Tensor = _Linear.apply(flat, weight, queue)
    return out.view(*x.shape[:-1], weight.shape[0])


class Linear(nn.Linear):
    """y = x W^T, by option + bias; weight [out, in], bias [out], left uninitialised (whoever knows their global names
    fills them).

    fp8: how it computes in fp8 (`ops.fp8.use_fp8` sets it); None: in the weight's own format.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype, device=device)
        self.fp8: Fp8 | None = None

    def reset_parameters(self) -> None:
        """Draw nothing: torch's generator depends on what was made before, and so on the layout."""

    def forward(self, x: Tensor, queue: WgradQueue | None = None, held: bool = False) -> Tensor:
        return linears(x, [self], queue, held)[0]


def linears(x: Tensor, layers: Sequence[Linear], queue: WgradQueue | None = None, held: bool = False) -> list[Tensor]:
    """Several layers of one input: x [..., in] -> [..., out] each. In fp8 the input is quantised and kept once.

    held: see `fp8_linears`; the others keep x as it is anyway.
    """
    if layers[0].fp8 is not None:
        found = fp8_linears(x, [layer.weight for layer in layers], layers[0].fp8, queue, held)
    else:
        found = [linear(x, layer.weight, queue) for layer in layers]
    return [y if layer.bias is None else add_vector(y, layer.bias) for y, layer in zip(found, layers, strict=True)]


class _WideLinear(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide = torch.promote_types(x.dtype, torch.float32)
        return gemm(x.to(wide), weight.to(wide).T)

    @staticmethod
    @without_autocast
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (d_out,), (x, weight) = grads, ctx.saved_tensors
        d_x = gemm(d_out, weight.to(d_out.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        d_weight = wgrad(d_out, x.to(d_out.dtype)) if ctx.needs_input_grad[1] else None
        return d_x, d_weight


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T computed and returned in fp32 (fp64 for fp64 x) whatever dtype comes in and whatever autocast says.

    x [T, in], weight [out, in] -> [T, out]. For the router, whose near-ties bf16 would decide otherwise; it is
    small, so its weight gradient never waits.
    """
    out: Tensor = _WideLinear.apply(x, weight)
    return out
