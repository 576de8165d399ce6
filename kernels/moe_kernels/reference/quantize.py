"""Quantisation to block-scaled fp8 and back (see `fp8_format`), in plain torch.

Codes are round-to-nearest-even of x * (1 / scale) after a clamp to +-448. NaN gives the code of NaN; it does not
enter its tile's scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.fp8_format import BLOCK, CODE, E4M3_MAX, FORWARD_AMAX, blocks, padded_rows, scale_of, zero_scale
from moe_kernels.reference.wide import as_list, row_blocks


def quantize_rows(x: Tensor, smallest_amax: float = FORWARD_AMAX, power_of_two: bool = True) -> tuple[Tensor, Tensor]:
    """Tiles of 1x128 along each row.

    x [R, D] bf16 or fp32 -> codes [R, D] and scales [ceil(D/128), R] fp32: block of columns first, so that the
    scales a matrix product needs for a block of rows lie side by side. D need not be a multiple of 128.
    """
    rows, dim = x.shape
    codes, scale = _codes_and_scales(x, (rows, dim), (blocks(dim), rows))
    for part in row_blocks(x):
        tiles = _fill(x[part].float(), dim=1).unflatten(1, (-1, BLOCK))  # [rows of the part, D/128, 128]
        part_codes, part_scale = _quantize(tiles, (2,), smallest_amax, power_of_two)
        codes[part] = part_codes.flatten(1)[:, :dim]
        scale[:, part] = part_scale.squeeze(2).T
    return codes, scale


def quantize_blocks(
    w: Tensor, smallest_amax: float = FORWARD_AMAX, power_of_two: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of 128x128, for weights.

    w [..., O, I] bf16 or fp32 -> codes [..., O, I], the same codes transposed [..., I, O] (the input gradient's
    product sums over O), and scales [..., ceil(O/128), ceil(I/128)] fp32.
    """
    outer, inner = w.shape[-2:]
    filled = _fill(_fill(w.float(), dim=-1), dim=-2)
    tiles = filled.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., O/128, 128, I/128, 128]
    codes, scale = _quantize(tiles, (-3, -1), smallest_amax, power_of_two)
    codes = codes.view(filled.shape)[..., :outer, :inner].contiguous()
    return codes, codes.transpose(-1, -2).contiguous(), scale.squeeze(-1).squeeze(-2)


def quantize_columns(
    x: Tensor,
    counts: Sequence[int] | Tensor,
    smallest_amax: float = FORWARD_AMAX,
    power_of_two: bool = True,
    x_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tiles of 128x1 along each column, transposed: the operands of a weight gradient, which sums over rows.

    x [R, D]: bf16 or fp32, or codes of `quantize_rows` with their `x_scale`. counts [e]: rows of each group, summing
    to at most R. Each group starts a new tile, so the result has P = `padded_rows(R, e)` columns:
    codes [D, P] and scales [P/128, D'] fp32, D' = D filled up to a multiple of 128 with the scale of zeros, so that
    a kernel reads whole blocks of them. Columns that hold no row are zero and enter no scale.
    """
    counts, dim = as_list(counts), x.shape[1]
    places = padded_rows(x.shape[0], len(counts))
    codes, scale = _codes_and_scales(x, (dim, places), (places // BLOCK, blocks(dim) * BLOCK))
    codes.view(torch.uint8).zero_()
    scale.fill_(zero_scale(smallest_amax, power_of_two))
    start = place = 0
    for count in counts:
        for row in range(start, start + count, BLOCK):
            tile = slice(row, min(row + BLOCK, start + count))
            wide = x[tile].float() if x_scale is None else dequantize_rows(x[tile], x_scale[:, tile])
            tile_codes, tile_scale = _quantize(wide, (0,), smallest_amax, power_of_two)
            codes[:, place : place + len(wide)] = tile_codes.T
            scale[place // BLOCK, :dim] = tile_scale[0]
            place += BLOCK
        start += count
    return codes, scale


def quantize_rows_and_columns(
    x: Tensor, counts: Sequence[int] | Tensor, smallest_amax: float = FORWARD_AMAX, power_of_two: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_rows` and `quantize_columns` of the same x, from one read of it where the device can.

    Rows after the last group have codes 0 and the scale of a tile of zeros.
    """
    counts = as_list(counts)
    codes, scale = quantize_rows(x, smallest_amax, power_of_two)
    codes[sum(counts) :] = torch.zeros((), dtype=CODE)
    scale[:, sum(counts) :] = zero_scale(smallest_amax, power_of_two)
    return codes, scale, *quantize_columns(x, counts, smallest_amax, power_of_two)


def dequantize_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """codes [R, D], scale [ceil(D/128), R] -> [R, D] fp32."""
    return _times_scale(_widen(codes), scale.T)


def dequantize_columns(codes: Tensor, scale: Tensor) -> Tensor:
    """codes [D, P], scale [P/128, D'] -> [D, P] fp32."""
    return _times_scale(_widen(codes), scale[:, : codes.shape[0]].T)


def dequantize_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """codes [..., O, I], scale [..., ceil(O/128), ceil(I/128)] -> [..., O, I] fp32."""
    by_row = scale.repeat_interleave(BLOCK, dim=-2)[..., : codes.shape[-2], :]
    return _times_scale(_widen(codes), by_row)


def _codes_and_scales(like: Tensor, codes: tuple[int, int], scale: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Tensors to be filled part by part: intermediate fp32 numbers then stay in a CPU's cache."""
    return like.new_empty(codes, dtype=CODE), like.new_empty(scale, dtype=torch.float32)


def _quantize(tiles: Tensor, dims: tuple[int, ...], smallest_amax: float, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Codes shaped like `tiles` (fp32) and scales with `dims` kept as 1; one tile spans `dims`."""
    if tiles.numel() == 0:
        shape = [1 if i - tiles.ndim in dims or i in dims else n for i, n in enumerate(tiles.shape)]
        return tiles.to(CODE), tiles.new_empty(shape)
    amax = torch.maximum(tiles.amax(dims, keepdim=True), -tiles.amin(dims, keepdim=True))
    if amax.isnan().any():
        amax = tiles.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(dims, keepdim=True)
    scale = scale_of(amax, smallest_amax, power_of_two)
    return (tiles * (1 / scale)).clamp_(-E4M3_MAX, E4M3_MAX).to(CODE), scale


def _fill(x: Tensor, dim: int) -> Tensor:
    """x with zeros appended along dim -1 or -2 (or 1 of two) up to a multiple of 128."""
    missing = -x.shape[dim] % BLOCK
    if not missing:
        return x
    return F.pad(x, (0, missing) if dim in (-1, x.ndim - 1) else (0, 0, 0, missing))


def _widen(codes: Tensor) -> Tensor:
    """fp32 values of fp8 codes, by a table: on CPUs three times as fast as torch's conversion."""
    if codes.device.type != "cpu":
        return codes.float()
    table = torch.arange(256, dtype=torch.uint8).view(CODE).float()
    return table.index_select(0, codes.contiguous().view(torch.uint8).flatten().int()).view(codes.shape)


def _times_scale(values: Tensor, scale: Tensor) -> Tensor:
    """values [..., D] times scale [..., ceil(D/128)], in place."""
    whole = values.shape[-1] // BLOCK
    values[..., : whole * BLOCK].unflatten(-1, (whole, BLOCK)).mul_(scale[..., :whole, None])
    values[..., whole * BLOCK :].mul_(scale[..., whole:])
    return values
