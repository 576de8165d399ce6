"""The Hopper form of `grouped_gemm` in bf16 (see `hopper`): two groups of four warps, a tile of 128x256.

Unlike fp8 products, those of 16 bits are summed by the tensor cores themselves. A group starts the product of a step
before it waits for that of the step before, and only then gives back that step's stage: one product is always in
flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_kernels.device.hopper import (
    GATHER_REGISTERS,
    GATHER_WARPS,
    GROUP_ROWS,
    MULTICAST,
    TYPES,
    Copied,
    barrier_layouts,
    count_tiles,
    ctas_of,
    difference,
    find_tile,
    gather_step,
    grid,
    launch_options,
    load_shared_tile,
    load_tile,
    make_barriers,
    place_of,
    ring,
    store_sources,
    stored_layout,
    sums_layout,
    variant,
    wait_until_read,
)
from moe_kernels.device.tiles import SWIZZLE, device_counts
from moe_kernels.device.tuning import Tile, Variant

CONSUMERS = 2
TILE = Tile(CONSUMERS * GROUP_ROWS, 256, 64, 4, 4)
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24


@gluon.jit
def _produce(
    a_desc, a_ptr, source_ptr, b_desc, a_ring, b_ring, table, full, empty, go, counts_ptr,
    rows, columns, depth, num_groups,
    CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, B_BY_COLUMN: gl.constexpr, SWIZZLE: gl.constexpr, CTAS: gl.constexpr,
    GATHER_WARPS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * GROUP_ROWS
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # 128 bits a thread
    row_tiles = count_tiles(counts_ptr, num_groups, rows, ROWS)
    column_tiles = (columns + (COLUMNS - 1)) // COLUMNS
    depth_blocks = (depth + (DEPTH - 1)) // DEPTH
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of(index, row_tiles, column_tiles, SWIZZLE)
        group, first, end = find_tile(counts_ptr, num_groups, row_tile, rows, ROWS)
        steps = gl.where(group < num_groups, depth_blocks, 0)
        first_column = column_tile * COLUMNS
        if GATHER_WARPS > 0:
            store_sources(table, source_ptr, first, rows, copied, CONSUMERS, GROUP_ROWS)
        for k in range(steps):
            stage, parity = ring(step, STAGES)
            wait_until_read(empty, go, stage, parity, CTAS)
            if GATHER_WARPS > 0:
                mbarrier.expect(full.index(stage), COLUMNS * DEPTH * 2)
            else:
                mbarrier.expect(full.index(stage), (ROWS + COLUMNS // CTAS) * DEPTH * 2)
                for part in gl.static_range(CONSUMERS):
                    load_shared_tile(a_desc, [first + part * GROUP_ROWS, k * DEPTH], full.index(stage),
                                     a_ring.index(stage * CONSUMERS + part), CTAS)  # fmt: skip
            if B_BY_COLUMN:  # [e * columns, depth]; a tile may reach into the next group: those are not stored
                load_tile(b_desc, [group * columns + first_column, k * DEPTH], full.index(stage), b_ring.index(stage))
            else:  # [e * depth, columns], depth in whole steps
                load_tile(b_desc, [group * depth + k * DEPTH, first_column], full.index(stage), b_ring.index(stage))
            if GATHER_WARPS > 0:
                gather_step(table, a_ptr, a_ring, full, stage, k * DEPTH, depth, copied, CONSUMERS, GROUP_ROWS, DEPTH)
            step += 1


@gluon.jit
def _consume(
    PART: gl.constexpr, a_ring, b_ring, full, empty, out_ptr, counts_ptr, rows, columns, depth, num_groups,
    CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, B_BY_COLUMN: gl.constexpr, SWIZZLE: gl.constexpr, CTAS: gl.constexpr,
    GATHER_WARPS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * GROUP_ROWS
    sums: gl.constexpr = sums_layout(COLUMNS, 16, CTAS)
    stored: gl.constexpr = stored_layout(1, CTAS)
    row_tiles = count_tiles(counts_ptr, num_groups, rows, ROWS)
    column_tiles = (columns + (COLUMNS - 1)) // COLUMNS
    depth_blocks = (depth + (DEPTH - 1)) // DEPTH
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of(index, row_tiles, column_tiles, SWIZZLE)
        group, first, end = find_tile(counts_ptr, num_groups, row_tile, rows, ROWS)
        steps = gl.where(group < num_groups, depth_blocks, 0)
        total = gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, sums)
        held = 0
        if steps > 0:  # the wait after the loop belongs to it: a path around the loop to that wait costs all overlap
            for k in range(steps):
                stage, parity = ring(step, STAGES)
                mbarrier.wait(full.index(stage), parity)
                if GATHER_WARPS > 0:
                    fence_async_shared()  # the copies are ordinary writes, which tensor cores would not see else
                b = b_ring.index(stage)
                if B_BY_COLUMN:
                    b = b.permute((1, 0))
                total = warpgroup_mma(a_ring.index(stage * CONSUMERS + PART), b, total, is_async=True)
                total = warpgroup_mma_wait(1, deps=[total])
                mbarrier.arrive(empty.index(held), count=1, pred=k > 0)
                held = stage
                step += 1
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(empty.index(held), count=1)
        out = gl.convert_layout(total.to(out_ptr.dtype.element_ty), stored)
        out_row = first + PART * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, stored))
        out_column = column_tile * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, stored))
        place = out_ptr + out_row.to(gl.int64)[:, None] * columns + out_column[None, :]
        gl.store(place, out, mask=(out_row < end)[:, None] & (out_column < columns)[None, :])


@gluon.jit
def _hopper_gemm_kernel(
    a_desc, a_ptr, source_ptr, b_desc, out_ptr, counts_ptr, rows, columns, depth, num_groups,
    GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    B_BY_COLUMN: gl.constexpr, SWIZZLE: gl.constexpr,
    CTAS: gl.constexpr, EACH: gl.constexpr, FIRST: gl.constexpr, GATHER_WARPS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    B_ROWS: gl.constexpr = COLUMNS if B_BY_COLUMN else DEPTH
    B_COLUMNS: gl.constexpr = DEPTH if B_BY_COLUMN else COLUMNS
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2, GROUP_ROWS, DEPTH], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES, B_ROWS, B_COLUMNS], b_desc.layout)
    full, empty, go = make_barriers(STAGES, CTAS, EACH, FIRST, 2, GATHER_WARPS)
    table = empty
    if GATHER_WARPS > 0:
        table = gl.allocate_shared_memory(gl.int32, [2, GROUP_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize(
        [
            (_consume, (0, a_ring, b_ring, full, empty, out_ptr, counts_ptr, rows, columns, depth, num_groups,
                        2, GROUP_ROWS, COLUMNS, DEPTH, STAGES, B_BY_COLUMN, SWIZZLE, CTAS, GATHER_WARPS)),
            (_consume, (1, a_ring, b_ring, full, empty, out_ptr, counts_ptr, rows, columns, depth, num_groups,
                        2, GROUP_ROWS, COLUMNS, DEPTH, STAGES, B_BY_COLUMN, SWIZZLE, CTAS, GATHER_WARPS)),
            (_produce, (a_desc, a_ptr, source_ptr, b_desc, a_ring, b_ring, table, full, empty, go, counts_ptr,
                        rows, columns, depth, num_groups,
                        2, GROUP_ROWS, COLUMNS, DEPTH, STAGES, B_BY_COLUMN, SWIZZLE, CTAS, GATHER_WARPS)),
        ],
        [4, GATHER_WARPS if GATHER_WARPS > 0 else 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def takes(a: Tensor, b: Tensor, by_column: bool) -> bool:
    """Whether the form has been built for these operands: a's sum in whole steps where b lies along its columns."""
    return a.dtype in TYPES and (by_column or b.shape[1] % TILE.depth == 0)


def hopper_gemm(
    a: Tensor,
    stored: Tensor,
    by_column: bool,
    counts: Sequence[int] | Tensor,
    source: Tensor | None,
    num_sms: int | None,
    pairs: bool | None = None,
) -> Tensor:
    """`reference.grouped_gemm` on sm_90; operands checked, contiguous, not empty.

    stored: b in the order of its memory, [e, columns, depth] where `by_column`, else [e, depth, columns].
    pairs: whether multiprocessors share rows in pairs; None: where that fits and rows are not gathered.
    """
    rows, gathers = a.shape[0] if source is None else source.shape[0], source is not None
    groups, columns = stored.shape[0], stored.shape[1 if by_column else 2]
    out = torch.empty(rows, columns, dtype=a.dtype, device=a.device)
    ctas = ctas_of(columns, TILE, num_sms, False if gathers else pairs)
    (a_copied, b_copied), dtype = _blocks(by_column, ctas), TYPES[a.dtype]
    tiles = (triton.cdiv(rows, TILE.rows) + groups) * triton.cdiv(columns, ctas * TILE.columns)  # at least those there
    _hopper_gemm_kernel[grid(tiles, ctas, num_sms, a.device)](
        a_copied.descriptor(a, dtype), a, source, b_copied.descriptor(stored.flatten(0, 1), dtype),
        out, device_counts(counts, a.device, groups), rows, columns, a.shape[1], groups,
        **_constants(by_column, ctas, gathers), **launch_options(TILE, ctas),
    )  # fmt: skip
    return out


def compare(device: torch.device, plain: Callable[..., Tensor]) -> float:
    """For `forms.hopper_form`: forward and input gradient, groups of all kinds, in each way of loading."""
    generator = torch.Generator(device).manual_seed(0)
    counts = torch.tensor([0, 1, 200, 64, 0, 385], device=device)
    source = torch.randperm(650 + 9, generator=generator, device=device)
    worst = 0.0
    for by_column, depth in ((True, 400), (False, 384)):
        a = torch.randn(650 + 9, depth, generator=generator, device=device).bfloat16()
        stored = torch.randn(6, *((272, depth) if by_column else (depth, 272)), generator=generator, device=device)
        stored = stored.bfloat16()
        for taken, pairs in [(None, False), (source, False)] + [(None, True)] * MULTICAST:
            expected = plain(a, stored.transpose(1, 2) if by_column else stored, counts, taken)
            result = hopper_gemm(a, stored, by_column, counts, taken, 3, pairs)
            worst = max(worst, float("inf") if result[650:].any() else difference(result, expected))
    return worst


def _blocks(by_column: bool, ctas: int) -> tuple[Copied, Copied]:
    """Of both operands; a pair shares all rows, each has its own columns."""
    columns = ctas * TILE.columns
    block, cut = ([columns, TILE.depth], [1, 0]) if by_column else ([TILE.depth, columns], [0, 1])
    pair = ctas == 2
    return Copied([GROUP_ROWS, TILE.depth], [0, 0] if pair else None), Copied(block, cut if pair else None)


def variants() -> list[Variant]:
    """Forward and input gradient in each way to load, for `aot`."""
    ways = [(1, False), (1, True)] + [(2, False)] * MULTICAST
    return [_variant(by_column, *way) for by_column in (True, False) for way in ways]


def _variant(by_column: bool, ctas: int, gathers: bool) -> Variant:
    a_copied, b_copied = _blocks(by_column, ctas)
    arguments = {
        "a_desc": a_copied.type(gl.bfloat16), "a_ptr": "*bf16",
        "source_ptr": "*i64" if gathers else "constexpr",
        "b_desc": b_copied.type(gl.bfloat16),
        "out_ptr": "*bf16", "counts_ptr": "*i32", "rows": "i32", "columns": "i32", "depth": "i32", "num_groups": "i32",
    }  # fmt: skip
    way = " gather" if gathers else " pair" if ctas == 2 else ""
    name = f"hopper_gemm {'fprop' if by_column else 'dgrad'}{way}"
    constants = _constants(by_column, ctas, gathers) | ({} if gathers else {"source_ptr": None})
    return variant(name, _hopper_gemm_kernel, TILE, CONSUMERS, 2, arguments, constants, ctas)


def _constants(by_column: bool, ctas: int, gathers: bool) -> dict[str, Any]:
    return {
        "GROUP_ROWS": GROUP_ROWS, "COLUMNS": ctas * TILE.columns, "DEPTH": TILE.depth, "STAGES": TILE.stages,
        "B_BY_COLUMN": by_column, "SWIZZLE": SWIZZLE,
        **barrier_layouts(ctas), "GATHER_WARPS": GATHER_WARPS if gathers else 0,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
        "PRODUCER_REGISTERS": GATHER_REGISTERS if gathers else PRODUCER_REGISTERS,
    }  # fmt: skip
