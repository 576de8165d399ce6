"""Quantisation to block-scaled fp8 and back (see `fp8_format`), in plain torch.

Codes are round-to-nearest-even of x * (1 / scale) after a clamp to +-448. NaN gives the code of NaN; it does not
enter its tile's scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from moe_kernels.fp8_format import BLOCK, CODE, E4M3_MAX, FORWARD_AMAX, blocks, padded_rows, scale_of, zero_scale
from moe_kernels.reference.wide import BLOCK_ELEMENTS, as_list, block_rows, row_blocks


@torch.no_grad()
def quantize_rows(x: Tensor, smallest_amax: float = FORWARD_AMAX, power_of_two: bool = True) -> tuple[Tensor, Tensor]:
    """Tiles of 1x128 along each row.

    x [R, D] bf16 or fp32 -> codes [R, D] and scales [ceil(D/128), R] fp32: block of columns first, so that the
    scales a matrix product needs for a block of rows lie side by side. D need not be a multiple of 128.
    """
    rows, dim = x.shape
    codes, scale = _codes_and_scales(x, (rows, dim), (blocks(dim), rows))
    if x.dtype == torch.bfloat16 and power_of_two and x.device.type == "cpu" and dim % BLOCK == 0:
        for part in row_blocks(x, 4 * BLOCK_ELEMENTS):
            _quantize_bf16_part(x[part], codes[part], scale[:, part], smallest_amax)
        return codes, scale
    for part in row_blocks(x):
        quantize_part(x[part].to(torch.float32, copy=True), codes[part], scale[:, part], smallest_amax, power_of_two)
    return codes, scale


def _quantize_bf16_part(x: Tensor, codes: Tensor, scale: Tensor, smallest_amax: float) -> None:
    """`quantize_rows` with scales that are powers of two, of bf16 numbers x [r, D] whose tiles are whole."""
    amax = _amax_of_bf16(x)
    if amax is None:
        quantize_part(x.float(), codes, scale, smallest_amax, power_of_two=True)
        return
    factors = scale_of(amax, smallest_amax, power_of_two=True)
    scale.copy_(factors.T)
    # Rounded up, a scale leaves nothing beyond the largest code.
    inverse = factors.reciprocal_()[..., None]
    tiles, code_tiles = (t.unflatten(1, (-1, BLOCK)) for t in (x, codes))  # [r, D/128, 128]
    scratch = inverse.new_empty(block_rows(x), *tiles.shape[1:])  # one for all: memory made anew is slow
    for part in row_blocks(x):
        wide = torch.mul(tiles[part], inverse[part], out=scratch[: part.stop - part.start])
        code_tiles[part] = wide


def quantize_part(wide: Tensor, codes: Tensor, scale: Tensor, smallest_amax: float, power_of_two: bool) -> None:
    """`quantize_rows` of fp32 numbers [r, D], which it overwrites, into given codes [r, D] and scales [D/128, r]."""
    factors = _scales(wide, _amax_by_tile, smallest_amax, power_of_two)  # [r, D/128]
    _to_codes(wide, factors, codes)
    scale.copy_(factors.T)


@torch.no_grad()
def quantize_blocks(
    w: Tensor, smallest_amax: float = FORWARD_AMAX, power_of_two: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of 128x128, for weights.

    w [..., O, I] bf16 or fp32 -> codes [..., O, I], the same codes transposed [..., I, O] (the input gradient's
    product sums over O), and scales [..., ceil(O/128), ceil(I/128)] fp32.
    """
    *many, outer, inner = w.shape
    codes = w.new_empty(w.shape, dtype=CODE)
    transposed = w.new_empty(*many, inner, outer, dtype=CODE)
    scale = w.new_empty(*many, blocks(outer), blocks(inner), dtype=torch.float32)
    stacked = zip(w.reshape(-1, outer, inner), codes.view(-1, outer, inner), transposed.view(-1, inner, outer),
                  scale.view(-1, *scale.shape[-2:]), strict=True)  # fmt: skip
    for matrix, to, to_transposed, to_scale in stacked:
        wide = matrix.to(torch.float32, copy=True)
        to_scale.copy_(_scales(wide, _amax_by_block, smallest_amax, power_of_two))
        _to_codes(wide, to_scale.repeat_interleave(BLOCK, dim=0)[:outer], to)
        to_transposed.copy_(to.T)
    return codes, transposed, scale


@torch.no_grad()
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
    tiles = list(_tiles(counts))
    together = max(1, BLOCK_ELEMENTS // max(1, BLOCK * dim))
    for place in range(0, len(tiles), together):
        some = tiles[place : place + together]
        wide = _widened_tiles(x, x_scale, some)  # [tiles, 128, D]
        factors = _scales(wide, _amax_by_column, smallest_amax, power_of_two)
        scale[place : place + len(some), :dim] = factors
        wide.mul_(1 / factors[:, None]).clamp_(-E4M3_MAX, E4M3_MAX)
        codes[:, place * BLOCK : (place + len(some)) * BLOCK] = wide.flatten(0, 1).T
    return codes, scale


@torch.no_grad()
def quantize_rows_and_columns(
    x: Tensor, counts: Sequence[int] | Tensor, smallest_amax: float = FORWARD_AMAX, power_of_two: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_rows` and `quantize_columns` of the same x, from one read of it where the device can.

    Rows after the last group have codes 0 and the scale of a tile of zeros.
    """
    counts = as_list(counts)
    codes, scale = quantize_rows(x, smallest_amax, power_of_two)
    codes[sum(counts) :] = codes.new_zeros(())
    scale[:, sum(counts) :] = zero_scale(smallest_amax, power_of_two)
    return codes, scale, *quantize_columns(x, counts, smallest_amax, power_of_two)


def dequantize_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes [R, D], scale [ceil(D/128), R] -> [R, D] of `dtype`, rounded once."""
    if codes.device.type == "cpu" and dtype != torch.float32 and codes.shape[1] % 2 == 0 and _are_powers_of_two(scale):
        return _decode_pairs(codes, scale.T.bfloat16()).to(dtype)
    return _times_scale(_widen(codes), scale.T).to(dtype)


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


def _tiles(counts: Sequence[int]) -> Iterator[slice]:
    """Rows of each tile: up to 128 of one group."""
    start = 0
    for count in counts:
        for row in range(start, start + count, BLOCK):
            yield slice(row, min(row + BLOCK, start + count))
        start += count


def _widened_tiles(x: Tensor, x_scale: Tensor | None, tiles: Sequence[slice]) -> Tensor:
    """Consecutive tiles of rows in fp32, each filled up with zeros: [tiles, 128, D]."""
    first, last = tiles[0].start, tiles[-1].stop
    if x_scale is None:
        wide = x[first:last].to(torch.float32, copy=True)
    else:
        wide = dequantize_rows(x[first:last], x_scale[:, first:last])
    if len(wide) < len(tiles) * BLOCK:
        rows, wide = wide, wide.new_zeros(len(tiles) * BLOCK, wide.shape[1])
        for i, tile in enumerate(tiles):
            wide[i * BLOCK : i * BLOCK + tile.stop - tile.start] = rows[tile.start - first : tile.stop - first]
    return wide.unflatten(0, (len(tiles), BLOCK))


def _amax_by_tile(x: Tensor) -> Tensor:
    """Largest number of each tile of 128 in a row: x [..., D], not negative -> [..., ceil(D/128)]."""
    whole = x.shape[-1] // BLOCK
    parts = [x[..., : whole * BLOCK].unflatten(-1, (whole, BLOCK)).amax(-1)] if whole else []
    parts += [x[..., whole * BLOCK :].amax(-1, keepdim=True)] if x.shape[-1] % BLOCK else []
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _amax_by_block(x: Tensor) -> Tensor:
    """[O, I] -> [ceil(O/128), ceil(I/128)]."""
    return _amax_by_tile(_amax_by_tile(x).T).T


def _amax_by_column(x: Tensor) -> Tensor:
    """[tiles, 128, D] -> [tiles, D]."""
    return x.amax(1)


def _amax_of_bf16(x: Tensor) -> Tensor | None:
    """Largest magnitudes [r, ceil(D/128)] fp32 of the tiles of bf16 numbers x [r, D]; None if there is a NaN.

    Of numbers that are not negative the bits have the order of the numbers, and a CPU compares integers faster.
    """
    amax = _amax_by_tile(x.abs().view(torch.int16))
    return None if bool((amax > 0x7F80).any()) else amax.view(torch.bfloat16).float()


def _scales(x: Tensor, amax_of: Callable[[Tensor], Tensor], smallest_amax: float, power_of_two: bool) -> Tensor:
    """The scales of the tiles of fp32 numbers whose largest magnitudes `amax_of` finds. NaN enters none."""
    amax = amax_of(x.abs())
    if amax.isnan().any():
        amax = amax_of(x.abs().nan_to_num_(nan=0.0, posinf=float("inf")))
    return scale_of(amax, smallest_amax, power_of_two)


def _to_codes(wide: Tensor, factors: Tensor, codes: Tensor) -> None:
    """codes [r, D] of fp32 numbers [r, D], which are overwritten, with scales [r, D/128]."""
    codes.copy_(_times_scale(wide, 1 / factors).clamp_(-E4M3_MAX, E4M3_MAX))


def _widen(codes: Tensor) -> Tensor:
    """fp32 values of fp8 codes, by a table: on CPUs three times as fast as torch's conversion."""
    if codes.device.type != "cpu":
        return codes.float()
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(CODE).float()
    values = table.new_empty(codes.shape)
    rows, numbers = values.view(-1, values.shape[-1]), codes.view(torch.uint8).reshape(-1, codes.shape[-1])
    for part in row_blocks(rows):
        index = numbers[part].to(torch.int32, memory_format=torch.contiguous_format)
        torch.index_select(table, 0, index.view(-1), out=rows[part].view(-1))
    return values


def _are_powers_of_two(scale: Tensor) -> bool:
    """Whether bf16 holds the scales, and their products with codes, exactly (NaN does not)."""
    return not bool((scale.view(torch.int32) & 0x7FFFFF).any())


@functools.cache
def _pairs() -> Tensor:
    """What each two codes that lie together stand for, as the bits of two numbers in bf16: [65536] int32."""
    codes = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.uint16).view(CODE)
    return codes.bfloat16().view(torch.int32)


def _decode_pairs(codes: Tensor, scale: Tensor) -> Tensor:
    """bf16 numbers [R, D] of fp8 codes, two at once, times scale [R, ceil(D/128)] in bf16."""
    if codes.stride(1) != 1 or codes.stride(0) % 2 or codes.storage_offset() % 2:
        codes = codes.contiguous()
    pairs, out = codes.view(torch.uint16), codes.new_empty(codes.shape, dtype=torch.bfloat16)
    scratch = codes.new_empty(block_rows(codes), codes.shape[1] // 2, dtype=torch.int32)
    for part in row_blocks(codes):
        index = scratch[: part.stop - part.start].copy_(pairs[part])
        torch.index_select(_pairs(), 0, index.view(-1), out=out[part].view(torch.int32).view(-1))
        _times_scale(out[part], scale[part])
    return out


def _times_scale(values: Tensor, scale: Tensor) -> Tensor:
    """values [..., D] times scale [..., ceil(D/128)], in place."""
    whole = values.shape[-1] // BLOCK
    if whole:
        values[..., : whole * BLOCK].unflatten(-1, (whole, BLOCK)).mul_(scale[..., :whole, None])
    if values.shape[-1] % BLOCK:
        values[..., whole * BLOCK :].mul_(scale[..., whole:])
    return values
