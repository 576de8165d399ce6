"""The Hopper form of `grouped_wgrad_fp8` (see `hopper`): two groups of four warps, a tile of 128x128.

As in the plain form each 128 of the sum is a product of its own, scaled by row and then by column into fp32. The scales
of a step are on their way while its bytes and its product are waited for; to load them a step ahead costs more
instructions (a thread has 34 of them, to be moved).
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
    barrier_layouts,
    coded_blocks,
    ctas_of,
    difference,
    grid,
    group_tiles,
    launch_options,
    load_shared_tile,
    load_tile,
    make_barriers,
    ring,
    sums_layout,
    variant,
    wait_until_read,
)
from moe_kernels.device.tiles import device_counts
from moe_kernels.device.tuning import Tile, Variant
from moe_kernels.fp8_format import BLOCK, CODE, blocks, padded_rows

CONSUMERS = 2
TILE = Tile(CONSUMERS * GROUP_ROWS, 128, BLOCK, 4, 6)
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 24


@gluon.jit
def _produce(
    d_desc, a_desc, d_ring, a_ring, full, empty, go, counts_ptr, d_rows, a_rows, num_groups,
    CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    CTAS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * GROUP_ROWS
    row_tiles, column_tiles = (d_rows + (ROWS - 1)) // ROWS, (a_rows + (COLUMNS - 1)) // COLUMNS
    step = 0
    for index in range(gl.program_id(0), num_groups * row_tiles * column_tiles, gl.num_programs(0)):
        group, tile = index // (row_tiles * column_tiles), index % (row_tiles * column_tiles)
        first_row, first_column = tile % row_tiles * ROWS, tile // row_tiles * COLUMNS
        start, steps = group_tiles(counts_ptr, group, 128)
        for k in range(start, start + steps):
            stage, parity = ring(step, STAGES)
            wait_until_read(empty, go, stage, parity, CTAS)
            mbarrier.expect(full.index(stage), (ROWS + COLUMNS // CTAS) * 128)
            for part in gl.static_range(CONSUMERS):
                load_shared_tile(d_desc, [first_row + part * GROUP_ROWS, k * 128], full.index(stage),
                                 d_ring.index(stage * CONSUMERS + part), CTAS)  # fmt: skip
            load_tile(a_desc, [first_column, k * 128], full.index(stage), a_ring.index(stage))
            step += 1


@gluon.jit
def _consume(
    PART: gl.constexpr, d_ring, a_ring, full, empty, d_scale_ptr, a_scale_ptr, out_ptr, counts_ptr,
    d_rows, a_rows, num_groups,
    CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    ACCUMULATE: gl.constexpr, CTAS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * GROUP_ROWS
    sums: gl.constexpr = sums_layout(COLUMNS, 32, CTAS)
    row_tiles, column_tiles = (d_rows + (ROWS - 1)) // ROWS, (a_rows + (COLUMNS - 1)) // COLUMNS
    d_width, a_width = (d_rows + 127) // 128 * 128, (a_rows + 127) // 128 * 128  # of the scales: whole blocks
    step = 0
    for index in range(gl.program_id(0), num_groups * row_tiles * column_tiles, gl.num_programs(0)):
        group, tile = index // (row_tiles * column_tiles), index % (row_tiles * column_tiles)
        first_row, first_column = tile % row_tiles * ROWS + PART * GROUP_ROWS, tile // row_tiles * COLUMNS
        start, steps = group_tiles(counts_ptr, group, 128)
        row = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, sums))
        column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, sums))
        d_place = d_scale_ptr + gl.to_tensor(start).to(gl.int64) * d_width + first_row
        a_place = a_scale_ptr + gl.to_tensor(start).to(gl.int64) * a_width + first_column
        total = gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, sums)
        for _ in range(steps):
            stage, parity = ring(step, STAGES)
            d_scale, a_scale = gl.load(d_place + row), gl.load(a_place + column)
            d_place += d_width
            a_place += a_width
            mbarrier.wait(full.index(stage), parity)
            d, a = d_ring.index(stage * CONSUMERS + PART), a_ring.index(stage).permute((1, 0))
            part = warpgroup_mma(d, a, gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, sums), use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(stage), count=1)
            total += part * d_scale[:, None] * a_scale[None, :]
            step += 1
        if (steps > 0) | (not ACCUMULATE):
            out = out_ptr + group.to(gl.int64) * d_rows * a_rows
            place = out + (first_row + row).to(gl.int64)[:, None] * a_rows + (first_column + column)[None, :]
            inside = (first_row + row < d_rows)[:, None] & (first_column + column < a_rows)[None, :]
            if ACCUMULATE:
                total += gl.load(place, mask=inside, other=0.0)
            gl.store(place, total, mask=inside)


@gluon.jit
def _hopper_wgrad_fp8_kernel(
    d_desc, d_scale_ptr, a_desc, a_scale_ptr, out_ptr, counts_ptr, d_rows, a_rows, num_groups,
    GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, ACCUMULATE: gl.constexpr,
    CTAS: gl.constexpr, EACH: gl.constexpr, FIRST: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    d_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, GROUP_ROWS, 128], d_desc.layout)
    a_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, COLUMNS, 128], a_desc.layout)
    full, empty, go = make_barriers(STAGES, CTAS, EACH, FIRST, 2, 0)
    gl.warp_specialize(
        [
            (_consume, (0, d_ring, a_ring, full, empty, d_scale_ptr, a_scale_ptr, out_ptr, counts_ptr,
                        d_rows, a_rows, num_groups, 2, GROUP_ROWS, COLUMNS, STAGES, ACCUMULATE, CTAS)),
            (_consume, (1, d_ring, a_ring, full, empty, d_scale_ptr, a_scale_ptr, out_ptr, counts_ptr,
                        d_rows, a_rows, num_groups, 2, GROUP_ROWS, COLUMNS, STAGES, ACCUMULATE, CTAS)),
            (_produce, (d_desc, a_desc, d_ring, a_ring, full, empty, go, counts_ptr,
                        d_rows, a_rows, num_groups, 2, GROUP_ROWS, COLUMNS, STAGES, CTAS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def hopper_wgrad_fp8(
    d_out: Tensor,
    d_out_scale: Tensor,
    a: Tensor,
    a_scale: Tensor,
    counts: Sequence[int] | Tensor,
    grad: Tensor,
    accumulate: bool,
    num_sms: int | None,
    pairs: bool | None = None,
) -> Tensor:
    """`reference.grouped_wgrad_fp8` into `grad`, on sm_90; operands checked, contiguous and not empty.

    pairs: whether multiprocessors share rows of `d_out` in pairs, for an even number of tiles; None: where that fits.
    """
    groups, d_rows, a_rows = grad.shape
    ctas = ctas_of(a_rows, TILE, num_sms, pairs)
    d_copied, a_copied = coded_blocks(TILE, ctas)
    tiles = groups * triton.cdiv(d_rows, TILE.rows) * triton.cdiv(a_rows, ctas * TILE.columns)
    _hopper_wgrad_fp8_kernel[grid(tiles, ctas, num_sms, a.device)](
        d_copied.descriptor(d_out, gl.float8e4nv), d_out_scale, a_copied.descriptor(a, gl.float8e4nv), a_scale,
        grad, device_counts(counts, a.device, groups), d_rows, a_rows, groups,
        **_constants(accumulate, ctas), **launch_options(TILE, ctas),
    )  # fmt: skip
    return grad


def compare(device: torch.device, plain: Callable[..., Tensor]) -> float:
    """For `forms.hopper_form`: gradients alone and added to others."""
    generator = torch.Generator(device).manual_seed(0)
    sizes, start = [0, 1, 200, 64, 0, 385], 0
    held = torch.zeros(padded_rows(650, 6), device=device)  # 1 where a place holds a row; the others' codes are 0
    for count in sizes:
        held[start : start + count] = 1
        start += blocks(count) * BLOCK
    counts, places = torch.tensor(sizes, device=device), len(held)
    d = (torch.randn(272, places, generator=generator, device=device) * held).to(CODE)
    a = (torch.randn(400, places, generator=generator, device=device) * held).to(CODE)
    d_scale = torch.rand(places // BLOCK, 384, generator=generator, device=device)
    a_scale = torch.rand(places // BLOCK, 512, generator=generator, device=device)
    before = torch.randn(6, 272, 400, generator=generator, device=device)
    operands, worst = (d, d_scale, a, a_scale, counts), 0.0
    for accumulate in (False, True):
        expected = plain(*operands, out=before.clone() if accumulate else None)
        for pairs in [False] + [True] * MULTICAST:
            grad = before.clone() if accumulate else torch.full_like(before, float("nan"))
            worst = max(worst, difference(hopper_wgrad_fp8(*operands, grad, accumulate, 3, pairs), expected))
    return worst


def variants() -> list[Variant]:
    """Alone and added, by one and by pairs, for `aot`."""
    return [_variant(accumulate, ctas) for accumulate in (True, False) for ctas in [1] + [2] * MULTICAST]


def _variant(accumulate: bool, ctas: int) -> Variant:
    d_copied, a_copied = coded_blocks(TILE, ctas)
    arguments = {
        "d_desc": d_copied.type(gl.float8e4nv), "d_scale_ptr": "*fp32",
        "a_desc": a_copied.type(gl.float8e4nv), "a_scale_ptr": "*fp32",
        "out_ptr": "*fp32", "counts_ptr": "*i32", "d_rows": "i32", "a_rows": "i32", "num_groups": "i32",
    }  # fmt: skip
    name = f"hopper_wgrad_fp8{' accumulate' if accumulate else ''}{' pair' if ctas == 2 else ''}"
    return variant(name, _hopper_wgrad_fp8_kernel, TILE, CONSUMERS, 1, arguments, _constants(accumulate, ctas), ctas)


def _constants(accumulate: bool, ctas: int) -> dict[str, Any]:
    return {
        "GROUP_ROWS": GROUP_ROWS, "COLUMNS": ctas * TILE.columns, "STAGES": TILE.stages, "ACCUMULATE": accumulate,
        **barrier_layouts(ctas),
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS, "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }  # fmt: skip
