"""The Hopper form of `grouped_wgrad` in bf16 (see `hopper`): two groups of four warps, a tile of 128x256.

As in `hopper_gemm` one product is always in flight. Both operands lie across the sum, which 16-bit tensor cores take as
they are. A group's last rows, fewer than a step, come from `tails`, where zeros follow them.
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
    descriptor_type,
    difference,
    group_rows,
    load_tile,
    ring,
    shared_layout,
    variant,
)
from moe_kernels.device.tails import tails
from moe_kernels.device.tiles import device_counts, multiprocessors
from moe_kernels.device.tuning import Tile, Variant

CONSUMERS = 2
TILE = Tile(CONSUMERS * GROUP_ROWS, 256, 64, 4, 4)
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24


@gluon.jit
def _load_step(d_desc, a_desc, d_ring, a_ring, full, stage, row, first_row, first_column,
               CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr):  # fmt: skip
    for part in gl.static_range(CONSUMERS):
        rows_at = first_row + part * GROUP_ROWS
        load_tile(d_desc, [row, rows_at], full.index(stage), d_ring.index(stage * CONSUMERS + part))
    load_tile(a_desc, [row, first_column], full.index(stage), a_ring.index(stage))


@gluon.jit
def _produce(
    d_desc, a_desc, d_tail_desc, a_tail_desc, d_ring, a_ring, full, empty, counts_ptr,
    d_columns, a_columns, num_groups,
    CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * GROUP_ROWS
    row_tiles, column_tiles = (d_columns + (ROWS - 1)) // ROWS, (a_columns + (COLUMNS - 1)) // COLUMNS
    step = 0
    for index in range(gl.program_id(0), num_groups * row_tiles * column_tiles, gl.num_programs(0)):
        group, tile = index // (row_tiles * column_tiles), index % (row_tiles * column_tiles)
        first_row, first_column = tile % row_tiles * ROWS, tile // row_tiles * COLUMNS
        start, count = group_rows(counts_ptr, group)
        for k in range(0, count, DEPTH):
            stage, parity = ring(step, STAGES)
            mbarrier.wait(empty.index(stage), parity ^ 1)  # the first round finds every stage empty
            mbarrier.expect(full.index(stage), (ROWS + COLUMNS) * DEPTH * 2)
            if k + DEPTH <= count:
                _load_step(d_desc, a_desc, d_ring, a_ring, full, stage, start + k, first_row, first_column,
                           CONSUMERS, GROUP_ROWS)  # fmt: skip
            else:
                _load_step(d_tail_desc, a_tail_desc, d_ring, a_ring, full, stage, group * DEPTH, first_row,
                           first_column, CONSUMERS, GROUP_ROWS)  # fmt: skip
            step += 1


@gluon.jit
def _add_half(out_ptr, half, first_row, first_column, d_columns, a_columns,
              GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, ACCUMULATE: gl.constexpr):  # fmt: skip
    """Store a part of the sums [GROUP_ROWS, COLUMNS], or add it to what is there."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    half = gl.convert_layout(half, layout)
    row = first_row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout))
    column = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    place = out_ptr + row.to(gl.int64)[:, None] * a_columns + column[None, :]
    inside = (row < d_columns)[:, None] & (column < a_columns)[None, :]
    if ACCUMULATE:
        half += gl.load(place, mask=inside, other=0.0)
    gl.store(place, half, mask=inside)


@gluon.jit
def _consume(
    PART: gl.constexpr, d_ring, a_ring, full, empty, out_ptr, counts_ptr, d_columns, a_columns, num_groups,
    CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * GROUP_ROWS
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    row_tiles, column_tiles = (d_columns + (ROWS - 1)) // ROWS, (a_columns + (COLUMNS - 1)) // COLUMNS
    step = 0
    for index in range(gl.program_id(0), num_groups * row_tiles * column_tiles, gl.num_programs(0)):
        group, tile = index // (row_tiles * column_tiles), index % (row_tiles * column_tiles)
        first_row, first_column = tile % row_tiles * ROWS + PART * GROUP_ROWS, tile // row_tiles * COLUMNS
        start, count = group_rows(counts_ptr, group)
        total = gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, sums)
        held = 0
        if count > 0:  # the wait after the loop belongs to it, as in `hopper_gemm`
            for k in range(0, count, DEPTH):
                stage, parity = ring(step, STAGES)
                mbarrier.wait(full.index(stage), parity)
                d = d_ring.index(stage * CONSUMERS + PART).permute((1, 0))
                total = warpgroup_mma(d, a_ring.index(stage), total, is_async=True)
                total = warpgroup_mma_wait(1, deps=[total])
                mbarrier.arrive(empty.index(held), count=1, pred=k > 0)
                held = stage
                step += 1
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(empty.index(held), count=1)
        if (count > 0) | (not ACCUMULATE):
            out = out_ptr + group.to(gl.int64) * d_columns * a_columns
            halves = total.reshape([GROUP_ROWS, 2, COLUMNS // 2]).permute(0, 2, 1)
            left, right = gl.split(halves)
            _add_half(out, left, first_row, first_column, d_columns, a_columns, GROUP_ROWS, COLUMNS // 2, ACCUMULATE)
            _add_half(out, right, first_row, first_column + COLUMNS // 2, d_columns, a_columns,
                      GROUP_ROWS, COLUMNS // 2, ACCUMULATE)  # fmt: skip


@gluon.jit
def _hopper_wgrad_kernel(
    d_desc, a_desc, d_tail_desc, a_tail_desc, out_ptr, counts_ptr, d_columns, a_columns, num_groups,
    GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    ACCUMULATE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    d_ring = gl.allocate_shared_memory(d_desc.dtype, [STAGES * 2, DEPTH, GROUP_ROWS], d_desc.layout)
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, DEPTH, COLUMNS], a_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_consume, (0, d_ring, a_ring, full, empty, out_ptr, counts_ptr, d_columns, a_columns, num_groups,
                        2, GROUP_ROWS, COLUMNS, DEPTH, STAGES, ACCUMULATE)),
            (_consume, (1, d_ring, a_ring, full, empty, out_ptr, counts_ptr, d_columns, a_columns, num_groups,
                        2, GROUP_ROWS, COLUMNS, DEPTH, STAGES, ACCUMULATE)),
            (_produce, (d_desc, a_desc, d_tail_desc, a_tail_desc, d_ring, a_ring, full, empty, counts_ptr,
                        d_columns, a_columns, num_groups, 2, GROUP_ROWS, COLUMNS, DEPTH, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def hopper_wgrad(
    d_out: Tensor, a: Tensor, counts: Sequence[int] | Tensor, grad: Tensor, accumulate: bool, num_sms: int | None
) -> Tensor:
    """`reference.grouped_wgrad` into `grad`, on sm_90; operands checked, contiguous and not empty."""
    groups, d_columns, a_columns = grad.shape
    sizes = device_counts(counts, a.device, groups)
    d_block, a_block, dtype = [TILE.depth, GROUP_ROWS], [TILE.depth, TILE.columns], TYPES[a.dtype]
    d_layout, a_layout = shared_layout(d_block, dtype), shared_layout(a_block, dtype)
    tiles = groups * triton.cdiv(d_columns, TILE.rows) * triton.cdiv(a_columns, TILE.columns)
    _hopper_wgrad_kernel[(min(tiles, num_sms or multiprocessors(a.device)),)](
        TensorDescriptor.from_tensor(d_out, d_block, d_layout),
        TensorDescriptor.from_tensor(a, a_block, a_layout),
        TensorDescriptor.from_tensor(tails(d_out, sizes, TILE.depth), d_block, d_layout),
        TensorDescriptor.from_tensor(tails(a, sizes, TILE.depth), a_block, a_layout),
        grad, sizes, d_columns, a_columns, groups, **_constants(accumulate), num_warps=TILE.warps,
    )  # fmt: skip
    return grad


def compare(device: torch.device, plain: Callable[..., Tensor]) -> float:
    """For `forms.hopper_form`: gradients alone and added to others, with NaN after the last group."""
    generator = torch.Generator(device).manual_seed(0)
    counts = torch.tensor([0, 1, 200, 64, 0, 385], device=device)
    d = torch.randn(650 + 9, 272, generator=generator, device=device).bfloat16()
    a = torch.randn(650 + 9, 400, generator=generator, device=device).bfloat16()
    d[650:] = a[650:] = float("nan")
    before = torch.randn(6, 272, 400, generator=generator, device=device)
    worst = 0.0
    for accumulate in (False, True):
        expected = plain(d, a, counts, out=before.clone() if accumulate else None)
        grad = before.clone() if accumulate else torch.full_like(before, float("nan"))
        worst = max(worst, difference(hopper_wgrad(d, a, counts, grad, accumulate, num_sms=3), expected))
    return worst


def variants() -> list[Variant]:
    """Both forms, for `aot`."""
    return [_variant(accumulate) for accumulate in (True, False)]


def _variant(accumulate: bool) -> Variant:
    d_type = descriptor_type([TILE.depth, GROUP_ROWS], gl.bfloat16)
    a_type = descriptor_type([TILE.depth, TILE.columns], gl.bfloat16)
    arguments = {
        "d_desc": d_type, "a_desc": a_type, "d_tail_desc": d_type, "a_tail_desc": a_type,
        "out_ptr": "*fp32", "counts_ptr": "*i32", "d_columns": "i32", "a_columns": "i32", "num_groups": "i32",
    }  # fmt: skip
    name = f"hopper_wgrad{' accumulate' if accumulate else ''}"
    return variant(name, _hopper_wgrad_kernel, TILE, CONSUMERS, 2, arguments, _constants(accumulate))


def _constants(accumulate: bool) -> dict[str, Any]:
    return {
        "GROUP_ROWS": GROUP_ROWS, "COLUMNS": TILE.columns, "DEPTH": TILE.depth, "STAGES": TILE.stages,
        "ACCUMULATE": accumulate,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS, "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }  # fmt: skip
