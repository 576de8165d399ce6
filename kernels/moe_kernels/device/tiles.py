"""What the kernels of this folder share: the tile of a ragged group that a program works on, and launch sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.device.tuning import Tile

SWIZZLE = 8  # tiles of rows that are visited before the next column of tiles: both operands then stay in L2


@triton.jit
def find_tile(counts_ptr, num_groups, tile, GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The place of tile number `tile`, when each group of rows is cut into tiles of its own.

    counts_ptr: int32 rows of each of `num_groups` groups; GROUPS: the next power of two. Returns (group, first row,
    end of the group's rows). Tiles after the last group's get a group >= num_groups and go on with the rows after
    it, with end = the number of grouped rows, so that no row of theirs is below it.
    """
    index = tl.arange(0, GROUPS)
    counts = tl.load(counts_ptr + index, mask=index < num_groups, other=0)
    tiles = (counts + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    group = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = index < group
    start = tl.sum(tl.where(before, counts, 0), 0)
    row = start + (tile - tl.sum(tl.where(before, tiles, 0), 0)) * BLOCK_ROWS
    return group, row, start + tl.sum(tl.where(index == group, counts, 0), 0)


@triton.jit
def group_rows(counts_ptr, num_groups, group, GROUPS: tl.constexpr):
    """(first row, number of rows) of a group."""
    index = tl.arange(0, GROUPS)
    counts = tl.load(counts_ptr + index, mask=index < num_groups, other=0)
    return tl.sum(tl.where(index < group, counts, 0), 0), tl.sum(tl.where(index == group, counts, 0), 0)


@triton.jit
def group_tiles(counts_ptr, num_groups, group, GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """(first tile, number of tiles) of a group, when each group is cut into tiles of its own."""
    index = tl.arange(0, GROUPS)
    tiles = (tl.load(counts_ptr + index, mask=index < num_groups, other=0) + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    return tl.sum(tl.where(index < group, tiles, 0), 0), tl.sum(tl.where(index == group, tiles, 0), 0)


@triton.jit
def count_tiles(counts_ptr, num_groups, rows, GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """How many tiles `rows` rows have: all groups', and those of the rows after the last group."""
    index = tl.arange(0, GROUPS)
    counts = tl.load(counts_ptr + index, mask=index < num_groups, other=0)
    grouped = tl.sum((counts + (BLOCK_ROWS - 1)) // BLOCK_ROWS, 0)
    return grouped + tl.cdiv(rows - tl.sum(counts, 0), BLOCK_ROWS)


@triton.jit
def place_of(index, row_tiles, column_tiles, SWIZZLE: tl.constexpr):
    """(row tile, column tile) of the index-th output tile."""
    band = index // (SWIZZLE * column_tiles)
    height = tl.minimum(row_tiles - band * SWIZZLE, SWIZZLE)
    within = index - band * SWIZZLE * column_tiles
    return band * SWIZZLE + within % height, within // height


def choose(tiles: tuple[Tile, ...], rows: int, groups: int) -> Tile:
    """The tallest tile that the mean group fills, by numbers the host knows; the table's last for small groups."""
    return next((tile for tile in tiles if rows >= groups * tile.rows), tiles[-1])


def check_aligned(x: Tensor, name: str) -> None:
    """Raise ValueError where a tensor descriptor cannot describe x: rows must start every 16 bytes."""
    multiple = 16 // x.element_size()
    if x.shape[-1] % multiple:
        raise ValueError(f"{name}: last dimension {x.shape[-1]}: must be a multiple of {multiple} ({x.dtype})")


def device_counts(counts: Sequence[int] | Tensor, device: torch.device, groups: int | None = None) -> Tensor:
    """Group sizes as kernels read them, int32 on the device. Raises ValueError unless there are `groups` of them."""
    if groups is not None and len(counts) != groups:
        raise ValueError(f"counts: {len(counts)} sizes for {groups} groups")
    return torch.as_tensor(counts, dtype=torch.int32, device=device).contiguous()


def group_bound(groups: int) -> int:
    """The power of two that a kernel's vector of groups is compiled for."""
    return max(2, triton.next_power_of_2(groups))


def multiprocessors(device: torch.device) -> int:
    """How many programs a persistent kernel starts when its caller does not say."""
    if device.type != "cuda":
        return 4  # the interpreter: more than one, so that each program's loop over tiles is used
    return torch.cuda.get_device_properties(device).multi_processor_count
