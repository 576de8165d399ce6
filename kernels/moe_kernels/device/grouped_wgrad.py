"""Weight gradients of grouped products, summed over each group's rows, in bf16 (see `reference.grouped_wgrad`).

Every group has the same number of output tiles, so the grid is known; the length of a tile's sum is known to the
device alone. Whole steps of rows come by tensor descriptors. A group's last rows, fewer than a step, are masked in
both operands: what follows them belongs to another group or to nobody, and may be NaN.
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
from moe_kernels.device.tiles import check_aligned, device_counts, group_bound, group_rows, multiprocessors
from moe_kernels.device.tuning import Tile, Variant

TILES = (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 4))


@triton.jit
def add_tile(out_ptr, value, row, column, rows, columns, ACCUMULATE: tl.constexpr):
    """Store `value` [ROWS, COLUMNS] at the given places of a matrix [rows, columns], or add it to what is there."""
    place = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if ACCUMULATE:
        value += tl.load(place, mask=inside, other=0.0)
    tl.store(place, value, mask=inside)


@triton.jit
def add_in_halves(out_ptr, value, first_row, first_column, rows, columns,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACCUMULATE: tl.constexpr):  # fmt: skip
    """`add_tile` one half of the columns after the other: a whole wide tile and its addends do not fit in registers."""
    halves = value.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1)
    left, right = tl.split(halves)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS // 2)
    add_tile(out_ptr, left, row, column, rows, columns, ACCUMULATE)
    add_tile(out_ptr, right, row, column + COLUMNS // 2, rows, columns, ACCUMULATE)


@triton.jit
def _grouped_wgrad_kernel(
    d_desc, a_desc, out_ptr, counts_ptr, d_columns, a_columns, num_groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(d_columns, ROWS), tl.cdiv(a_columns, COLUMNS)
    for index in range(tl.program_id(0), num_groups * row_tiles * column_tiles, tl.num_programs(0)):
        group, tile = index // (row_tiles * column_tiles), index % (row_tiles * column_tiles)
        first_row, first_column = tile % row_tiles * ROWS, tile // row_tiles * COLUMNS
        start, count = group_rows(counts_ptr, num_groups, group, GROUPS)
        whole = start + count // DEPTH * DEPTH
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(start, whole, DEPTH):
            total = tl.dot(d_desc.load([k, first_row]).T, a_desc.load([k, first_column]), total)
        if whole < start + count:
            keep = (whole + tl.arange(0, DEPTH) < start + count)[:, None]
            d = tl.where(keep, d_desc.load([whole, first_row]), 0.0)
            a = tl.where(keep, a_desc.load([whole, first_column]), 0.0)
            total = tl.dot(d.T, a, total)
        if (count > 0) | (not ACCUMULATE):
            out = out_ptr + tl.cast(group, tl.int64) * d_columns * a_columns
            add_in_halves(out, total, first_row, first_column, d_columns, a_columns, ROWS, COLUMNS, ACCUMULATE)


def grouped_wgrad(
    d_out: Tensor,
    a: Tensor,
    counts: Sequence[int] | Tensor,
    out: Tensor | None = None,
    num_sms: int | None = None,
    hopper: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """See `reference.grouped_wgrad`. bf16 (or fp16), both column counts multiples of 8; the result is fp32.

    `num_sms` and errors as in `grouped_gemm`.
    """
    groups, d_columns, a_columns = len(counts), d_out.shape[1], a.shape[1]
    check_aligned(d_out, "d_out")
    check_aligned(a, "a")
    grad = torch.empty(groups, d_columns, a_columns, dtype=torch.float32, device=a.device) if out is None else out
    check_gradient(grad, (groups, d_columns, a_columns))
    if not grad.numel():
        return grad
    if not a.shape[0]:
        return grad if out is not None else grad.zero_()
    d_out, a = d_out.contiguous(), a.contiguous()
    form = hopper_form("wgrad", a.device, grouped_wgrad) if hopper else None
    if form is not None:
        result: Tensor = form.hopper_wgrad(d_out, a, counts, grad, out is not None, num_sms)
        return result
    tile = tile or TILES[0]
    tiles = groups * triton.cdiv(d_columns, tile.rows) * triton.cdiv(a_columns, tile.columns)
    _grouped_wgrad_kernel[(min(tiles, num_sms or multiprocessors(a.device)),)](
        TensorDescriptor.from_tensor(d_out, [tile.depth, tile.rows]),
        TensorDescriptor.from_tensor(a, [tile.depth, tile.columns]),
        grad, device_counts(counts, a.device), d_columns, a_columns, groups,
        **_constants(tile, group_bound(groups), out is not None), **tile.options(),
    )  # fmt: skip
    return grad


def check_gradient(grad: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `grad` is a contiguous fp32 tensor of the given shape."""
    if grad.shape != shape or grad.dtype != torch.float32 or not grad.is_contiguous():
        raise ValueError(f"out: {grad.dtype} {list(grad.shape)}: must be contiguous torch.float32 {list(shape)}")


def _constants(tile: Tile, groups: int, accumulate: bool) -> dict[str, Any]:
    sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    return sizes | {"GROUPS": groups, "ACCUMULATE": accumulate}


def variants() -> list[Variant]:
    """Every tuning entry in every form, for `aot`."""
    return [_variant(tile, accumulate) for tile in TILES for accumulate in (True, False)]


def _variant(tile: Tile, accumulate: bool) -> Variant:
    arguments = {
        "d_desc": f"tensordesc<bf16[{tile.depth}, {tile.rows}]>",
        "a_desc": f"tensordesc<bf16[{tile.depth}, {tile.columns}]>",
        "out_ptr": "*fp32", "counts_ptr": "*i32", "d_columns": "i32", "a_columns": "i32", "num_groups": "i32",
    }  # fmt: skip
    name = f"grouped_wgrad{' accumulate' if accumulate else ''} {tile}"
    constants = _constants(tile, 32, accumulate)
    return Variant(name, _grouped_wgrad_kernel, arguments, constants, tile.options(), tile, element_bytes=2)
