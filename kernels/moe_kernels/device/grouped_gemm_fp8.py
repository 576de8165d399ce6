"""Grouped matrix product of block-scaled fp8 rows (see `reference.grouped_gemm_fp8`).

The tensor cores of sm_90 add fp8 products up in fewer than 32 bits, so each 128 of the sum is a product of its own,
which is multiplied by its two scales into an fp32 total. Scales of the next step are loaded before the product of
this one is waited for. Both operands lie along the sum, as sm_90 wants fp8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels.device.forms import hopper_form
from moe_kernels.device.tiles import (
    SWIZZLE,
    check_aligned,
    choose,
    count_tiles,
    device_counts,
    find_tile,
    group_bound,
    multiprocessors,
    place_of,
)
from moe_kernels.device.tuning import Tile, Variant
from moe_kernels.fp8_format import BLOCK

# 128x128: more bytes reused. 64x128: three programs share a multiprocessor and hide one another's waits.
TILES = (Tile(128, 128, BLOCK, 8, 3), Tile(64, 128, BLOCK, 4, 3, 168))


@triton.jit
def _grouped_gemm_fp8_kernel(
    a_desc, a_ptr, a_scale_ptr, source_ptr, b_desc, b_scale_ptr, out_ptr, counts_ptr,
    rows, a_rows, columns, depth, num_groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, GATHER: tl.constexpr, SWIZZLE: tl.constexpr,
):  # fmt: skip
    row_tiles = count_tiles(counts_ptr, num_groups, rows, GROUPS, ROWS)
    column_tiles = tl.cdiv(columns, COLUMNS)
    depth_blocks = tl.cdiv(depth, 128)
    for index in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = place_of(index, row_tiles, column_tiles, SWIZZLE)
        group, first, end = find_tile(counts_ptr, num_groups, row_tile, GROUPS, ROWS)
        steps = tl.where(group < num_groups, depth_blocks, 0)  # rows after the last group: zeros are stored
        end = tl.where(group < num_groups, end, rows)
        first_column = column_tile * COLUMNS
        b_row = group * columns + first_column  # a tile may reach into the next group: those columns are not stored
        row = first + tl.arange(0, ROWS)
        # Every load of a scale is valid, so that none needs a mask: rows outside a group use their neighbours' scales,
        # and the last step loads its own again.
        taken = tl.minimum(row, rows - 1).to(tl.int64)
        if GATHER:
            taken = tl.load(source_ptr + taken).to(tl.int64)
            a_row = a_ptr + taken[:, None] * depth
        a_place = a_scale_ptr + taken
        block = tl.minimum(group, num_groups - 1).to(tl.int64) * tl.cdiv(columns, 128) + first_column // 128
        b_place = b_scale_ptr + block * depth_blocks
        a_scale, b_scale = tl.load(a_place), tl.load(b_place)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(steps):
            if GATHER:
                step = k * 128 + tl.arange(0, 128)
                a = tl.load(a_row + step[None, :], mask=(step < depth)[None, :], other=0.0)
            else:
                a = a_desc.load([first, k * 128])
            b = b_desc.load([b_row, k * 128])
            scale = a_scale * b_scale
            ahead = tl.minimum(k + 1, steps - 1)  # in 32 bits: 2^31 scales would belong to 275 GB of codes
            a_scale, b_scale = tl.load(a_place + ahead * a_rows), tl.load(b_place + ahead)
            total += tl.dot(a, b.T) * scale[:, None]
        column = first_column + tl.arange(0, COLUMNS)
        out = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
        inside = (row < end)[:, None] & (column < columns)[None, :]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


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
    tile: Tile | None = None,
) -> Tensor:
    """See `reference.grouped_gemm_fp8`; `num_sms` and errors as in `grouped_gemm`. The sum's size: a multiple of 16."""
    rows = a.shape[0] if source is None else source.shape[0]
    groups, columns, depth = b.shape
    check_aligned(a, "a")
    out = torch.empty(rows, columns, dtype=dtype, device=a.device)
    if not out.numel() or not depth:
        return out.zero_()
    a, a_scale, b, b_scale = (x.contiguous() for x in (a, a_scale, b, b_scale))
    form = hopper_form("gemm_fp8", a.device, grouped_gemm_fp8) if hopper else None
    if form is not None:
        result: Tensor = form.hopper_gemm_fp8(a, a_scale, b, b_scale, counts, source, dtype, num_sms)
        return result
    tile = tile or choose(TILES, rows, groups)
    bound = (triton.cdiv(rows, tile.rows) + groups) * triton.cdiv(columns, tile.columns)
    _grouped_gemm_fp8_kernel[(min(bound, num_sms or multiprocessors(a.device)),)](
        TensorDescriptor.from_tensor(a, [tile.rows, BLOCK]), a, a_scale, source,
        TensorDescriptor.from_tensor(b.flatten(0, 1), [tile.columns, BLOCK]), b_scale,
        out, device_counts(counts, a.device, groups), rows, a.shape[0], columns, depth, groups,
        **_constants(tile, group_bound(groups), source is not None), **tile.options(),
    )  # fmt: skip
    return out


def _constants(tile: Tile, groups: int, gather: bool) -> dict[str, Any]:
    return {"ROWS": tile.rows, "COLUMNS": tile.columns, "GROUPS": groups, "GATHER": gather, "SWIZZLE": SWIZZLE}


def variants() -> list[Variant]:
    """Every tuning entry in every form, for `aot`."""
    return [_variant(tile, gather) for tile in TILES for gather in (False, True)]


def _variant(tile: Tile, gather: bool) -> Variant:
    arguments = {
        "a_desc": f"tensordesc<fp8e4nv[{tile.rows}, 128]>", "a_ptr": "*fp8e4nv", "a_scale_ptr": "*fp32",
        "source_ptr": "*i64" if gather else "constexpr", "b_desc": f"tensordesc<fp8e4nv[{tile.columns}, 128]>",
        "b_scale_ptr": "*fp32", "out_ptr": "*bf16", "counts_ptr": "*i32",
        "rows": "i32", "a_rows": "i32", "columns": "i32", "depth": "i32", "num_groups": "i32",
    }  # fmt: skip
    name = f"grouped_gemm_fp8{' gather' if gather else ''} {tile}"
    constants = _constants(tile, 32, gather) | ({} if gather else {"source_ptr": None})
    return Variant(name, _grouped_gemm_fp8_kernel, arguments, constants, tile.options(), tile, element_bytes=1)
