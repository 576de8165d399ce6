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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_kernels.device.hopper import (
    GROUP_ROWS,
    TYPES,
    count_tiles,
    descriptor_type,
    difference,
    find_tile,
    load_tile,
    place_of,
    ring,
    shared_layout,
    variant,
)
from moe_kernels.device.tiles import SWIZZLE, device_counts, multiprocessors
from moe_kernels.device.tuning import Tile, Variant

CONSUMERS = 2
TILE = Tile(CONSUMERS * GROUP_ROWS, 256, 64, 4, 4)
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24


@gluon.jit
def _produce(
    a_desc, b_desc, a_ring, b_ring, full, empty, counts_ptr, rows, columns, depth, num_groups,
    CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, B_BY_COLUMN: gl.constexpr, SWIZZLE: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * GROUP_ROWS
    row_tiles = count_tiles(counts_ptr, num_groups, rows, ROWS)
    column_tiles = (columns + (COLUMNS - 1)) // COLUMNS
    depth_blocks = (depth + (DEPTH - 1)) // DEPTH
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of(index, row_tiles, column_tiles, SWIZZLE)
        group, first, end = find_tile(counts_ptr, num_groups, row_tile, rows, ROWS)
        steps = gl.where(group < num_groups, depth_blocks, 0)
        first_column = column_tile * COLUMNS
        for k in range(steps):
            stage, parity = ring(step, STAGES)
            mbarrier.wait(empty.index(stage), parity ^ 1)  # the first round finds every stage empty
            mbarrier.expect(full.index(stage), (ROWS + COLUMNS) * DEPTH * 2)
            for part in gl.static_range(CONSUMERS):
                rows_at = first + part * GROUP_ROWS
                load_tile(a_desc, [rows_at, k * DEPTH], full.index(stage), a_ring.index(stage * CONSUMERS + part))
            if B_BY_COLUMN:  # [e * columns, depth]; a tile may reach into the next group: those are not stored
                load_tile(b_desc, [group * columns + first_column, k * DEPTH], full.index(stage), b_ring.index(stage))
            else:  # [e * depth, columns], depth in whole steps
                load_tile(b_desc, [group * depth + k * DEPTH, first_column], full.index(stage), b_ring.index(stage))
            step += 1


@gluon.jit
def _consume(
    PART: gl.constexpr, a_ring, b_ring, full, empty, out_ptr, counts_ptr, rows, columns, depth, num_groups,
    CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, B_BY_COLUMN: gl.constexpr, SWIZZLE: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * GROUP_ROWS
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])  # 128 bits a thread
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
    a_desc, b_desc, out_ptr, counts_ptr, rows, columns, depth, num_groups,
    GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    B_BY_COLUMN: gl.constexpr, SWIZZLE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    B_ROWS: gl.constexpr = COLUMNS if B_BY_COLUMN else DEPTH
    B_COLUMNS: gl.constexpr = DEPTH if B_BY_COLUMN else COLUMNS
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2, GROUP_ROWS, DEPTH], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES, B_ROWS, B_COLUMNS], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_consume, (0, a_ring, b_ring, full, empty, out_ptr, counts_ptr, rows, columns, depth, num_groups,
                        2, GROUP_ROWS, COLUMNS, DEPTH, STAGES, B_BY_COLUMN, SWIZZLE)),
            (_consume, (1, a_ring, b_ring, full, empty, out_ptr, counts_ptr, rows, columns, depth, num_groups,
                        2, GROUP_ROWS, COLUMNS, DEPTH, STAGES, B_BY_COLUMN, SWIZZLE)),
            (_produce, (a_desc, b_desc, a_ring, b_ring, full, empty, counts_ptr, rows, columns, depth, num_groups,
                        2, GROUP_ROWS, COLUMNS, DEPTH, STAGES, B_BY_COLUMN, SWIZZLE)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def takes(a: Tensor, b: Tensor, by_column: bool) -> bool:
    """Whether the form has been built for these operands: a's sum in whole steps where b lies along its columns."""
    return a.dtype in TYPES and (by_column or b.shape[1] % TILE.depth == 0)


def hopper_gemm(
    a: Tensor, stored: Tensor, by_column: bool, counts: Sequence[int] | Tensor, num_sms: int | None
) -> Tensor:
    """`reference.grouped_gemm` without a gather, on sm_90; operands checked, contiguous, not empty.

    stored: b in the order of its memory, [e, columns, depth] where `by_column`, else [e, depth, columns].
    """
    rows, groups, columns = a.shape[0], stored.shape[0], stored.shape[1 if by_column else 2]
    out = torch.empty(rows, columns, dtype=a.dtype, device=a.device)
    tiles = (triton.cdiv(rows, TILE.rows) + groups) * triton.cdiv(columns, TILE.columns)  # at least those there are
    a_block, b_block, dtype = [GROUP_ROWS, TILE.depth], _b_block(by_column), TYPES[a.dtype]
    _hopper_gemm_kernel[(min(tiles, num_sms or multiprocessors(a.device)),)](
        TensorDescriptor.from_tensor(a, a_block, shared_layout(a_block, dtype)),
        TensorDescriptor.from_tensor(stored.flatten(0, 1), b_block, shared_layout(b_block, dtype)),
        out, device_counts(counts, a.device, groups), rows, columns, a.shape[1], groups,
        **_constants(by_column), num_warps=TILE.warps,
    )  # fmt: skip
    return out


def compare(device: torch.device, plain: Callable[..., Tensor]) -> float:
    """For `forms.hopper_form`: both forms, forward and input gradient, groups of all kinds."""
    generator = torch.Generator(device).manual_seed(0)
    counts = torch.tensor([0, 1, 200, 64, 0, 385], device=device)
    worst = 0.0
    for by_column, depth in ((True, 400), (False, 384)):
        a = torch.randn(650 + 9, depth, generator=generator, device=device).bfloat16()
        stored = torch.randn(6, *((272, depth) if by_column else (depth, 272)), generator=generator, device=device)
        stored = stored.bfloat16()
        expected = plain(a, stored.transpose(1, 2) if by_column else stored, counts)
        result = hopper_gemm(a, stored, by_column, counts, num_sms=3)
        worst = max(worst, float("inf") if result[650:].any() else difference(result, expected))
    return worst


def _b_block(by_column: bool) -> list[int]:
    return [TILE.columns, TILE.depth] if by_column else [TILE.depth, TILE.columns]


def variants() -> list[Variant]:
    """Both forms, for `aot`."""
    return [_variant(by_column) for by_column in (True, False)]


def _variant(by_column: bool) -> Variant:
    arguments = {
        "a_desc": descriptor_type([GROUP_ROWS, TILE.depth], gl.bfloat16),
        "b_desc": descriptor_type(_b_block(by_column), gl.bfloat16),
        "out_ptr": "*bf16", "counts_ptr": "*i32", "rows": "i32", "columns": "i32", "depth": "i32", "num_groups": "i32",
    }  # fmt: skip
    name = f"hopper_gemm {'fprop' if by_column else 'dgrad'}"
    return variant(name, _hopper_gemm_kernel, TILE, CONSUMERS, 2, arguments, _constants(by_column))


def _constants(by_column: bool) -> dict[str, Any]:
    return {
        "GROUP_ROWS": GROUP_ROWS, "COLUMNS": TILE.columns, "DEPTH": TILE.depth, "STAGES": TILE.stages,
        "B_BY_COLUMN": by_column, "SWIZZLE": SWIZZLE,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS, "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }  # fmt: skip
