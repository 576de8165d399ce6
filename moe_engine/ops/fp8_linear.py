"""Linear layers and SwiGLU MLPs whose three matrix products take fp8 codes and scales, under autograd.

Of a product's three uses, forward multiplies rows of activations (tiles of 1x128) by the weight (128x128), the input
gradient rows of gradients by the transposed weight, and the weight gradient sums over rows, so that both its operands
have tiles of 128x1. All sum in fp32. What is kept for backward are the codes of the inputs: a byte a number, and a
scale for 128. With power-of-two scales their change of tiles is exact but for numbers that leave the range of codes.

Dense layers are one group of the grouped products. Weight gradients may wait in a queue (`wgrad_queue`): it then holds
codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import moe_kernels
from moe_engine.ops.autocast import cast_operands, without_autocast
from moe_engine.ops.coded import CodedGradient
from moe_engine.ops.first_order import first_order
from moe_engine.ops.fp8 import Codes, Fp8, WeightCodes, dequantize, quantize
from moe_engine.ops.permute import RowMap
from moe_engine.ops.wgrad_queue import WgradQueue, launch, leaf, weight_gradient
from moe_kernels.fp8_format import FORWARD_AMAX, GRADIENT_AMAX

Counts = list[int] | Tensor  # rows of each group; a tensor in a compiled graph


def _whole(x: Tensor) -> Counts:
    """All rows as one group."""
    if torch.compiler.is_compiling():
        return torch.full((1,), x.shape[0], device=x.device)
    return [x.shape[0]]


def _product(
    x: Codes, weight: WeightCodes, counts: Counts, dtype: torch.dtype, source: Tensor | None, queue: WgradQueue | None
) -> Tensor:
    """Rows of each group times its weight transposed: [N, out]; with `source`, row n is row source[n] of x."""
    return moe_kernels.grouped_gemm_fp8(
        x.codes, x.scale, weight.codes, weight.scale, counts, source, dtype, **launch(queue)
    )


def _input_gradient(
    d_out: Codes, weight: WeightCodes, counts: Counts, dtype: torch.dtype, queue: WgradQueue | None
) -> Tensor:
    return moe_kernels.grouped_gemm_fp8(
        d_out.codes, d_out.scale, *weight.transposed(), counts, None, dtype, **launch(queue)
    )


class _OutputGradient:
    """The gradient of a product's output in the forms that its two products take."""

    def __init__(self, d_out: Tensor, counts: Counts, fp8: Fp8, for_weight: bool) -> None:
        self.counts, self.fp8 = counts, fp8
        self.columns: tuple[Tensor, Tensor] | None = None
        self.wide: Tensor | None = None
        if for_weight and fp8.wgrad == "fp8":
            codes, scale, *columns = moe_kernels.quantize_rows_and_columns(
                d_out, counts, GRADIENT_AMAX, fp8.power_of_two
            )
            self.rows, self.columns = Codes(codes, scale), (columns[0], columns[1])
        else:
            self.rows = quantize(d_out, gradient=True, power_of_two=fp8.power_of_two)
            self.wide = d_out if for_weight else None

    @classmethod
    def of_rows(
        cls, rows: Codes, counts: Counts, fp8: Fp8, for_weight: bool, dtype: torch.dtype = torch.bfloat16
    ) -> _OutputGradient:
        """From a gradient that is in fp8 by rows already; `dtype`: what it is widened to where that is wanted."""
        made = cls.__new__(cls)
        made.counts, made.fp8, made.rows, made.wide, made.columns = counts, fp8, rows, None, None
        if for_weight and fp8.wgrad == "fp8":
            made.columns = moe_kernels.quantize_columns(
                rows.codes, counts, GRADIENT_AMAX, fp8.power_of_two, x_scale=rows.scale
            )
        elif for_weight:
            made.wide = dequantize(rows, dtype)
        return made

    def weight_gradient(
        self, x: Codes, source: Tensor | None, shape: torch.Size, queue: WgradQueue | None
    ) -> Callable[[], Tensor]:
        """What makes the weight's gradient, of this shape, from the product's input; holds no more than it needs."""
        counts, wide, columns, power_of_two = self.counts, self.wide, self.columns, self.fp8.power_of_two

        def make() -> Tensor:
            rows = x if source is None else Codes(*moe_kernels.permute_fp8(x.codes, x.scale, source))
            if columns is None:
                assert wide is not None
                numbers = dequantize(rows, wide.dtype)
                return moe_kernels.grouped_wgrad(wide, numbers, counts, **launch(queue)).view(shape)
            by_column = moe_kernels.quantize_columns(rows.codes, counts, FORWARD_AMAX, power_of_two, x_scale=rows.scale)
            return moe_kernels.grouped_wgrad_fp8(*columns, *by_column, counts, **launch(queue)).view(shape)

        return make


class _Linears(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, x: Tensor, counts: Counts, fp8: Fp8, queue: WgradQueue | None, held: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        codes = quantize(x, power_of_two=fp8.power_of_two)
        ctx.save_for_backward(*((x,) if held else (codes.codes, codes.scale)))
        ctx.fp8, ctx.queue, ctx.counts, ctx.dtype = fp8, queue, counts, x.dtype
        ctx.parameters, ctx.weights = [leaf(w) for w in weights], [fp8.weight(w) for w in weights]
        ctx.shapes = [w.shape for w in weights]
        return tuple(_product(codes, weight, ctx.counts, x.dtype, None, queue) for weight in ctx.weights)

    @staticmethod
    @without_autocast
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, power_of_two = ctx.saved_tensors, ctx.fp8.power_of_two
        codes = Codes(*saved) if len(saved) == 2 else quantize(saved[0], power_of_two=power_of_two)
        d_x, d_weights = None, []
        several = len(grads) > 1  # their input gradients are summed in fp32
        for d_out, weight, parameter, shape, needed in zip(
            grads, ctx.weights, ctx.parameters, ctx.shapes, ctx.needs_input_grad[5:], strict=True
        ):
            gradient = _OutputGradient(d_out, ctx.counts, ctx.fp8, needed)
            if ctx.needs_input_grad[0]:
                dtype = torch.float32 if several else ctx.dtype
                part = _input_gradient(gradient.rows, weight, ctx.counts, dtype, ctx.queue)
                d_x = part if d_x is None else d_x.add_(part)
            make = gradient.weight_gradient(codes, None, shape, ctx.queue)
            d_weights.append(weight_gradient(ctx.queue, parameter, make) if needed else None)
        return None if d_x is None else d_x.to(ctx.dtype), None, None, None, None, *d_weights


def fp8_linears(
    x: Tensor, weights: Sequence[Tensor], fp8: Fp8, queue: WgradQueue | None = None, held: bool = False
) -> list[Tensor]:
    """x W^T for several W: x [..., in], weights [out, in] each -> [..., out] each. x is quantised and kept once.

    held: what made x keeps it for its own backward, so x is kept, which costs nothing, and quantised again there.
    """
    x, *cast = cast_operands(x, *weights)
    flat = x.reshape(-1, x.shape[-1])
    outs = _Linears.apply(flat, _whole(flat), fp8, queue, held, *cast)
    return [out.view(*x.shape[:-1], out.shape[-1]) for out in outs]


def fp8_grouped_linear(x: Tensor, weight: Tensor, counts: Counts, fp8: Fp8, queue: WgradQueue | None = None) -> Tensor:
    """`grouped_linear` in fp8: x [N, in] sorted by group, counts of each, weight [e, out, in] -> [N, out]."""
    x, weight = cast_operands(x, weight)
    out: Tensor = _Linears.apply(x, counts, fp8, queue, False, weight)[0]
    return out


@dataclass(frozen=True)
class Grouped:
    """Rows of a grouped MLP: `rows` makes of its input [R, D] N rows sorted by group, and sums what comes of them;
    counts: of each group.

    codes, gradient: of an input that came in fp8 and that x only stands for (`ops.coded`).
    """

    rows: RowMap
    counts: Counts
    codes: Codes | None = None
    gradient: CodedGradient | None = None


class _MLP(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        row_weights: Tensor | None,
        grouped: Grouped | None,
        fp8: Fp8,
        queue: WgradQueue | None,
    ) -> Tensor:
        counts, source = (_whole(x), None) if grouped is None else (grouped.counts, grouped.rows.source)
        gate_up_codes, down_codes = fp8.weight(gate_up_weight), fp8.weight(down_weight)
        codes = None if grouped is None else grouped.codes
        if codes is None:
            codes = quantize(x, power_of_two=fp8.power_of_two)
        gate_up = _product(codes, gate_up_codes, counts, x.dtype, source, queue)  # [N, 2F]
        kept = quantize(gate_up, power_of_two=fp8.power_of_two)
        hidden = Codes(*moe_kernels.swiglu_fp8(gate_up, row_weights, FORWARD_AMAX, fp8.power_of_two))  # [N, F]
        ctx.save_for_backward(codes.codes, codes.scale, kept.codes, kept.scale, row_weights)
        ctx.counts, ctx.fp8, ctx.queue, ctx.dtype = counts, fp8, queue, x.dtype
        ctx.rows, ctx.gradient = (None, None) if grouped is None else (grouped.rows, grouped.gradient)
        ctx.codes, ctx.parameters = (gate_up_codes, down_codes), (leaf(gate_up_weight), leaf(down_weight))
        ctx.shapes = gate_up_weight.shape, down_weight.shape
        out = _product(hidden, down_codes, counts, x.dtype, None, queue)
        if grouped is None:
            return out
        out = moe_kernels.unpermute(out, grouped.rows.places)
        if grouped.gradient is not None:
            grouped.gradient.made(out)
        return out

    @staticmethod
    @without_autocast
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scale, kept_codes, kept_scale, row_weights = ctx.saved_tensors
        x, kept, counts, fp8 = Codes(x_codes, x_scale), Codes(kept_codes, kept_scale), ctx.counts, ctx.fp8
        (gate_up_codes, down_codes), needed = ctx.codes, ctx.needs_input_grad
        d_out = _gradient_of_rows(grads[0], ctx.rows, ctx.gradient, counts, fp8, needed[2])
        d_hidden = _input_gradient(d_out.rows, down_codes, counts, ctx.dtype, ctx.queue)
        d_gate_up, d_row_weights, hidden = _swiglu_backward(d_hidden, kept, row_weights, counts, fp8, needed[1])
        d_down = d_gate = d_x = None
        if needed[2]:
            make = d_out.weight_gradient(hidden, None, ctx.shapes[1], ctx.queue)
            d_down = weight_gradient(ctx.queue, ctx.parameters[1], make)
        source = None if ctx.rows is None else ctx.rows.source
        if needed[1]:
            make = d_gate_up.weight_gradient(x, source, ctx.shapes[0], ctx.queue)
            d_gate = weight_gradient(ctx.queue, ctx.parameters[0], make)
        if needed[0]:
            d_x = _input_gradient(d_gate_up.rows, gate_up_codes, counts, ctx.dtype, ctx.queue)
            d_x = d_x if ctx.rows is None else moe_kernels.unpermute(d_x, ctx.rows.places)
        return d_x, d_gate, d_down, d_row_weights, None, None, None


def _gradient_of_rows(
    d_out: Tensor, rows: RowMap | None, coded: CodedGradient | None, counts: Counts, fp8: Fp8, for_weight: bool
) -> _OutputGradient:
    """Of an MLP's output [R, D], for the rows of its products."""
    codes = None if coded is None else coded.take(d_out)
    if rows is None or codes is None:
        d_out = d_out if rows is None else moe_kernels.permute(d_out, rows.source)
        return _OutputGradient(d_out, counts, fp8, for_weight)
    of_copies = Codes(*moe_kernels.permute_fp8(codes.codes, codes.scale, rows.source))
    return _OutputGradient.of_rows(of_copies, counts, fp8, for_weight, d_out.dtype)


def _swiglu_backward(
    d_hidden: Tensor, kept: Codes, row_weights: Tensor | None, counts: Counts, fp8: Fp8, for_weight: bool
) -> tuple[_OutputGradient, Tensor | None, Codes]:
    """The gradient of gate|up, that of the rows' weights, and the activation again, from the kept gate|up."""
    if fp8.wgrad == "fp8":
        d_codes, d_scale, d_weights, *hidden = moe_kernels.swiglu_backward_fp8(
            d_hidden, kept.codes, row_weights, kept.scale, fp8.power_of_two
        )
        gradient = _OutputGradient.of_rows(Codes(d_codes, d_scale), counts, fp8, for_weight)
        return gradient, d_weights, Codes(hidden[0], hidden[1])
    gate_up = dequantize(kept, d_hidden.dtype)
    d_gate_up, d_weights, act = moe_kernels.swiglu_backward_recompute(d_hidden, gate_up, row_weights)
    return _OutputGradient(d_gate_up, counts, fp8, for_weight), d_weights, quantize(act, power_of_two=fp8.power_of_two)


def fp8_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    fp8: Fp8,
    queue: WgradQueue | None = None,
    row_weights: Tensor | None = None,
    grouped: Grouped | None = None,
) -> Tensor:
    """down(silu(gate(x)) * up(x) [* row_weights]) with all products in fp8; keeps the codes of x and of gate|up.

    Dense: x [T, D], gate_up [2F, D], down [D, F] -> [T, D]. Grouped: x [R, D], gate_up [e, 2F, D], down [e, D, F],
    row_weights [N]; the results of a row's copies are summed in fp32 in the order of `places` -> [R, D].
    """
    x, gate_up, down = cast_operands(x, gate_up, down)
    out: Tensor = _MLP.apply(x, gate_up, down, row_weights, grouped, fp8, queue)
    return out
