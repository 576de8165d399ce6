"""Quantisation to block-scaled fp8 on the device: rows, blocks, transposed columns (see `reference.quantize`).

Bound by memory: 2 bytes read and 1 written for each number and direction. The kernel that makes both directions
reads a tile of 128x128 once. Powers of two come from bits, other scales from exact division (`div_rn`), once for each
scale: approximate forms would give other codes than the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels.device.tiles import device_counts, find_tile, group_bound
from moe_kernels.device.tuning import Variant
from moe_kernels.fp8_format import BLOCK, CODE, FORWARD_AMAX, blocks, padded_rows, zero_scale

ROWS_PER_PROGRAM = 32
ROWS_WARPS = 4
TILE_WARPS = 8


@triton.jit
def scale_of(amax, smallest_amax, zero_scale, POWER_OF_TWO: tl.constexpr):
    """Scale and its inverse for tiles with the given largest magnitudes (fp32)."""
    floored = tl.maximum(amax, smallest_amax)
    if POWER_OF_TWO:
        # The least power of two that is not below amax / 448, by bits: 448 = 1.75 * 2^8, and adding 0x1FFFFF carries
        # into the exponent if the mantissa is above 1.75. The inverse of 2^n has the exponent bits 254 - n.
        bits = ((floored.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - 0x4000000
        scale = bits.to(tl.float32, bitcast=True)
        inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
        infinite = floored == float("inf")
        scale, inverse = tl.where(infinite, float("inf"), scale), tl.where(infinite, 0.0, inverse)
        zero = amax == 0
        return tl.where(zero, zero_scale, scale), tl.where(zero, 1.0, inverse)  # zeros times anything are zeros
    scale = tl.where(amax == 0, zero_scale, tl.div_rn(floored, 448.0))
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def to_codes(x):
    """fp32 -> E4M3, clamped; NaN stays NaN."""
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def _rows_kernel(
    x_ptr, codes_ptr, scale_ptr, rows, dim, smallest_amax, zero_scale,
    POWER_OF_TWO: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    offset = row.to(tl.int64)[:, None] * dim + column[None, :]
    inside = (row < rows)[:, None] & (column < dim)[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    scale, inverse = scale_of(tl.max(tl.abs(x), 1), smallest_amax, zero_scale, POWER_OF_TWO)
    tl.store(codes_ptr + offset, to_codes(x * inverse[:, None]), mask=inside)
    tl.store(scale_ptr + tl.cast(tl.program_id(1), tl.int64) * rows + row, scale, mask=row < rows)


@triton.jit
def _blocks_kernel(
    w_ptr, codes_ptr, transposed_ptr, scale_ptr, outer, inner, smallest_amax, zero_scale,
    POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """One block of 128x128 of one matrix: program ids are (block along inner, block along outer, matrix)."""
    matrix = tl.cast(tl.program_id(2), tl.int64) * outer * inner
    row = tl.program_id(1) * 128 + tl.arange(0, 128)
    column = tl.program_id(0) * 128 + tl.arange(0, 128)
    offset = matrix + row.to(tl.int64)[:, None] * inner + column[None, :]
    inside = (row < outer)[:, None] & (column < inner)[None, :]
    x = tl.load(w_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    scale, inverse = scale_of(tl.max(tl.max(tl.abs(x), 1), 0), smallest_amax, zero_scale, POWER_OF_TWO)
    codes = to_codes(x * inverse)
    tl.store(codes_ptr + offset, codes, mask=inside)
    offset_t = matrix + column.to(tl.int64)[:, None] * outer + row[None, :]
    tl.store(transposed_ptr + offset_t, tl.trans(codes), mask=tl.trans(inside))
    block = tl.cast(tl.program_id(2), tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scale_ptr + block * tl.num_programs(0) + tl.program_id(0), scale)


@triton.jit
def _tiles_kernel(
    x_ptr, x_scale_ptr, counts_ptr, codes_ptr, scale_ptr, transposed_desc, transposed_scale_ptr,
    rows, dim, num_groups, smallest_amax, zero_scale,
    POWER_OF_TWO: tl.constexpr, BY_ROW: tl.constexpr, FROM_CODES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One tile of 128 rows of a group by 128 columns: transposed codes, and codes by row if BY_ROW."""
    tile, block = tl.program_id(0), tl.program_id(1)
    _, first, end = find_tile(counts_ptr, num_groups, tile, GROUPS, 128)
    row, column = first + tl.arange(0, 128), block * 128 + tl.arange(0, 128)
    offset = row.to(tl.int64)[:, None] * dim + column[None, :]
    inside = (row < end)[:, None] & (column < dim)[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if FROM_CODES:
        x *= tl.load(x_scale_ptr + tl.cast(block, tl.int64) * rows + row, mask=row < end, other=0.0)[:, None]
    if BY_ROW:
        scale, inverse = scale_of(tl.max(tl.abs(x), 1), smallest_amax, zero_scale, POWER_OF_TWO)
        written = (row < rows)[:, None] & (column < dim)[None, :]
        tl.store(codes_ptr + offset, to_codes(x * inverse[:, None]), mask=written)
        tl.store(scale_ptr + tl.cast(block, tl.int64) * rows + row, scale, mask=row < rows)
    scale, inverse = scale_of(tl.max(tl.abs(x), 0), smallest_amax, zero_scale, POWER_OF_TWO)
    transposed_desc.store([block * 128, tile * 128], tl.trans(to_codes(x * inverse[None, :])))
    tl.store(transposed_scale_ptr + tl.cast(tile, tl.int64) * tl.num_programs(1) * 128 + column, scale)


def quantize_rows(x: Tensor, smallest_amax: float = FORWARD_AMAX, power_of_two: bool = True) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_rows`."""
    rows, dim = x.shape
    codes = torch.empty(rows, dim, dtype=CODE, device=x.device)
    scale = torch.empty(blocks(dim), rows, dtype=torch.float32, device=x.device)
    if x.numel():
        _rows_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM), blocks(dim))](
            x.contiguous(), codes, scale, rows, dim, smallest_amax, zero_scale(smallest_amax, power_of_two),
            POWER_OF_TWO=power_of_two, BLOCK_ROWS=ROWS_PER_PROGRAM, num_warps=ROWS_WARPS,
        )  # fmt: skip
    return codes, scale


def quantize_blocks(
    w: Tensor, smallest_amax: float = FORWARD_AMAX, power_of_two: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.quantize_blocks`."""
    *many, outer, inner = w.shape
    codes = torch.empty(w.shape, dtype=CODE, device=w.device)
    transposed = torch.empty(*many, inner, outer, dtype=CODE, device=w.device)
    scale = torch.empty(*many, blocks(outer), blocks(inner), dtype=torch.float32, device=w.device)
    if w.numel():
        _blocks_kernel[(blocks(inner), blocks(outer), w.numel() // (outer * inner))](
            w.contiguous(), codes, transposed, scale, outer, inner, smallest_amax,
            zero_scale(smallest_amax, power_of_two), POWER_OF_TWO=power_of_two, num_warps=TILE_WARPS,
        )  # fmt: skip
    return codes, transposed, scale


def quantize_columns(
    x: Tensor,
    counts: Sequence[int] | Tensor,
    smallest_amax: float = FORWARD_AMAX,
    power_of_two: bool = True,
    x_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_columns`."""
    _, _, transposed, transposed_scale = _tiles(x, counts, smallest_amax, power_of_two, x_scale, by_row=False)
    return transposed, transposed_scale


def quantize_rows_and_columns(
    x: Tensor,
    counts: Sequence[int] | Tensor,
    smallest_amax: float = FORWARD_AMAX,
    power_of_two: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.quantize_rows_and_columns`."""
    return _tiles(x, counts, smallest_amax, power_of_two, None, by_row=True)


def _tiles(
    x: Tensor,
    counts: Sequence[int] | Tensor,
    smallest_amax: float,
    power_of_two: bool,
    x_scale: Tensor | None,
    by_row: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (rows, dim), groups = x.shape, len(counts)
    places = padded_rows(rows, groups)
    codes = torch.empty((rows, dim) if by_row else (0, dim), dtype=CODE, device=x.device)
    scale = torch.empty(blocks(dim), codes.shape[0], dtype=torch.float32, device=x.device)
    transposed = torch.empty(dim, places, dtype=CODE, device=x.device)
    transposed_scale = torch.empty(places // BLOCK, blocks(dim) * BLOCK, dtype=torch.float32, device=x.device)
    if transposed.numel():
        _tiles_kernel[(places // BLOCK, blocks(dim))](
            x.contiguous(), x_scale, device_counts(counts, x.device), codes, scale,
            TensorDescriptor.from_tensor(transposed, [BLOCK, BLOCK]), transposed_scale,
            rows, dim, groups, smallest_amax, zero_scale(smallest_amax, power_of_two),
            POWER_OF_TWO=power_of_two, BY_ROW=by_row, FROM_CODES=x_scale is not None, GROUPS=group_bound(groups),
            num_warps=TILE_WARPS,
        )  # fmt: skip
    return codes, scale, transposed, transposed_scale


def variants() -> list[Variant]:
    """Every form of every kernel with bf16 input and powers of two, for `aot`."""
    sizes = {"rows": "i32", "dim": "i32"}
    scales = {"smallest_amax": "fp32", "zero_scale": "fp32"}
    codes = {"codes_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    by_row = Variant(
        "quantize_rows", _rows_kernel, {"x_ptr": "*bf16", **codes, **sizes, **scales},
        {"POWER_OF_TWO": True, "BLOCK_ROWS": ROWS_PER_PROGRAM}, {"num_warps": ROWS_WARPS},
    )  # fmt: skip
    by_block = Variant(
        "quantize_blocks", _blocks_kernel,
        {"w_ptr": "*bf16", **codes, "transposed_ptr": "*fp8e4nv", "outer": "i32", "inner": "i32", **scales},
        {"POWER_OF_TWO": True}, {"num_warps": TILE_WARPS},
    )  # fmt: skip
    tiles = {
        "x_scale_ptr": "*fp32", "counts_ptr": "*i32", **codes, "transposed_desc": "tensordesc<fp8e4nv[128, 128]>",
        "transposed_scale_ptr": "*fp32", **sizes, "num_groups": "i32", **scales,
    }  # fmt: skip
    forms = {
        "quantize_columns": ("*bf16", False, False),
        "quantize_columns of codes": ("*fp8e4nv", False, True),
        "quantize_rows_and_columns": ("*bf16", True, False),
    }
    return [by_row, by_block] + [
        Variant(
            name,
            _tiles_kernel,
            {"x_ptr": dtype, **tiles},
            {"POWER_OF_TWO": True, "BY_ROW": rows, "FROM_CODES": from_codes, "GROUPS": 32},
            {"num_warps": TILE_WARPS},
        )  # fmt: skip
        for name, (dtype, rows, from_codes) in forms.items()
    ]
