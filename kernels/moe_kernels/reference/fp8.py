"""Grouped products, SwiGLU and permutation with block-scaled fp8 operands, in plain torch.

A CPU has no instructions for fp8: products widen their codes to fp32 with the scales and use the fp32 products of
`wide`, which is the fast way. A device multiplies codes and adds up each 128 products before it scales; the two differ
by the rounding of fp32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_kernels.fp8_format import BLOCK, CODE, FORWARD_AMAX, GRADIENT_AMAX, blocks
from moe_kernels.reference.quantize import dequantize_blocks, dequantize_columns, dequantize_rows, quantize_part
from moe_kernels.reference.wide import as_list, grouped_gemm, permute, row_blocks, swiglu, swiglu_backward, unpermute


def grouped_gemm_fp8(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    counts: Sequence[int] | Tensor,
    source: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    num_sms: int | None = None,
    hopper: bool = False,
) -> Tensor:
    """Each group of fp8 rows times its own fp8 matrix transposed, summed in fp32 and rounded once to `dtype`.

    a [N, in] with a_scale [ceil(in/128), N] (`quantize_rows`): rows sorted by group; or, with `source` [N] int64,
    row n is row source[n] of a [R, in]. b [e, out, in] with b_scale [e, ceil(out/128), ceil(in/128)]
    (`quantize_blocks`; its transposed codes and scales give the input gradient). counts [e]: rows of each group,
    summing to at most N. Returns [N, out]; rows after the last group are zero. num_sms, hopper: see `grouped_gemm`.
    """
    wide = dequantize_rows(a, a_scale)
    return grouped_gemm(wide, dequantize_blocks(b, b_scale).transpose(1, 2), as_list(counts), source).to(dtype)


def grouped_wgrad_fp8(
    d_out: Tensor,
    d_out_scale: Tensor,
    a: Tensor,
    a_scale: Tensor,
    counts: Sequence[int] | Tensor,
    out: Tensor | None = None,
    num_sms: int | None = None,
    hopper: bool = False,
) -> Tensor:
    """Weight gradient of each group from operands of `quantize_columns`, in fp32.

    d_out [out, P] with d_out_scale [P/128, out'], a [in, P] with a_scale [P/128, in']: the groups' rows along the
    second dimension, each group in whole tiles of 128. Returns [e, out, in], or `out` (fp32) with the gradient added;
    a group without rows has gradient zero. num_sms, hopper: see `grouped_gemm`.
    """
    counts = as_list(counts)
    grad = a_scale.new_zeros(len(counts), d_out.shape[0], a.shape[0]) if out is None else out
    start = 0
    for group, count in enumerate(counts):
        if count:
            places, tiles = slice(start, start + count), slice(start // BLOCK, start // BLOCK + blocks(count))
            d_wide = dequantize_columns(d_out[:, places], d_out_scale[tiles])
            grad[group].addmm_(d_wide, dequantize_columns(a[:, places], a_scale[tiles]).T)
        start += blocks(count) * BLOCK
    return grad


@torch.no_grad()
def swiglu_fp8(
    gate_up: Tensor, weight: Tensor | None = None, smallest_amax: float = FORWARD_AMAX, power_of_two: bool = True
) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `swiglu` without rounding in between: codes [N, F], scales [ceil(F/128), N]."""
    codes, scale = _rows(gate_up, gate_up.shape[1] // 2)
    for part in row_blocks(gate_up):
        act = swiglu(gate_up[part].float(), None if weight is None else weight[part])
        quantize_part(act, codes[part], scale[:, part], smallest_amax, power_of_two)
    return codes, scale


def swiglu_backward_recompute(
    d_out: Tensor, gate_up: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`swiglu_backward`, and the activation [N, F] again, so that forward need not keep it."""
    return (*swiglu_backward(d_out, gate_up, weight), swiglu(gate_up, weight))


@torch.no_grad()
def swiglu_backward_fp8(
    d_out: Tensor,
    gate_up: Tensor,
    weight: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    power_of_two: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """`swiglu_backward` and the activation again, both cast to fp8 by rows from fp32.

    gate_up [N, 2F] in bf16, or codes with `gate_up_scale` [2F/128, N]. Returns the gradient's codes [N, 2F] and scales
    (smallest amax for gradients), the weight's gradient [N] or None, the activation's codes [N, F] and scales.
    """
    d_codes, d_scale = _rows(gate_up, gate_up.shape[1])
    codes, scale = _rows(gate_up, gate_up.shape[1] // 2)
    d_weight = None if weight is None else torch.empty_like(weight)
    for part in row_blocks(gate_up):
        rows, own = gate_up[part], None if weight is None else weight[part]
        wide = rows.float() if gate_up_scale is None else dequantize_rows(rows, gate_up_scale[:, part])
        d_gate_up, d_own = swiglu_backward(d_out[part].float(), wide, own)
        if d_weight is not None and d_own is not None:
            d_weight[part] = d_own
        quantize_part(d_gate_up, d_codes[part], d_scale[:, part], GRADIENT_AMAX, power_of_two)
        quantize_part(swiglu(wide, own), codes[part], scale[:, part], FORWARD_AMAX, power_of_two)
    return d_codes, d_scale, d_weight, codes, scale


def _rows(like: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Codes and scales by rows for as many rows as `like` has, to be filled."""
    rows = like.shape[0]
    return like.new_empty(rows, dim, dtype=CODE), like.new_empty(blocks(dim), rows, dtype=torch.float32)


def permute_fp8(x: Tensor, x_scale: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """`permute` of codes x [R, D] with their scales [ceil(D/128), R]: source [N] -> [N, D], [ceil(D/128), N]."""
    return permute(x.view(torch.uint8), source).view(x.dtype), x_scale.index_select(1, source)


def unpermute_fp8(rows: Tensor, scale: Tensor, places: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`unpermute` of codes [N, D] with scales [ceil(D/128), N], summed in fp32 and rounded once to `dtype`."""
    return unpermute(dequantize_rows(rows, scale), places).to(dtype)
