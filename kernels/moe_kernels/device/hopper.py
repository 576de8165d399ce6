"""What the Hopper forms of the matrix products share: warps with roles, and the check before their first use.

The kernels `hopper_*` are written in Gluon. One warp loads (the producer); groups of four warps multiply 64 rows each
of a tile. They meet at barriers in shared memory, a pair for each stage of a ring: `full` (the bytes have arrived) and
`empty` (all groups have read them). A group that waits for its own product stops nobody else, which the plain forms
cannot do: there all warps wait and meet at every step.

Two multiprocessors can share the rows of two tiles side by side (a pair): the first one's copies of rows go to both by
multicast, each copies its own part of the other operand. The groups of both count at the first one's `empty`, which
then lets both loading warps `go`. Rows that are gathered by index come by copies of 16 bytes, which four warps make.

Each form takes the operands of its plain twin and sums in the same order, so it must give the same results. No GPU has
compared the two yet, so a form runs only where `hopper=True` asks for it, and compares itself with its twin on small
operands before its first use on a device (`forms`).
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_kernels.device.tiles import multiprocessors
from moe_kernels.device.tuning import Tile, Variant

GROUP_ROWS = 64  # of an output tile, for each group of four warps that multiplies
TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

GATHER_WARPS = 4  # that load, where rows are gathered
GATHER_REGISTERS = 32  # of a thread of these

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the name up to Triton 3.6
load_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
MULTICAST = "multicast" in inspect.signature(load_tile).parameters  # not in Triton 3.6


@gluon.constexpr_function
def sums_layout(columns, depth, ctas):
    """How the sums of a group of warps lie in registers; columns: of all multiprocessors that share rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns // ctas, depth], [[0, 1]] if ctas == 2 else [])


@gluon.constexpr_function
def stored_layout(rows, ctas):
    """How they lie when they are stored, in 128 bits a thread; rows: that a warp stores at once."""
    return gl.BlockedLayout([1, 8], [rows, 32 // rows], [4, 1], [1, 0], [[0, 1]] if ctas == 2 else [])


@gluon.constexpr_function
def layout_of(x):
    return x.type.layout


@gluon.jit
def make_barriers(STAGES: gl.constexpr, CTAS: gl.constexpr, EACH: gl.constexpr, FIRST: gl.constexpr,
                  CONSUMERS: gl.constexpr, GATHER_WARPS: gl.constexpr):  # fmt: skip
    """(full, empty, go) of a ring, see above; `go` is there in a pair alone. EACH, FIRST: see `barrier_layouts`."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, CTAS], EACH)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], FIRST)
    go = empty
    if CTAS == 2:
        go = gl.allocate_shared_memory(gl.int64, [STAGES, CTAS], EACH)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1 + 32 * GATHER_WARPS)
        mbarrier.init(empty.index(stage), count=CONSUMERS)  # of each multiprocessor
        if CTAS == 2:
            mbarrier.init(go.index(stage), count=1)
    return full, empty, go


@gluon.jit
def load_shared_tile(desc, place, barrier, to, CTAS: gl.constexpr):
    """A tile that all multiprocessors of a pair read."""
    if CTAS == 2:
        load_tile(desc, place, barrier, to, multicast=True)
    else:
        load_tile(desc, place, barrier, to)


@gluon.jit
def wait_until_read(empty, go, stage, parity, CTAS: gl.constexpr):
    """Until all groups have read what the stage held; the first round finds every stage empty."""
    mbarrier.wait(empty.index(stage), parity ^ 1)  # in a pair the first one's alone, counting the groups of both
    if CTAS == 2:
        mbarrier.arrive(go.index(stage), from_cta=0)  # the first one's arrival, at both
        mbarrier.wait(go.index(stage), parity)


@gluon.jit
def store_sources(table, source_ptr, first, rows, layout: gl.constexpr, CONSUMERS: gl.constexpr,
                  GROUP_ROWS: gl.constexpr):  # fmt: skip
    """Which rows a tile's rows are, into shared memory; those outside of all rows are their last."""
    for part in gl.static_range(CONSUMERS):
        row = first + part * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout))
        table.index(part).store(gl.load(source_ptr + gl.minimum(row, rows - 1)).to(gl.int32))


@gluon.jit
def gather_step(table, a_ptr, a_ring, full, stage, first_column, depth, layout: gl.constexpr, CONSUMERS: gl.constexpr,
                GROUP_ROWS: gl.constexpr, DEPTH: gl.constexpr):  # fmt: skip
    """Copies of a step's columns of a tile's rows into shared memory; each thread arrives when its own are there."""
    column = first_column + gl.arange(0, DEPTH, layout=gl.SliceLayout(0, layout))
    for part in gl.static_range(CONSUMERS):
        row = table.index(part).load(gl.SliceLayout(1, layout)).to(gl.int64)
        place = (a_ptr + column)[None, :] + (row * depth)[:, None]
        load_rows(a_ring.index(stage * CONSUMERS + part), place, mask=(column < depth)[None, :])
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


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


def paired(columns: int, tile: Tile, num_sms: int | None) -> bool:
    """Whether pairs compute a product: tiles side by side then share rows, and none is left over."""
    return MULTICAST and triton.cdiv(columns, tile.columns) % 2 == 0 and (num_sms is None or num_sms > 1)


def ctas_of(columns: int, tile: Tile, num_sms: int | None, pairs: bool | None) -> int:
    """Multiprocessors of a program. pairs: as somebody wants it; None: two where that fits."""
    return 2 if (paired(columns, tile, num_sms) if pairs is None else pairs) else 1


def grid(tiles: int, ctas: int, num_sms: int | None, device: torch.device) -> tuple[int]:
    """Programs to start for at most so many tiles of a program; one of a pair is on two multiprocessors."""
    return (max(1, min(tiles, (num_sms or multiprocessors(device)) // ctas)),)


def variant(
    name: str, kernel: Any, tile: Tile, consumers: int, element_bytes: int, arguments: dict[str, str],
    constants: dict[str, Any], ctas: int = 1,
) -> Variant:  # fmt: skip
    """A tuning entry of a form, for `aot`."""
    return Variant(
        f"{name} {tile}", kernel, arguments, constants, launch_options(tile, ctas), tile,
        consumers=consumers, element_bytes=element_bytes, hopper_only=True, ctas=ctas,
    )  # fmt: skip


def launch_options(tile: Tile, ctas: int) -> dict[str, int]:
    return {"num_warps": tile.warps, "num_ctas": ctas}


def barrier_layouts(ctas: int) -> dict[str, Any]:
    """Constants of a kernel: how barriers of each multiprocessor lie, and those that the first of a pair has alone."""
    if ctas == 1:
        return {"CTAS": 1, "EACH": mbarrier.MBarrierLayout(), "FIRST": mbarrier.MBarrierLayout()}
    return {"CTAS": 2, "EACH": mbarrier.MBarrierLayout([[1]]), "FIRST": mbarrier.MBarrierLayout([[0]])}


class Copied(NamedTuple):
    """The block of an operand that is copied at once.

    cut: in a pair; [0, 0]: both hold all of it, [1, 0]: each a half of its rows, [0, 1]: of its columns.
    """

    block: list[int]
    cut: list[int] | None

    def layout(self, dtype: Any) -> gl.NVMMASharedLayout:
        """How it lies in shared memory for bulk copies and tensor cores."""
        return gl.NVMMASharedLayout.get_default_for(
            self.block, dtype, cga_layout=None if self.cut is None else [self.cut]
        )

    def descriptor(self, x: Tensor, dtype: Any) -> TensorDescriptor:
        """Of a matrix of such blocks."""
        return TensorDescriptor.from_tensor(x, self.block, self.layout(dtype))

    def type(self, dtype: Any) -> str:
        """The Triton type of that descriptor as an argument."""
        return f"tensordesc<{dtype.name}{self.block},{self.layout(dtype)!r}>"


def coded_blocks(tile: Tile, ctas: int) -> tuple[Copied, Copied]:
    """Of both operands of a product of codes, whose sums run along rows: a pair shares the first one's blocks, and has
    its own rows of the second one."""
    cuts = ([0, 0], [1, 0]) if ctas == 2 else (None, None)
    return Copied([GROUP_ROWS, tile.depth], cuts[0]), Copied([ctas * tile.columns, tile.depth], cuts[1])
