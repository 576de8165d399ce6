"""Weight gradients of grouped products from block-scaled fp8 operands (see `reference.grouped_wgrad_fp8`).

Both operands were transposed by `quantize_columns`, so that they lie along the sum: rows of a group in whole tiles of
128, filled up with zeros. Each 128 of the sum is a product of its own, scaled by row and by column into fp32.
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
from moe_kernels.device.grouped_wgrad import add_in_halves, check_gradient
from moe_kernels.device.tiles import device_counts, group_bound, group_tiles, multiprocessors
from moe_kernels.device.tuning import Tile, Variant
from moe_kernels.fp8_format import BLOCK

TILES = (Tile(128, 128, BLOCK, 8, 3),)


@triton.jit
def _grouped_wgrad_fp8_kernel(
    d_desc, d_scale_ptr, a_desc, a_scale_ptr, out_ptr, counts_ptr, d_rows, a_rows, num_groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(d_rows, ROWS), tl.cdiv(a_rows, COLUMNS)
    d_width, a_width = tl.cdiv(d_rows, 128) * 128, tl.cdiv(a_rows, 128) * 128  # of the scales: whole blocks
    for index in range(tl.program_id(0), num_groups * row_tiles * column_tiles, tl.num_programs(0)):
        group, tile = index // (row_tiles * column_tiles), index % (row_tiles * column_tiles)
        first_row, first_column = tile % row_tiles * ROWS, tile // row_tiles * COLUMNS
        start, steps = group_tiles(counts_ptr, num_groups, group, GROUPS, 128)
        d_place = d_scale_ptr + tl.cast(start, tl.int64) * d_width + first_row
        a_place = a_scale_ptr + tl.cast(start, tl.int64) * a_width + first_column
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(start, start + steps):
            d = d_desc.load([first_row, k * 128])
            a = a_desc.load([first_column, k * 128])
            d_scale = tl.load(d_place + tl.arange(0, ROWS))
            a_scale = tl.load(a_place + tl.arange(0, COLUMNS))
            d_place += d_width
            a_place += a_width
            total += tl.dot(d, a.T) * d_scale[:, None] * a_scale[None, :]
        if (steps > 0) | (not ACCUMULATE):
            out = out_ptr + tl.cast(group, tl.int64) * d_rows * a_rows
            add_in_halves(out, total, first_row, first_column, d_rows, a_rows, ROWS, COLUMNS, ACCUMULATE)


def grouped_wgrad_fp8(
    d_out: Tensor,
    d_out_scale: Tensor,
    a: Tensor,
    a_scale: Tensor,
    counts: Sequence[int] | Tensor,
    out: Tensor | None = None,
    num_sms: int | None = None,
    hopper: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """See `reference.grouped_wgrad_fp8`; `num_sms` as in `grouped_gemm`."""
    groups, d_rows, a_rows = len(counts), d_out.shape[0], a.shape[0]
    grad = torch.empty(groups, d_rows, a_rows, dtype=torch.float32, device=a.device) if out is None else out
    check_gradient(grad, (groups, d_rows, a_rows))
    if not grad.numel():
        return grad
    d_out, d_out_scale, a, a_scale = (x.contiguous() for x in (d_out, d_out_scale, a, a_scale))
    form = hopper_form("wgrad_fp8", a.device, grouped_wgrad_fp8) if hopper else None
    if form is not None:
        operands = (d_out, d_out_scale, a, a_scale, counts)
        result: Tensor = form.hopper_wgrad_fp8(*operands, grad, out is not None, num_sms)
        return result
    tile = tile or TILES[0]
    tiles = groups * triton.cdiv(d_rows, tile.rows) * triton.cdiv(a_rows, tile.columns)
    _grouped_wgrad_fp8_kernel[(min(tiles, num_sms or multiprocessors(a.device)),)](
        TensorDescriptor.from_tensor(d_out, [tile.rows, BLOCK]), d_out_scale,
        TensorDescriptor.from_tensor(a, [tile.columns, BLOCK]), a_scale,
        grad, device_counts(counts, a.device), d_rows, a_rows, groups,
        **_constants(tile, group_bound(groups), out is not None), **tile.options(),
    )  # fmt: skip
    return grad


def _constants(tile: Tile, groups: int, accumulate: bool) -> dict[str, Any]:
    return {"ROWS": tile.rows, "COLUMNS": tile.columns, "GROUPS": groups, "ACCUMULATE": accumulate}


def variants() -> list[Variant]:
    """Every tuning entry in every form, for `aot`."""
    return [_variant(tile, accumulate) for tile in TILES for accumulate in (True, False)]


def _variant(tile: Tile, accumulate: bool) -> Variant:
    arguments = {
        "d_desc": f"tensordesc<fp8e4nv[{tile.rows}, 128]>", "d_scale_ptr": "*fp32",
        "a_desc": f"tensordesc<fp8e4nv[{tile.columns}, 128]>", "a_scale_ptr": "*fp32",
        "out_ptr": "*fp32", "counts_ptr": "*i32", "d_rows": "i32", "a_rows": "i32", "num_groups": "i32",
    }  # fmt: skip
    name = f"grouped_wgrad_fp8{' accumulate' if accumulate else ''} {tile}"
    constants = _constants(tile, 32, accumulate)
    return Variant(name, _grouped_wgrad_fp8_kernel, arguments, constants, tile.options(), tile, element_bytes=1)
