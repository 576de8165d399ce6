"""The Hopper form of `grouped_gemm_fp8` (see `hopper`): three groups of four warps, a tile of 192x128, five stages.

Each 128 of the sum is a product of its own, scaled into the fp32 total as in the plain form; scales of the next step
are loaded before the bytes of this one are waited for. In a pair a program computes two tiles side by side, which have
the scales of rows in common; a thread's columns are of one of the two, so it needs one scale of the weight.
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
    barrier_layouts,
    coded_blocks,
    count_tiles,
    ctas_of,
    difference,
    find_tile,
    gather_step,
    grid,
    launch_options,
    layout_of,
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
from moe_kernels.fp8_format import BLOCK, CODE

CONSUMERS = 3
TILE = Tile(CONSUMERS * GROUP_ROWS, 128, BLOCK, 4, 5)
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 160, 24


@gluon.jit
def _produce(
    a_desc, a_ptr, source_ptr, b_desc, a_ring, b_ring, table, full, empty, go, counts_ptr,
    rows, columns, depth, num_groups,
    CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    SWIZZLE: gl.constexpr, CTAS: gl.constexpr, GATHER_WARPS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * GROUP_ROWS
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])  # 128 bits a thread
    row_tiles = count_tiles(counts_ptr, num_groups, rows, ROWS)
    column_tiles = (columns + (COLUMNS - 1)) // COLUMNS
    depth_blocks = (depth + 127) // 128
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of(index, row_tiles, column_tiles, SWIZZLE)
        group, first, end = find_tile(counts_ptr, num_groups, row_tile, rows, ROWS)
        steps = gl.where(group < num_groups, depth_blocks, 0)
        b_row = group * columns + column_tile * COLUMNS
        if GATHER_WARPS > 0:
            store_sources(table, source_ptr, first, rows, copied, CONSUMERS, GROUP_ROWS)
        for k in range(steps):
            stage, parity = ring(step, STAGES)
            wait_until_read(empty, go, stage, parity, CTAS)
            if GATHER_WARPS > 0:
                mbarrier.expect(full.index(stage), COLUMNS * 128)
            else:
                mbarrier.expect(full.index(stage), (ROWS + COLUMNS // CTAS) * 128)
                for part in gl.static_range(CONSUMERS):
                    load_shared_tile(a_desc, [first + part * GROUP_ROWS, k * 128], full.index(stage),
                                     a_ring.index(stage * CONSUMERS + part), CTAS)  # fmt: skip
            load_tile(b_desc, [b_row, k * 128], full.index(stage), b_ring.index(stage))
            if GATHER_WARPS > 0:
                gather_step(table, a_ptr, a_ring, full, stage, k * 128, depth, copied, CONSUMERS, GROUP_ROWS, 128)
            step += 1


@gluon.jit
def _consume(
    PART: gl.constexpr, a_ring, b_ring, full, empty, source_ptr, a_scale_ptr, b_scale_ptr, out_ptr, counts_ptr,
    rows, a_rows, columns, depth, num_groups,
    CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    SWIZZLE: gl.constexpr, CTAS: gl.constexpr, GATHER_WARPS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * GROUP_ROWS
    OWN: gl.constexpr = COLUMNS // CTAS
    sums: gl.constexpr = sums_layout(COLUMNS, 32, CTAS)
    stored: gl.constexpr = stored_layout(4 if GATHER_WARPS > 0 else 2, CTAS)  # (the other needs more registers)
    parts: gl.constexpr = layout_of(gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, sums).reshape([GROUP_ROWS, CTAS, OWN]))
    row_tiles = count_tiles(counts_ptr, num_groups, rows, ROWS)
    column_tiles = (columns + (COLUMNS - 1)) // COLUMNS
    depth_blocks, column_blocks = (depth + 127) // 128, (columns + 127) // 128
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of(index, row_tiles, column_tiles, SWIZZLE)
        group, first, end = find_tile(counts_ptr, num_groups, row_tile, rows, ROWS)
        steps = gl.where(group < num_groups, depth_blocks, 0)
        first_row, first_column = first + PART * GROUP_ROWS, column_tile * COLUMNS
        # Every load of a scale is valid: rows outside a group use their neighbours' scales, the last step its own.
        row = first_row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, parts)))
        row = gl.minimum(row, rows - 1)
        if GATHER_WARPS > 0:
            row = gl.load(source_ptr + row).to(gl.int32)
        a_place = a_scale_ptr + row.to(gl.int64)
        block = first_column // 128 + gl.arange(0, CTAS, layout=gl.SliceLayout(0, gl.SliceLayout(2, parts)))
        block = gl.minimum(block, column_blocks - 1) * depth_blocks
        b_start = b_scale_ptr + gl.minimum(group, num_groups - 1).to(gl.int64) * column_blocks * depth_blocks
        a_scale, b_scale = gl.load(a_place), gl.load(b_start + block)
        total = gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, sums).reshape([GROUP_ROWS, CTAS, OWN])
        for k in range(steps):
            stage, parity = ring(step, STAGES)
            scale = a_scale[:, None, None] * b_scale[None, :, None]
            ahead = gl.minimum(k + 1, steps - 1)
            a_scale, b_scale = gl.load(a_place + ahead * a_rows), gl.load(b_start + (block + ahead))
            mbarrier.wait(full.index(stage), parity)
            if GATHER_WARPS > 0:
                fence_async_shared()  # the copies are ordinary writes, which tensor cores would not see else
            a = a_ring.index(stage * CONSUMERS + PART)
            b = b_ring.index(stage).permute((1, 0))
            part = warpgroup_mma(a, b, gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, sums), use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(stage), count=1)
            total += part.reshape([GROUP_ROWS, CTAS, OWN]) * scale
            step += 1
        out = gl.convert_layout(total.reshape([GROUP_ROWS, COLUMNS]).to(out_ptr.dtype.element_ty), stored)
        out_row = first_row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, stored))
        out_column = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, stored))
        place = out_ptr + out_row.to(gl.int64)[:, None] * columns + out_column[None, :]
        gl.store(place, out, mask=(out_row < end)[:, None] & (out_column < columns)[None, :])


@gluon.jit
def _hopper_gemm_fp8_kernel(
    a_desc, a_ptr, source_ptr, a_scale_ptr, b_desc, b_scale_ptr, out_ptr, counts_ptr,
    rows, a_rows, columns, depth, num_groups,
    GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, SWIZZLE: gl.constexpr,
    CTAS: gl.constexpr, EACH: gl.constexpr, FIRST: gl.constexpr, GATHER_WARPS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 3, GROUP_ROWS, 128], a_desc.layout)
    b_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, COLUMNS, 128], b_desc.layout)
    full, empty, go = make_barriers(STAGES, CTAS, EACH, FIRST, 3, GATHER_WARPS)
    table = empty
    if GATHER_WARPS > 0:
        table = gl.allocate_shared_memory(gl.int32, [3, GROUP_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize(
        [
            (_consume, (0, a_ring, b_ring, full, empty, source_ptr, a_scale_ptr, b_scale_ptr, out_ptr, counts_ptr,
                        rows, a_rows, columns, depth, num_groups,
                        3, GROUP_ROWS, COLUMNS, STAGES, SWIZZLE, CTAS, GATHER_WARPS)),
            (_consume, (1, a_ring, b_ring, full, empty, source_ptr, a_scale_ptr, b_scale_ptr, out_ptr, counts_ptr,
                        rows, a_rows, columns, depth, num_groups,
                        3, GROUP_ROWS, COLUMNS, STAGES, SWIZZLE, CTAS, GATHER_WARPS)),
            (_consume, (2, a_ring, b_ring, full, empty, source_ptr, a_scale_ptr, b_scale_ptr, out_ptr, counts_ptr,
                        rows, a_rows, columns, depth, num_groups,
                        3, GROUP_ROWS, COLUMNS, STAGES, SWIZZLE, CTAS, GATHER_WARPS)),
            (_produce, (a_desc, a_ptr, source_ptr, b_desc, a_ring, b_ring, table, full, empty, go, counts_ptr,
                        rows, columns, depth, num_groups,
                        3, GROUP_ROWS, COLUMNS, STAGES, SWIZZLE, CTAS, GATHER_WARPS)),
        ],
        [4, 4, GATHER_WARPS if GATHER_WARPS > 0 else 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def hopper_gemm_fp8(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    counts: Sequence[int] | Tensor,
    source: Tensor | None,
    dtype: torch.dtype,
    num_sms: int | None,
    pairs: bool | None = None,
) -> Tensor:
    """`reference.grouped_gemm_fp8` on sm_90; operands checked, contiguous and not empty.

    pairs: whether multiprocessors share rows in pairs; None: where that fits and rows are not gathered.
    """
    rows, (groups, columns, depth) = a.shape[0] if source is None else source.shape[0], b.shape
    out = torch.empty(rows, columns, dtype=dtype, device=a.device)
    gathers = source is not None
    ctas = ctas_of(columns, TILE, num_sms, False if gathers else pairs)
    a_copied, b_copied = coded_blocks(TILE, ctas)
    tiles = (triton.cdiv(rows, TILE.rows) + groups) * triton.cdiv(columns, ctas * TILE.columns)  # at least those there
    _hopper_gemm_fp8_kernel[grid(tiles, ctas, num_sms, a.device)](
        a_copied.descriptor(a, gl.float8e4nv), a, source, a_scale,
        b_copied.descriptor(b.flatten(0, 1), gl.float8e4nv), b_scale,
        out, device_counts(counts, a.device, groups), rows, a.shape[0], columns, depth, groups,
        **_constants(ctas, gathers), **launch_options(TILE, ctas),
    )  # fmt: skip
    return out


def compare(device: torch.device, plain: Callable[..., Tensor]) -> float:
    """For `forms.hopper_form`: groups of all kinds, rows after the last one, in each way of loading."""
    generator = torch.Generator(device).manual_seed(0)
    counts = torch.tensor([0, 1, 200, 64, 0, 385], device=device)
    rows, depth, columns, groups = 650 + 9, 400, 272, 6
    a = torch.randn(rows, depth, generator=generator, device=device).to(CODE)
    b = torch.randn(groups, columns, depth, generator=generator, device=device).to(CODE)
    a_scale = torch.rand(4, rows, generator=generator, device=device)
    b_scale = torch.rand(groups, 3, 4, generator=generator, device=device)
    source = torch.randperm(rows, generator=generator, device=device)
    worst = 0.0
    for taken, pairs in [(None, False), (source, False)] + [(None, True)] * MULTICAST:
        expected = plain(a, a_scale, b, b_scale, counts, taken, torch.float32)
        result = hopper_gemm_fp8(a, a_scale, b, b_scale, counts, taken, torch.float32, 3, pairs)
        worst = max(worst, float("inf") if result[650:].any() else difference(result, expected))
    return worst


def variants() -> list[Variant]:
    """The ways to load, for `aot`."""
    return [_variant(1, False), _variant(1, True)] + [_variant(2, False)] * MULTICAST


def _variant(ctas: int, gathers: bool) -> Variant:
    a_copied, b_copied = coded_blocks(TILE, ctas)
    arguments = {
        "a_desc": a_copied.type(gl.float8e4nv), "a_ptr": "*fp8e4nv",
        "source_ptr": "*i64" if gathers else "constexpr", "a_scale_ptr": "*fp32",
        "b_desc": b_copied.type(gl.float8e4nv), "b_scale_ptr": "*fp32",
        "out_ptr": "*bf16", "counts_ptr": "*i32",
        "rows": "i32", "a_rows": "i32", "columns": "i32", "depth": "i32", "num_groups": "i32",
    }  # fmt: skip
    name = f"hopper_gemm_fp8{' gather' if gathers else ' pair' if ctas == 2 else ''}"
    constants = _constants(ctas, gathers) | ({} if gathers else {"source_ptr": None})
    return variant(name, _hopper_gemm_fp8_kernel, TILE, CONSUMERS, 1, arguments, constants, ctas)


def _constants(ctas: int, gathers: bool) -> dict[str, Any]:
    return {
        "GROUP_ROWS": GROUP_ROWS, "COLUMNS": ctas * TILE.columns, "STAGES": TILE.stages, "SWIZZLE": SWIZZLE,
        **barrier_layouts(ctas), "GATHER_WARPS": GATHER_WARPS if gathers else 0,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
        "PRODUCER_REGISTERS": GATHER_REGISTERS if gathers else PRODUCER_REGISTERS,
    }  # fmt: skip
