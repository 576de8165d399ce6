"""The Hopper form of `grouped_gemm_fp8` (see `hopper`): three groups of four warps, a tile of 192x128, five stages.

Each 128 of the sum is a product of its own, scaled into the fp32 total as in the plain form; scales of the next step
are loaded before the bytes of this one are waited for. It does not gather rows.
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
from moe_kernels.fp8_format import BLOCK, CODE

CONSUMERS = 3
TILE = Tile(CONSUMERS * GROUP_ROWS, 128, BLOCK, 4, 5)
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 160, 24


@gluon.jit
def _produce(
    a_desc, b_desc, a_ring, b_ring, full, empty, counts_ptr, rows, columns, depth, num_groups,
    CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    SWIZZLE: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * GROUP_ROWS
    row_tiles = count_tiles(counts_ptr, num_groups, rows, ROWS)
    column_tiles = (columns + (COLUMNS - 1)) // COLUMNS
    depth_blocks = (depth + 127) // 128
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of(index, row_tiles, column_tiles, SWIZZLE)
        group, first, end = find_tile(counts_ptr, num_groups, row_tile, rows, ROWS)
        steps = gl.where(group < num_groups, depth_blocks, 0)
        b_row = group * columns + column_tile * COLUMNS
        for k in range(steps):
            stage, parity = ring(step, STAGES)
            mbarrier.wait(empty.index(stage), parity ^ 1)  # the first round finds every stage empty
            mbarrier.expect(full.index(stage), (ROWS + COLUMNS) * 128)
            for part in gl.static_range(CONSUMERS):
                rows_at = first + part * GROUP_ROWS
                load_tile(a_desc, [rows_at, k * 128], full.index(stage), a_ring.index(stage * CONSUMERS + part))
            load_tile(b_desc, [b_row, k * 128], full.index(stage), b_ring.index(stage))
            step += 1


@gluon.jit
def _consume(
    PART: gl.constexpr, a_ring, b_ring, full, empty, a_scale_ptr, b_scale_ptr, out_ptr, counts_ptr,
    rows, a_rows, columns, depth, num_groups,
    CONSUMERS: gl.constexpr, GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    SWIZZLE: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * GROUP_ROWS
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 32])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])  # 128 bits a thread
    row_tiles = count_tiles(counts_ptr, num_groups, rows, ROWS)
    column_tiles = (columns + (COLUMNS - 1)) // COLUMNS
    depth_blocks = (depth + 127) // 128
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of(index, row_tiles, column_tiles, SWIZZLE)
        group, first, end = find_tile(counts_ptr, num_groups, row_tile, rows, ROWS)
        steps = gl.where(group < num_groups, depth_blocks, 0)
        first_row, first_column = first + PART * GROUP_ROWS, column_tile * COLUMNS
        # Every load of a scale is valid: rows outside a group use their neighbours' scales, the last step its own.
        row = gl.minimum(first_row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, sums)), rows - 1)
        a_place = a_scale_ptr + row.to(gl.int64)
        block = gl.minimum(group, num_groups - 1).to(gl.int64) * ((columns + 127) // 128) + first_column // 128
        b_place = b_scale_ptr + block * depth_blocks
        a_scale, b_scale = gl.load(a_place), gl.load(b_place)
        total = gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, sums)
        for k in range(steps):
            stage, parity = ring(step, STAGES)
            scale = a_scale * b_scale
            ahead = gl.minimum(k + 1, steps - 1)
            a_scale, b_scale = gl.load(a_place + ahead * a_rows), gl.load(b_place + ahead)
            mbarrier.wait(full.index(stage), parity)
            a = a_ring.index(stage * CONSUMERS + PART)
            b = b_ring.index(stage).permute((1, 0))
            part = warpgroup_mma(a, b, gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, sums), use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(stage), count=1)
            total += part * scale[:, None]
            step += 1
        out = gl.convert_layout(total.to(out_ptr.dtype.element_ty), stored)
        out_row = first_row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, stored))
        out_column = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, stored))
        place = out_ptr + out_row.to(gl.int64)[:, None] * columns + out_column[None, :]
        gl.store(place, out, mask=(out_row < end)[:, None] & (out_column < columns)[None, :])


@gluon.jit
def _hopper_gemm_fp8_kernel(
    a_desc, a_scale_ptr, b_desc, b_scale_ptr, out_ptr, counts_ptr, rows, a_rows, columns, depth, num_groups,
    GROUP_ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, SWIZZLE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 3, GROUP_ROWS, 128], a_desc.layout)
    b_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, COLUMNS, 128], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=3)
    gl.warp_specialize(
        [
            (_consume, (0, a_ring, b_ring, full, empty, a_scale_ptr, b_scale_ptr, out_ptr, counts_ptr,
                        rows, a_rows, columns, depth, num_groups, 3, GROUP_ROWS, COLUMNS, STAGES, SWIZZLE)),
            (_consume, (1, a_ring, b_ring, full, empty, a_scale_ptr, b_scale_ptr, out_ptr, counts_ptr,
                        rows, a_rows, columns, depth, num_groups, 3, GROUP_ROWS, COLUMNS, STAGES, SWIZZLE)),
            (_consume, (2, a_ring, b_ring, full, empty, a_scale_ptr, b_scale_ptr, out_ptr, counts_ptr,
                        rows, a_rows, columns, depth, num_groups, 3, GROUP_ROWS, COLUMNS, STAGES, SWIZZLE)),
            (_produce, (a_desc, b_desc, a_ring, b_ring, full, empty, counts_ptr,
                        rows, columns, depth, num_groups, 3, GROUP_ROWS, COLUMNS, STAGES, SWIZZLE)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def hopper_gemm_fp8(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    counts: Sequence[int] | Tensor,
    dtype: torch.dtype,
    num_sms: int | None,
) -> Tensor:
    """`reference.grouped_gemm_fp8` without a gather, on sm_90; operands checked, contiguous and not empty."""
    rows, (groups, columns, depth) = a.shape[0], b.shape
    out = torch.empty(rows, columns, dtype=dtype, device=a.device)
    tiles = (triton.cdiv(rows, TILE.rows) + groups) * triton.cdiv(columns, TILE.columns)  # at least those there are
    a_block, b_block = [GROUP_ROWS, BLOCK], [TILE.columns, BLOCK]
    _hopper_gemm_fp8_kernel[(min(tiles, num_sms or multiprocessors(a.device)),)](
        TensorDescriptor.from_tensor(a, a_block, shared_layout(a_block, gl.float8e4nv)), a_scale,
        TensorDescriptor.from_tensor(b.flatten(0, 1), b_block, shared_layout(b_block, gl.float8e4nv)), b_scale,
        out, device_counts(counts, a.device, groups), rows, rows, columns, depth, groups,
        **_constants(), num_warps=TILE.warps,
    )  # fmt: skip
    return out


def compare(device: torch.device, plain: Callable[..., Tensor]) -> float:
    """For `forms.hopper_form`: groups of all kinds, and rows after the last one."""
    generator = torch.Generator(device).manual_seed(0)
    counts = torch.tensor([0, 1, 200, 64, 0, 385], device=device)
    rows, depth, columns, groups = 650 + 9, 400, 272, 6
    a = torch.randn(rows, depth, generator=generator, device=device).to(CODE)
    b = torch.randn(groups, columns, depth, generator=generator, device=device).to(CODE)
    a_scale = torch.rand(4, rows, generator=generator, device=device)
    b_scale = torch.rand(groups, 3, 4, generator=generator, device=device)
    expected = plain(a, a_scale, b, b_scale, counts, dtype=torch.float32)
    result = hopper_gemm_fp8(a, a_scale, b, b_scale, counts, torch.float32, num_sms=3)
    return float("inf") if result[650:].any() else difference(result, expected)


def variants() -> list[Variant]:
    """The one tuning entry, for `aot`."""
    arguments = {
        "a_desc": descriptor_type([GROUP_ROWS, BLOCK], gl.float8e4nv), "a_scale_ptr": "*fp32",
        "b_desc": descriptor_type([TILE.columns, BLOCK], gl.float8e4nv), "b_scale_ptr": "*fp32",
        "out_ptr": "*bf16", "counts_ptr": "*i32",
        "rows": "i32", "a_rows": "i32", "columns": "i32", "depth": "i32", "num_groups": "i32",
    }  # fmt: skip
    return [variant("hopper_gemm_fp8", _hopper_gemm_fp8_kernel, TILE, CONSUMERS, 1, arguments, _constants())]


def _constants() -> dict[str, Any]:
    return {
        "GROUP_ROWS": GROUP_ROWS, "COLUMNS": TILE.columns, "STAGES": TILE.stages, "SWIZZLE": SWIZZLE,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS, "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }  # fmt: skip
