"""What the Hopper forms of the matrix products share: warps with roles, and the check before their first use.

The kernels `hopper_*` are written in Gluon. One warp loads (the producer); groups of four warps multiply 64 rows each
of a tile. They meet at barriers in shared memory, a pair for each stage of a ring: `full` (the bytes have arrived) and
`empty` (all groups have read them). A group that waits for its own product stops nobody else, which the plain forms
cannot do: there all warps wait and meet at every step.

Each form takes the operands of its plain twin and sums in the same order, so it must give the same results. No GPU has
compared the two yet, so a form runs only where `hopper=True` asks for it, and compares itself with its twin on small
operands before its first use on a device (`forms`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from moe_kernels.device.tuning import Tile, Variant

GROUP_ROWS = 64  # of an output tile, for each group of four warps that multiplies
TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the name up to Triton 3.6


@gluon.jit
def ring(step, STAGES: gl.constexpr):
    """(stage, parity) of a step: the stage's barriers complete once in every STAGES steps and count by parity."""
    step = step & 0x7FFFFFFF  # says that it is not negative, for a cheaper division
    return step % STAGES, (step // STAGES) & 1


@gluon.jit
def count_tiles(counts_ptr, num_groups, rows, ROWS: gl.constexpr):
    """How many tiles `rows` rows have: all groups', and those of the rows after the last group."""
    tiles, used = 0, 0
    for group in range(num_groups):
        count = gl.load(counts_ptr + group)
        tiles += (count + (ROWS - 1)) // ROWS
        used += count
    return tiles + (rows - used + (ROWS - 1)) // ROWS


@gluon.jit
def find_tile(counts_ptr, num_groups, tile, rows, ROWS: gl.constexpr):
    """(group, first row, end of the rows to store) of a tile; rows after the last group have group = num_groups."""
    found, first, end, start, left = num_groups, 0, rows, 0, tile
    for group in range(num_groups):
        count = gl.load(counts_ptr + group)
        tiles = (count + (ROWS - 1)) // ROWS
        here = (left >= 0) & (left < tiles)
        found = gl.where(here, group, found)
        first = gl.where(here, start + left * ROWS, first)
        end = gl.where(here, start + count, end)
        left -= tiles
        start += count
    return found, gl.where(left >= 0, start + left * ROWS, first), end


@gluon.jit
def group_rows(counts_ptr, group):
    """(first row, number of rows) of a group."""
    start = 0
    for before in range(group):
        start += gl.load(counts_ptr + before)
    return start, gl.load(counts_ptr + group)


@gluon.jit
def group_tiles(counts_ptr, group, ROWS: gl.constexpr):
    """(first tile, number of tiles) of a group, when each group is cut into tiles of its own."""
    start = 0
    for before in range(group):
        start += (gl.load(counts_ptr + before) + (ROWS - 1)) // ROWS
    return start, (gl.load(counts_ptr + group) + (ROWS - 1)) // ROWS


@gluon.jit
def place_of(index, row_tiles, column_tiles, SWIZZLE: gl.constexpr):
    """(row tile, column tile) of the index-th output tile, as in the plain form."""
    band = index // (SWIZZLE * column_tiles)
    height = gl.minimum(row_tiles - band * SWIZZLE, SWIZZLE)
    within = index - band * SWIZZLE * column_tiles
    return band * SWIZZLE + within % height, within // height


def difference(result: Tensor, expected: Tensor) -> float:
    """Square of the difference, over that of what is expected; infinite where either has NaN."""
    error = ((result - expected).double().square().sum() / expected.double().square().sum()).item()
    return error if error == error else float("inf")


def variant(
    name: str, kernel: Any, tile: Tile, consumers: int, element_bytes: int, arguments: dict[str, str],
    constants: dict[str, Any],
) -> Variant:  # fmt: skip
    """The one tuning entry of a form, for `aot`."""
    return Variant(
        f"{name} {tile}", kernel, arguments, constants, {"num_warps": tile.warps}, tile,
        consumers=consumers, element_bytes=element_bytes, hopper_only=True,
    )  # fmt: skip


def shared_layout(block: list[int], dtype: Any) -> gl.NVMMASharedLayout:
    """How a block lies in shared memory for bulk copies and tensor cores."""
    return gl.NVMMASharedLayout.get_default_for(block, dtype)


def descriptor_type(block: list[int], dtype: Any) -> str:
    """The Triton type of a tensor descriptor argument."""
    return f"tensordesc<{dtype.name}{block},{shared_layout(block, dtype)!r}>"
