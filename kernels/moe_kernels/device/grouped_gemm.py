"""Grouped matrix product of rows sorted by group, in bf16 (see `reference.grouped_gemm`).

Persistent: `num_sms` programs walk over the output tiles. How many tiles there are is known to the device alone
(every group is cut into tiles of its own), so the host launches without reading the group sizes. Weights, and rows
that need no gather, come by tensor descriptors; the stores are masked at a group's end. The sum over K runs in
steps of 64 in one order whatever the number of rows.
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

# Tall tiles for groups of many rows; where groups are small, most of a tall tile would be masked.
TILES = (Tile(128, 256, 64, 8, 3), Tile(64, 256, 64, 4, 3))


@triton.jit
def _grouped_gemm_kernel(
    a_desc, a_ptr, source_ptr, b_desc, out_ptr, counts_ptr, rows, columns, depth, num_groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr,
    GATHER: tl.constexpr, B_BY_COLUMN: tl.constexpr, SWIZZLE: tl.constexpr,
):  # fmt: skip
    row_tiles = count_tiles(counts_ptr, num_groups, rows, GROUPS, ROWS)
    column_tiles = tl.cdiv(columns, COLUMNS)
    for index in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = place_of(index, row_tiles, column_tiles, SWIZZLE)
        group, first, end = find_tile(counts_ptr, num_groups, row_tile, GROUPS, ROWS)
        steps = tl.where(group < num_groups, depth, 0)  # rows after the last group: no product, zeros are stored
        end = tl.where(group < num_groups, end, rows)
        first_column = column_tile * COLUMNS
        row = first + tl.arange(0, ROWS)
        if GATHER:
            taken = tl.load(source_ptr + row, mask=row < end, other=0).to(tl.int64)
            a_row = a_ptr + taken[:, None] * depth
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(0, steps, DEPTH):
            if GATHER:
                step = k + tl.arange(0, DEPTH)
                a = tl.load(a_row + step[None, :], mask=(row < end)[:, None] & (step < depth)[None, :], other=0.0)
            else:
                a = a_desc.load([first, k])
            if B_BY_COLUMN:  # [e, columns, depth] in memory
                b = b_desc.load([group, first_column, k]).reshape(COLUMNS, DEPTH).T
            else:
                b = b_desc.load([group, k, first_column]).reshape(DEPTH, COLUMNS)
            total = tl.dot(a, b, total)
        column = first_column + tl.arange(0, COLUMNS)
        out = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
        inside = (row < end)[:, None] & (column < columns)[None, :]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    counts: Sequence[int] | Tensor,
    source: Tensor | None = None,
    num_sms: int | None = None,
    hopper: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """See `reference.grouped_gemm`. bf16 (or fp16); both rows and b's contiguous dimension in multiples of 8.

    num_sms: how many programs to start, to leave multiprocessors to others; None: one on each. Raises ValueError
    for a size that a tensor descriptor cannot take.
    """
    rows = a.shape[0] if source is None else source.shape[0]
    groups, depth, columns = b.shape
    by_column = b.stride(1) == 1 and b.stride(2) != 1
    stored = b.transpose(1, 2) if by_column else b
    check_aligned(a, "a")
    check_aligned(stored, "b")
    out = torch.empty(rows, columns, dtype=a.dtype, device=a.device)
    if not out.numel() or not depth:
        return out.zero_()
    a, stored = a.contiguous(), stored.contiguous()
    form = hopper_form("gemm", a.device, grouped_gemm) if hopper else None
    if form is not None and form.takes(a, b, by_column):
        result: Tensor = form.hopper_gemm(a, stored, by_column, counts, source, num_sms)
        return result
    tile = tile or choose(TILES, rows, groups)
    bound = (triton.cdiv(rows, tile.rows) + groups) * triton.cdiv(columns, tile.columns)  # at least the tiles there are
    b_block = [1, tile.columns, tile.depth] if by_column else [1, tile.depth, tile.columns]
    _grouped_gemm_kernel[(min(bound, num_sms or multiprocessors(a.device)),)](
        TensorDescriptor.from_tensor(a, [tile.rows, tile.depth]), a, source,
        TensorDescriptor.from_tensor(stored, b_block), out, device_counts(counts, a.device, groups),
        rows, columns, depth, groups, **_constants(tile, group_bound(groups), source is not None, by_column),
        **tile.options(),
    )  # fmt: skip
    return out


def _constants(tile: Tile, groups: int, gather: bool, by_column: bool) -> dict[str, Any]:
    return {
        "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "GROUPS": groups,
        "GATHER": gather, "B_BY_COLUMN": by_column, "SWIZZLE": SWIZZLE,
    }  # fmt: skip


def variants() -> list[Variant]:
    """Every tuning entry in every form, for `aot`."""
    return [
        _variant(tile, gather, by_column) for tile in TILES for gather in (False, True) for by_column in (True, False)
    ]


def _variant(tile: Tile, gather: bool, by_column: bool) -> Variant:
    b_block = [1, tile.columns, tile.depth] if by_column else [1, tile.depth, tile.columns]
    arguments = {
        "a_desc": f"tensordesc<bf16[{tile.rows}, {tile.depth}]>", "a_ptr": "*bf16", "source_ptr": "*i64",
        "b_desc": f"tensordesc<bf16{b_block}>", "out_ptr": "*bf16", "counts_ptr": "*i32",
        "rows": "i32", "columns": "i32", "depth": "i32", "num_groups": "i32",
    }  # fmt: skip
    if not gather:
        arguments["source_ptr"] = "constexpr"
    name = f"grouped_gemm {'fprop' if by_column else 'dgrad'}{' gather' if gather else ''} {tile}"
    constants = _constants(tile, 32, gather, by_column) | ({} if gather else {"source_ptr": None})
    return Variant(name, _grouped_gemm_kernel, arguments, constants, tile.options(), tile, element_bytes=2)
