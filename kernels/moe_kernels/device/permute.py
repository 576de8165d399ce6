"""Rows copied and summed by an index, also fp8 rows with their scales (see `reference.permute`, `unpermute`).

No atomics: each program makes whole output elements, adding rows up in the order of `places`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.device.tuning import Variant

ROWS, COLUMNS = 4, 1024  # of a program's tile
WARPS = 4


@triton.jit
def _permute_kernel(x_ptr, out_ptr, source_ptr, rows, dim, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    taken = tl.load(source_ptr + row, mask=row < rows, other=0).to(tl.int64)
    inside = (row < rows)[:, None] & (column < dim)[None, :]
    value = tl.load(x_ptr + taken[:, None] * dim + column[None, :], mask=inside)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * dim + column[None, :], value, mask=inside)


@triton.jit
def _scales_kernel(x_ptr, out_ptr, source_ptr, rows, x_rows, COLUMNS: tl.constexpr):
    """Columns of a matrix taken by index: scales lie block of columns first."""
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    taken = tl.load(source_ptr + row, mask=row < rows, other=0).to(tl.int64)
    block = tl.cast(tl.program_id(1), tl.int64)
    tl.store(out_ptr + block * rows + row, tl.load(x_ptr + block * x_rows + taken, mask=row < rows), mask=row < rows)


@triton.jit
def _unpermute_kernel(
    x_ptr, x_scale_ptr, out_ptr, places_ptr, rows, dim, x_rows, slots,
    FROM_CODES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # [ROWS, blocks, 128]: one scale serves a block
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1) * (COLUMNS // 128) + tl.arange(0, COLUMNS // 128)
    column = (block[:, None] * 128 + tl.arange(0, 128)[None, :])[None, :, :]
    total = tl.zeros((ROWS, COLUMNS // 128, 128), dtype=tl.float32)
    for slot in range(slots):
        place = tl.load(places_ptr + row.to(tl.int64) * slots + slot, mask=row < rows, other=-1).to(tl.int64)
        present = (place >= 0)[:, None, None] & (column < dim)
        value = tl.load(x_ptr + place[:, None, None] * dim + column, mask=present, other=0.0).to(tl.float32)
        if FROM_CODES:
            scale = x_scale_ptr + block.to(tl.int64)[None, :] * x_rows + place[:, None]
            value *= tl.load(scale, mask=(place >= 0)[:, None] & (block * 128 < dim)[None, :], other=0.0)[:, :, None]
        total += value
    out = out_ptr + row.to(tl.int64)[:, None, None] * dim + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None, None] & (column < dim))


def permute(x: Tensor, source: Tensor) -> Tensor:
    """See `reference.permute`."""
    rows, dim = source.shape[0], x.shape[1]
    out = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
    if out.numel():
        _permute_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(dim, COLUMNS))](
            x.contiguous(), out, source.contiguous(), rows, dim, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
        )
    return out


def permute_fp8(x: Tensor, x_scale: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.permute_fp8`."""
    rows, blocks = source.shape[0], x_scale.shape[0]
    scale = torch.empty(blocks, rows, dtype=torch.float32, device=x.device)
    if scale.numel():
        _scales_kernel[(triton.cdiv(rows, COLUMNS), blocks)](
            x_scale.contiguous(), scale, source.contiguous(), rows, x.shape[0], COLUMNS=COLUMNS, num_warps=WARPS
        )
    return permute(x, source), scale


def unpermute(rows: Tensor, places: Tensor) -> Tensor:
    """See `reference.unpermute`."""
    return _unpermute(rows, None, places, rows.dtype)


def unpermute_fp8(rows: Tensor, scale: Tensor, places: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """See `reference.unpermute_fp8`."""
    return _unpermute(rows, scale, places, dtype)


def _unpermute(x: Tensor, scale: Tensor | None, places: Tensor, dtype: torch.dtype) -> Tensor:
    (rows, slots), dim = places.shape, x.shape[1]
    out = torch.empty(rows, dim, dtype=dtype, device=x.device)
    if out.numel():
        _unpermute_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(dim, COLUMNS))](
            x.contiguous(), scale, out, places.contiguous(), rows, dim, x.shape[0], slots,
            FROM_CODES=scale is not None, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return out


def variants() -> list[Variant]:
    """Every kernel in bf16 and fp8, for `aot`."""
    tile, options = {"ROWS": ROWS, "COLUMNS": COLUMNS}, {"num_warps": WARPS}
    found = []
    for name, dtype in (("permute", "*bf16"), ("permute_fp8", "*fp8e4nv")):
        arguments = {"x_ptr": dtype, "out_ptr": dtype, "source_ptr": "*i64", "rows": "i32", "dim": "i32"}
        found.append(Variant(name, _permute_kernel, arguments, tile, options))
    arguments = {"x_ptr": "*fp32", "out_ptr": "*fp32", "source_ptr": "*i64", "rows": "i32", "x_rows": "i32"}
    found.append(Variant("permute scales", _scales_kernel, arguments, {"COLUMNS": COLUMNS}, options))
    sizes = {"places_ptr": "*i64", **dict.fromkeys(("rows", "dim", "x_rows", "slots"), "i32")}
    plain: dict[str, Any] = {**tile, "FROM_CODES": False, "x_scale_ptr": None}
    coded: dict[str, Any] = {**tile, "FROM_CODES": True}
    from_codes = {"x_ptr": "*fp8e4nv", "x_scale_ptr": "*fp32", "out_ptr": "*bf16", **sizes}
    found.append(
        Variant("unpermute", _unpermute_kernel, {"x_ptr": "*bf16", "out_ptr": "*bf16", **sizes}, plain, options)
    )
    found.append(Variant("unpermute_fp8", _unpermute_kernel, from_codes, coded, options))
    return found
