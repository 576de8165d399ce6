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

from moe_kernels.device.hopper import (
    GROUP_ROWS,
    MULTICAST,
    TYPES,
    Copied,
    barrier_layouts,
    ctas_of,
    difference,
    grid,
    group_rows,
    launch_options,
    load_shared_tile,
    load_tile,
    make_barriers,
    ring,
    sums_layout,
    variant,
    wait_until_read,
)
from moe_kernels.device.tails import tails
from moe_kernels.device.tiles import device_counts
from moe_kernels.device.tuning import Tile, Variant

CONSUMERS = 2
TILE = Tile(CONSUMERS * GROUP_ROWS, 256, 64, 4, 4)
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24


@gluon.jit
def _load_step(d_desc, a_desc, d_ring, a_ring, full, stage, row, first_row, first_column,
               CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr, CTAS: gl.constexpr):  # fmt: skip
    for part in gl.static_range(CONSUMERS):
        load_shared_tile(d_desc, [row, first_row + part * GROUP_ROWS], full.index(stage),
                         d_ring.index(stage * CONSUMERS + part), CTAS)  # fmt: skip
    load_tile(a_desc, [row, first_column], full.index(stage), a_ring.index(stage))


@gluon.jit
def _produce(
    d_desc, a_desc, d_tail_desc, a_tail_desc, d_ring, a_ring, full, empty, go, counts_ptr,
    d_columns, a_columns, num_groups,
    CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, CTAS: gl.constexpr,
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
            wait_until_read(empty, go, stage, parity, CTAS)
            mbarrier.expect(full.index(stage), (ROWS + COLUMNS // CTAS) * DEPTH * 2)
            if k + DEPTH <= count:
                _load_step(d_desc, a_desc, d_ring, a_ring, full, stage, start + k, first_row, first_column,
                           CONSUMERS, GROUP_ROWS, CTAS)  # fmt: skip
            else:
                _load_step(d_tail_desc, a_tail_desc, d_ring, a_ring, full, stage, group * DEPTH, first_row,
                           first_column, CONSUMERS, GROUP_ROWS, CTAS)  # fmt: skip
            step += 1


@gluon.jit
def _add_half(out_ptr, half, first_row, first_column, d_columns, a_columns,
              GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, ACCUMULATE: gl.constexpr,
              CTAS: gl.constexpr):  # fmt: skip
    """Store a half [GROUP_ROWS, CTAS, COLUMNS] of the columns of each multiprocessor, or add it to what is there."""
    layout: gl.constexpr = sums_layout(CTAS * COLUMNS, 16, CTAS)
    half = gl.convert_layout(half.reshape([GROUP_ROWS, CTAS * COLUMNS]), layout)
    row = first_row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, CTAS * COLUMNS, layout=gl.SliceLayout(0, layout))
    column += first_column + column // COLUMNS * COLUMNS  # the other halves lie between
    place = out_ptr + row.to(gl.int64)[:, None] * a_columns + column[None, :]
    inside = (row < d_columns)[:, None] & (column < a_columns)[None, :]
    if ACCUMULATE:
        half += gl.load(place, mask=inside, other=0.0)
    gl.store(place, half, mask=inside)


@gluon.jit
def _consume(
    PART: gl.constexpr, d_ring, a_ring, full, empty, out_ptr, counts_ptr, d_columns, a_columns, num_groups,
    CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, ACCUMULATE: gl.constexpr, CTAS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * GROUP_ROWS
    HALF: gl.constexpr = COLUMNS // CTAS // 2
    sums: gl.constexpr = sums_layout(COLUMNS, 16, CTAS)
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
            left, right = gl.split(total.reshape([GROUP_ROWS, CTAS, 2, HALF]).permute(0, 1, 3, 2))
            _add_half(out, left, first_row, first_column, d_columns, a_columns, GROUP_ROWS, HALF, ACCUMULATE, CTAS)
            _add_half(out, right, first_row, first_column + HALF, d_columns, a_columns,
                      GROUP_ROWS, HALF, ACCUMULATE, CTAS)  # fmt: skip


@gluon.jit
def _hopper_wgrad_kernel(
    d_desc, a_desc, d_tail_desc, a_tail_desc, out_ptr, counts_ptr, d_columns, a_columns, num_groups,
    GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    ACCUMULATE: gl.constexpr, CTAS: gl.constexpr, EACH: gl.constexpr, FIRST: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    d_ring = gl.allocate_shared_memory(d_desc.dtype, [STAGES * 2, DEPTH, GROUP_ROWS], d_desc.layout)
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, DEPTH, COLUMNS], a_desc.layout)
    full, empty, go = make_barriers(STAGES, CTAS, EACH, FIRST, 2, 0)
    gl.warp_specialize(
        [
            (_consume, (0, d_ring, a_ring, full, empty, out_ptr, counts_ptr, d_columns, a_columns, num_groups,
                        2, GROUP_ROWS, COLUMNS, DEPTH, STAGES, ACCUMULATE, CTAS)),
            (_consume, (1, d_ring, a_ring, full, empty, out_ptr, counts_ptr, d_columns, a_columns, num_groups,
                        2, GROUP_ROWS, COLUMNS, DEPTH, STAGES, ACCUMULATE, CTAS)),
            (_produce, (d_desc, a_desc, d_tail_desc, a_tail_desc, d_ring, a_ring, full, empty, go, counts_ptr,
                        d_columns, a_columns, num_groups, 2, GROUP_ROWS, COLUMNS, DEPTH, STAGES, CTAS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def hopper_wgrad(
    d_out: Tensor,
    a: Tensor,
    counts: Sequence[int] | Tensor,
    grad: Tensor,
    accumulate: bool,
    num_sms: int | None,
    pairs: bool | None = None,
) -> Tensor:
    """`reference.grouped_wgrad` into `grad`, on sm_90; operands checked, contiguous and not empty.

    pairs: whether multiprocessors share columns of `d_out` in pairs; None: where that fits.
    """
    groups, d_columns, a_columns = grad.shape
    sizes = device_counts(counts, a.device, groups)
    ctas = ctas_of(a_columns, TILE, num_sms, pairs)
    (d_copied, a_copied), dtype = _blocks(ctas), TYPES[a.dtype]
    tiles = groups * triton.cdiv(d_columns, TILE.rows) * triton.cdiv(a_columns, ctas * TILE.columns)
    _hopper_wgrad_kernel[grid(tiles, ctas, num_sms, a.device)](
        d_copied.descriptor(d_out, dtype), a_copied.descriptor(a, dtype),
        d_copied.descriptor(tails(d_out, sizes, TILE.depth), dtype),
        a_copied.descriptor(tails(a, sizes, TILE.depth), dtype),
        grad, sizes, d_columns, a_columns, groups, **_constants(accumulate, ctas),
        **launch_options(TILE, ctas),
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
        for pairs in [False] + [True] * MULTICAST:
            grad = before.clone() if accumulate else torch.full_like(before, float("nan"))
            worst = max(worst, difference(hopper_wgrad(d, a, counts, grad, accumulate, 3, pairs), expected))
    return worst


def variants() -> list[Variant]:
    """Alone and added, by one and by pairs, for `aot`."""
    return [_variant(accumulate, ctas) for accumulate in (True, False) for ctas in [1] + [2] * MULTICAST]


def _blocks(ctas: int) -> tuple[Copied, Copied]:
    """Of both operands; a pair shares all columns of d, each has its own of a."""
    cuts = ([0, 0], [0, 1]) if ctas == 2 else (None, None)
    return Copied([TILE.depth, GROUP_ROWS], cuts[0]), Copied([TILE.depth, ctas * TILE.columns], cuts[1])


def _variant(accumulate: bool, ctas: int) -> Variant:
    d_type, a_type = (copied.type(gl.bfloat16) for copied in _blocks(ctas))
    arguments = {
        "d_desc": d_type, "a_desc": a_type, "d_tail_desc": d_type, "a_tail_desc": a_type,
        "out_ptr": "*fp32", "counts_ptr": "*i32", "d_columns": "i32", "a_columns": "i32", "num_groups": "i32",
    }  # fmt: skip
    name = f"hopper_wgrad{' accumulate' if accumulate else ''}{' pair' if ctas == 2 else ''}"
    return variant(name, _hopper_wgrad_kernel, TILE, CONSUMERS, 2, arguments, _constants(accumulate, ctas), ctas)


def _constants(accumulate: bool, ctas: int) -> dict[str, Any]:
    return {
        "GROUP_ROWS": GROUP_ROWS, "COLUMNS": ctas * TILE.columns, "DEPTH": TILE.depth, "STAGES": TILE.stages,
        "ACCUMULATE": accumulate, **barrier_layouts(ctas),
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS, "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }  # fmt: skip
