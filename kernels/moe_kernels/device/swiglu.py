"""SwiGLU with the expert's weight inside, forward and backward, with the cast to fp8 fused (see `reference`).

Bound by memory. Forward cuts the output into tiles of 32x128; backward walks along a block of rows, because the
gradient of a row's weight is a sum over its whole length.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.device.quantize import quantize_rows, scale_of, to_codes
from moe_kernels.device.tuning import Variant
from moe_kernels.fp8_format import BLOCK, CODE, FORWARD_AMAX, GRADIENT_AMAX, blocks, zero_scale

FORWARD_ROWS = 32
BACKWARD_ROWS = 16
WARPS = 4


@triton.jit
def _store(value, out_ptr, scale_ptr, rows, width, row, first, start, columns, smallest_amax, zero_scale,
           FP8: tl.constexpr, POWER_OF_TWO: tl.constexpr):  # fmt: skip
    """Store a tile [ROWS, 128] at column `start + first` of a matrix [rows, width]; as codes and scales if FP8.

    The tile belongs to the part of `columns` columns from `start` on, and must not reach beyond it.
    """
    column = first + tl.arange(0, 128)
    place = out_ptr + row.to(tl.int64)[:, None] * width + start + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if FP8:
        scale, inverse = scale_of(tl.max(tl.abs(value), 1), smallest_amax, zero_scale, POWER_OF_TWO)
        tl.store(place, to_codes(value * inverse[:, None]), mask=inside)
        tl.store(scale_ptr + tl.cast((start + first) // 128, tl.int64) * rows + row, scale, mask=row < rows)
    else:
        tl.store(place, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_kernel(
    gate_up_ptr, weight_ptr, out_ptr, scale_ptr, rows, hidden, smallest_amax, zero_scale,
    WEIGHTED: tl.constexpr, FP8: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * 128
    column = first + tl.arange(0, 128)
    place = gate_up_ptr + row.to(tl.int64)[:, None] * (2 * hidden) + column[None, :]
    inside = (row < rows)[:, None] & (column < hidden)[None, :]
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + hidden, mask=inside, other=0.0).to(tl.float32)
    act = gate / (1 + tl.exp(-gate)) * up
    if WEIGHTED:
        act *= tl.load(weight_ptr + row, mask=row < rows, other=0.0)[:, None]
    _store(act, out_ptr, scale_ptr, rows, hidden, row, first, 0, hidden, smallest_amax, zero_scale, FP8, POWER_OF_TWO)


@triton.jit
def _swiglu_backward_kernel(
    d_out_ptr, gate_up_ptr, gate_up_scale_ptr, weight_ptr, d_gate_up_ptr, d_scale_ptr, d_weight_ptr, act_ptr,
    act_scale_ptr, rows, hidden, smallest_gradient, zero_gradient, smallest_act, zero_act,
    WEIGHTED: tl.constexpr, FP8: tl.constexpr, FROM_CODES: tl.constexpr, RECOMPUTE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    wide_row = row.to(tl.int64)
    weight = tl.full((ROWS,), 1.0, dtype=tl.float32)
    if WEIGHTED:
        weight = tl.load(weight_ptr + row, mask=valid, other=0.0)
    d_weight = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(0, hidden, 128):
        column = first + tl.arange(0, 128)
        inside = valid[:, None] & (column < hidden)[None, :]
        place = gate_up_ptr + wide_row[:, None] * (2 * hidden) + column[None, :]
        gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(place + hidden, mask=inside, other=0.0).to(tl.float32)
        if FROM_CODES:
            scale_row = gate_up_scale_ptr + tl.cast(first // 128, tl.int64) * rows + row
            up_row = scale_row + tl.cast(hidden // 128, tl.int64) * rows
            gate *= tl.load(scale_row, mask=valid, other=0.0)[:, None]
            up *= tl.load(up_row, mask=valid, other=0.0)[:, None]
        d_act = tl.load(d_out_ptr + wide_row[:, None] * hidden + column[None, :], mask=inside, other=0.0).to(tl.float32)
        sigmoid = 1 / (1 + tl.exp(-gate))
        silu = gate * sigmoid
        if RECOMPUTE:
            _store(silu * up * weight[:, None], act_ptr, act_scale_ptr, rows, hidden, row, first, 0, hidden,
                   smallest_act, zero_act, FP8, POWER_OF_TWO)  # fmt: skip
        if WEIGHTED:
            d_weight += tl.sum(d_act * silu * up, 1)
            d_act *= weight[:, None]
        d_gate = ((1 - sigmoid) * gate + 1) * sigmoid * up * d_act
        _store(d_gate, d_gate_up_ptr, d_scale_ptr, rows, 2 * hidden, row, first, 0, hidden,
               smallest_gradient, zero_gradient, FP8, POWER_OF_TWO)  # fmt: skip
        _store(d_act * silu, d_gate_up_ptr, d_scale_ptr, rows, 2 * hidden, row, first, hidden, hidden,
               smallest_gradient, zero_gradient, FP8, POWER_OF_TWO)  # fmt: skip
    if WEIGHTED:
        tl.store(d_weight_ptr + row, d_weight, mask=valid)


def swiglu(gate_up: Tensor, weight: Tensor | None = None) -> Tensor:
    """See `reference.swiglu`."""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    _forward(gate_up, weight, out, None, FORWARD_AMAX, True)
    return out


def swiglu_fp8(
    gate_up: Tensor, weight: Tensor | None = None, smallest_amax: float = FORWARD_AMAX, power_of_two: bool = True
) -> tuple[Tensor, Tensor]:
    """See `reference.swiglu_fp8`."""
    rows, hidden = gate_up.shape[0], gate_up.shape[1] // 2
    codes = torch.empty(rows, hidden, dtype=CODE, device=gate_up.device)
    scale = torch.empty(blocks(hidden), rows, dtype=torch.float32, device=gate_up.device)
    _forward(gate_up, weight, codes, scale, smallest_amax, power_of_two)
    return codes, scale


def _forward(
    gate_up: Tensor, weight: Tensor | None, out: Tensor, scale: Tensor | None, smallest_amax: float, power_of_two: bool
) -> None:
    rows, hidden = out.shape
    if out.numel():
        _swiglu_kernel[(triton.cdiv(rows, FORWARD_ROWS), blocks(hidden))](
            gate_up.contiguous(), weight, out, scale, rows, hidden, smallest_amax,
            zero_scale(smallest_amax, power_of_two), WEIGHTED=weight is not None, FP8=scale is not None,
            POWER_OF_TWO=power_of_two, ROWS=FORWARD_ROWS, num_warps=WARPS,
        )  # fmt: skip


def swiglu_backward(d_out: Tensor, gate_up: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """See `reference.swiglu_backward`."""
    d_gate_up = torch.empty_like(gate_up)
    return d_gate_up, _backward(d_out, gate_up, None, weight, (d_gate_up, None), None, True)


def swiglu_backward_recompute(
    d_out: Tensor, gate_up: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """See `reference.swiglu_backward_recompute`."""
    d_gate_up, act = torch.empty_like(gate_up), torch.empty_like(d_out)
    return d_gate_up, _backward(d_out, gate_up, None, weight, (d_gate_up, None), (act, None), True), act


def swiglu_backward_fp8(
    d_out: Tensor,
    gate_up: Tensor,
    weight: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    power_of_two: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """See `reference.swiglu_backward_fp8`. Not fused where gate and up share a tile (hidden no multiple of 128)."""
    rows, hidden = d_out.shape
    if hidden % BLOCK:
        if gate_up_scale is not None:
            raise ValueError(f"hidden={hidden}: codes of gate_up need a multiple of {BLOCK}")
        d_gate_up, d_weight, act = swiglu_backward_recompute(d_out, gate_up, weight)
        by_row = quantize_rows(d_gate_up, GRADIENT_AMAX, power_of_two)
        return (*by_row, d_weight, *quantize_rows(act, FORWARD_AMAX, power_of_two))
    codes = [torch.empty(rows, n, dtype=CODE, device=d_out.device) for n in (2 * hidden, hidden)]
    scales = [torch.empty(blocks(n), rows, dtype=torch.float32, device=d_out.device) for n in (2 * hidden, hidden)]
    d_weight = _backward(
        d_out, gate_up, gate_up_scale, weight, (codes[0], scales[0]), (codes[1], scales[1]), power_of_two
    )
    return codes[0], scales[0], d_weight, codes[1], scales[1]


def _backward(
    d_out: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    weight: Tensor | None,
    d_gate_up: tuple[Tensor, Tensor | None],
    act: tuple[Tensor, Tensor | None] | None,
    power_of_two: bool,
) -> Tensor | None:
    """Fill d_gate_up and act (values, scales); returns the weight's gradient."""
    rows, hidden = d_out.shape
    d_weight = None if weight is None else torch.empty_like(weight)
    if rows:
        _swiglu_backward_kernel[(triton.cdiv(rows, BACKWARD_ROWS),)](
            d_out.contiguous(), gate_up.contiguous(), gate_up_scale, weight, *d_gate_up, d_weight,
            *(act or (None, None)), rows, hidden, GRADIENT_AMAX, zero_scale(GRADIENT_AMAX, power_of_two),
            FORWARD_AMAX, zero_scale(FORWARD_AMAX, power_of_two), WEIGHTED=weight is not None,
            FP8=d_gate_up[1] is not None, FROM_CODES=gate_up_scale is not None, RECOMPUTE=act is not None,
            POWER_OF_TWO=power_of_two, ROWS=BACKWARD_ROWS, num_warps=WARPS,
        )  # fmt: skip
    return d_weight


def variants() -> list[Variant]:
    """Forward and backward in bf16 and fused with fp8, with weights, for `aot`."""
    return [_forward_variant(False), _forward_variant(True), _backward_variant(False), _backward_variant(True)]


def _forward_variant(fp8: bool) -> Variant:
    arguments = {
        "gate_up_ptr": "*bf16", "weight_ptr": "*fp32", "out_ptr": "*fp8e4nv" if fp8 else "*bf16",
        "rows": "i32", "hidden": "i32", "smallest_amax": "fp32", "zero_scale": "fp32",
    } | ({"scale_ptr": "*fp32"} if fp8 else {})  # fmt: skip
    constants: dict[str, Any] = {"WEIGHTED": True, "FP8": fp8, "POWER_OF_TWO": True, "ROWS": FORWARD_ROWS}
    constants |= {} if fp8 else {"scale_ptr": None}
    return Variant(f"swiglu{'_fp8' if fp8 else ''}", _swiglu_kernel, arguments, constants, {"num_warps": WARPS})


def _backward_variant(fp8: bool) -> Variant:
    value = "*fp8e4nv" if fp8 else "*bf16"
    arguments = {
        "d_out_ptr": "*bf16", "gate_up_ptr": value, "weight_ptr": "*fp32", "d_gate_up_ptr": value,
        "d_weight_ptr": "*fp32", "act_ptr": value, "rows": "i32", "hidden": "i32",
    }  # fmt: skip
    arguments |= dict.fromkeys(("smallest_gradient", "zero_gradient", "smallest_act", "zero_act"), "fp32")
    scales = ("gate_up_scale_ptr", "d_scale_ptr", "act_scale_ptr")
    constants: dict[str, Any] = {"WEIGHTED": True, "FP8": fp8, "FROM_CODES": fp8, "RECOMPUTE": True}
    constants |= {"POWER_OF_TWO": True, "ROWS": BACKWARD_ROWS}
    if fp8:
        arguments |= dict.fromkeys(scales, "*fp32")
    else:
        constants |= dict.fromkeys(scales)
    name = f"swiglu_backward{'_fp8' if fp8 else '_recompute'}"
    return Variant(name, _swiglu_backward_kernel, arguments, constants, {"num_warps": WARPS})
