"""The last rows of each group by themselves, filled up with zeros: what a bulk copy cannot mask.

A weight gradient sums over a group's rows in whole steps. What follows a group's last rows belongs to another group or
to nobody, and may be NaN. The Hopper form, which has only bulk copies into shared memory, reads a group's last step
from here; it is at most a step of each group, however many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.device.tiles import device_counts, group_bound, group_rows
from moe_kernels.device.tuning import Variant

COLUMNS, WARPS = 128, 4


@triton.jit
def _tails_kernel(x_ptr, out_ptr, counts_ptr, columns, num_groups,
                  STEP: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr):  # fmt: skip
    group, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start, count = group_rows(counts_ptr, num_groups, group, GROUPS)
    step = tl.arange(0, STEP)
    place = tl.cast(count // STEP * STEP, tl.int64) + step
    inside = (column < columns)[None, :]
    x = tl.load(x_ptr + (start + place)[:, None] * columns + column[None, :],
                mask=(place < count)[:, None] & inside, other=0.0)  # fmt: skip
    row = tl.cast(group, tl.int64) * STEP + step
    tl.store(out_ptr + row[:, None] * columns + column[None, :], x, mask=inside)


def tails(x: Tensor, counts: Sequence[int] | Tensor, step: int) -> Tensor:
    """x [R, D] of rows sorted by group, counts [e] -> [e * step, D]: of each group the rows after its last whole step.

    Zeros in place of those that a step lacks; a group of whole steps has only zeros.
    """
    groups, columns = len(counts), x.shape[1]
    out = torch.empty(groups * step, columns, dtype=x.dtype, device=x.device)
    if out.numel():
        _tails_kernel[(groups, triton.cdiv(columns, COLUMNS))](
            x.contiguous(), out, device_counts(counts, x.device), columns, groups,
            STEP=step, COLUMNS=COLUMNS, GROUPS=group_bound(groups), num_warps=WARPS,
        )  # fmt: skip
    return out


def variants() -> list[Variant]:
    """The one tuning entry, for `aot`."""
    arguments = {
        "x_ptr": "*bf16", "out_ptr": "*bf16", "counts_ptr": "*i32", "columns": "i32", "num_groups": "i32",
    }  # fmt: skip
    constants = {"STEP": 64, "COLUMNS": COLUMNS, "GROUPS": 32}
    return [Variant("tails 64", _tails_kernel, arguments, constants, {"num_warps": WARPS})]
