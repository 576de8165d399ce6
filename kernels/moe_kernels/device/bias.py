"""A bias of the down projection, weighted by row, forward and backward (see `reference.add_bias`).

No atomics: a program of the bias' gradient owns a stretch of one group's bias and adds that group's rows up in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.device.tiles import device_counts, find_tile, group_bound, group_rows
from moe_kernels.device.tuning import Variant

ROWS, COLUMNS = 8, 512
STEP_ROWS, STEP_COLUMNS = 32, 128  # of the bias' gradient
WARPS = 4


@triton.jit
def _add_bias_kernel(
    rows_ptr, weight_ptr, bias_ptr, out_ptr, counts_ptr, rows, dim, num_groups,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group, first, end = find_tile(counts_ptr, num_groups, tl.program_id(0), GROUPS, ROWS)
    row, column = first + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # Rows after the last group: stored as they are.
    stored, biased = tl.where(group < num_groups, end, rows), tl.where(group < num_groups, dim, 0)
    inside = (row < stored)[:, None] & (column < dim)[None, :]
    place = row.to(tl.int64)[:, None] * dim + column[None, :]
    bias = tl.load(bias_ptr + group.to(tl.int64) * dim + column, mask=column < biased, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + row, mask=row < end, other=0.0).to(tl.float32)
    value = tl.load(rows_ptr + place, mask=inside, other=0.0).to(tl.float32) + weight[:, None] * bias[None, :]
    tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _weight_gradient_kernel(
    d_rows_ptr, bias_ptr, d_weight_ptr, counts_ptr, rows, dim, num_groups,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group, first, end = find_tile(counts_ptr, num_groups, tl.program_id(0), GROUPS, ROWS)
    row = first + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, tl.where(group < num_groups, dim, 0), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < end)[:, None] & (column < dim)[None, :]
        d = tl.load(d_rows_ptr + row.to(tl.int64)[:, None] * dim + column[None, :], mask=inside, other=0.0)
        bias = tl.load(bias_ptr + group.to(tl.int64) * dim + column, mask=column < dim, other=0.0)
        total += tl.sum(d.to(tl.float32) * bias.to(tl.float32)[None, :], 1)
    tl.store(d_weight_ptr + row, total, mask=row < tl.where(group < num_groups, end, rows))


@triton.jit
def _bias_gradient_kernel(
    d_rows_ptr, weight_ptr, d_bias_ptr, counts_ptr, dim, num_groups,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    start, count = group_rows(counts_ptr, num_groups, group, GROUPS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(start, start + count, ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < start + count
        inside = valid[:, None] & (column < dim)[None, :]
        d = tl.load(d_rows_ptr + row.to(tl.int64)[:, None] * dim + column[None, :], mask=inside, other=0.0)
        weight = tl.load(weight_ptr + row, mask=valid, other=0.0).to(tl.float32)
        total += tl.sum(d.to(tl.float32) * weight[:, None], 0)
    tl.store(d_bias_ptr + tl.cast(group, tl.int64) * dim + column, total, mask=column < dim)


def add_bias(rows: Tensor, weight: Tensor, bias: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
    """See `reference.add_bias`."""
    (number, dim), groups = rows.shape, bias.shape[0]
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if out.numel():
        _add_bias_kernel[(triton.cdiv(number, ROWS) + groups, triton.cdiv(dim, COLUMNS))](
            rows.contiguous(), weight, bias.contiguous(), out, device_counts(counts, rows.device, groups),
            number, dim, groups, GROUPS=group_bound(groups), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return out


def add_bias_backward(
    d_rows: Tensor, weight: Tensor, bias: Tensor, counts: Sequence[int] | Tensor
) -> tuple[Tensor, Tensor]:
    """See `reference.add_bias_backward`."""
    (number, dim), groups = d_rows.shape, bias.shape[0]
    d_weight, d_bias = torch.zeros_like(weight), torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    if d_rows.numel():
        sizes, d_rows = device_counts(counts, d_rows.device, groups), d_rows.contiguous()
        _weight_gradient_kernel[(triton.cdiv(number, ROWS) + groups,)](
            d_rows, bias.contiguous(), d_weight, sizes, number, dim, groups,
            GROUPS=group_bound(groups), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        _bias_gradient_kernel[(groups, triton.cdiv(dim, STEP_COLUMNS))](
            d_rows, weight, d_bias, sizes, dim, groups,
            GROUPS=group_bound(groups), ROWS=STEP_ROWS, COLUMNS=STEP_COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return d_weight, d_bias


def variants() -> list[Variant]:
    """The three kernels in bf16, for `aot`."""
    tile = {"GROUPS": 32, "ROWS": ROWS, "COLUMNS": COLUMNS}
    step = {"GROUPS": 32, "ROWS": STEP_ROWS, "COLUMNS": STEP_COLUMNS}
    sizes = {"counts_ptr": "*i32", "rows": "i32", "dim": "i32", "num_groups": "i32"}
    names = {"rows_ptr": "*bf16", "d_rows_ptr": "*bf16", "out_ptr": "*bf16", "bias_ptr": "*bf16", "weight_ptr": "*fp32"}
    names |= {"d_weight_ptr": "*fp32", "d_bias_ptr": "*fp32"} | sizes
    kernels = {
        "add_bias": (_add_bias_kernel, tile),
        "add_bias gradient of weights": (_weight_gradient_kernel, tile),
        "add_bias gradient of bias": (_bias_gradient_kernel, step),
    }
    return [
        Variant(name, kernel, {n: names[n] for n in kernel.arg_names if n in names}, constants, {"num_warps": WARPS})
        for name, (kernel, constants) in kernels.items()
    ]
