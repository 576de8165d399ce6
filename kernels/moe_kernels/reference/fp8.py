"""Grouped matrix products of block-scaled fp8 operands, in plain torch.

Codes are widened to fp32 with their scales and multiplied by the fp32 products of `wide`: a CPU has no instructions
for fp8, and this is the fast way. A device multiplies codes and adds up each 128 products before it scales; the two
differ by the rounding of fp32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_kernels.fp8_format import BLOCK, blocks
from moe_kernels.reference.quantize import dequantize_blocks, dequantize_columns, dequantize_rows
from moe_kernels.reference.wide import as_list, grouped_gemm


def grouped_gemm_fp8(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    counts: Sequence[int] | Tensor,
    source: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    num_sms: int | None = None,
) -> Tensor:
    """Each group of fp8 rows times its own fp8 matrix transposed, summed in fp32 and rounded once to `dtype`.

    a [N, in] with a_scale [ceil(in/128), N] (`quantize_rows`): rows sorted by group; or, with `source` [N] int64,
    row n is row source[n] of a [R, in]. b [e, out, in] with b_scale [e, ceil(out/128), ceil(in/128)]
    (`quantize_blocks`; its transposed codes and scales give the input gradient). counts [e]: rows of each group,
    summing to at most N. Returns [N, out]; rows after the last group are zero. num_sms: see `grouped_gemm`.
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
) -> Tensor:
    """Weight gradient of each group from operands of `quantize_columns`, in fp32.

    d_out [out, P] with d_out_scale [P/128, out'], a [in, P] with a_scale [P/128, in']: the groups' rows along the
    second dimension, each group in whole tiles of 128. Returns [e, out, in], or `out` (fp32) with the gradient added;
    a group without rows has gradient zero. num_sms: see `grouped_gemm`.
    """
    d_wide, a_wide = dequantize_columns(d_out, d_out_scale), dequantize_columns(a, a_scale)
    counts = as_list(counts)
    grad = a_wide.new_zeros(len(counts), d_out.shape[0], a.shape[0]) if out is None else out
    start = 0
    for group, count in enumerate(counts):
        stop = start + blocks(count) * BLOCK
        if count:
            grad[group].addmm_(d_wide[:, start:stop], a_wide[:, start:stop].T)
        start = stop
    return grad
