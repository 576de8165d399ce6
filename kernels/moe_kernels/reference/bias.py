"""A bias of the down projection, in plain torch: each row adds its expert's bias times the row's weight.

The expert's weight multiplies inside SwiGLU, before the projection; what the projection's own bias adds is weighted
here. Summed over a token's rows this is sum_k w_k * b[e_k] (gpt-oss has such biases).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_kernels.reference.wide import as_list


def add_bias(rows: Tensor, weight: Tensor, bias: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
    """rows [N, D] sorted by group plus weight [N] times bias [e, D] of their group, in fp32 and rounded once.

    counts [e]: rows of each group, summing to at most N. Rows after the last group are returned as they are.
    """
    group = _group_of_row(counts, bias.device)
    out, used = rows.clone(), len(group)
    wide = torch.promote_types(rows.dtype, torch.float32)
    out[:used] = (rows[:used].to(wide) + weight[:used, None].to(wide) * bias[group].to(wide)).to(rows.dtype)
    return out


def add_bias_backward(
    d_rows: Tensor, weight: Tensor, bias: Tensor, counts: Sequence[int] | Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `add_bias` for weight [N] and bias [e, D], summed in fp32; the rows' own gradient is d_rows.

    A group without rows has gradient zero, and so has the weight of a row after the last group.
    """
    group = _group_of_row(counts, bias.device)
    used, wide = len(group), torch.promote_types(d_rows.dtype, torch.float32)
    d_wide = d_rows[:used].to(wide)
    d_weight, d_bias = torch.zeros_like(weight), torch.zeros(bias.shape, dtype=wide, device=bias.device)
    d_weight[:used] = (d_wide * bias[group].to(wide)).sum(dim=1)
    weighted = d_wide * weight[:used, None].to(wide)
    for each, part in zip(d_bias, weighted.split(list(as_list(counts))), strict=True):
        each.copy_(part.sum(dim=0))
    return d_weight, d_bias


def _group_of_row(counts: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    sizes = torch.as_tensor(as_list(counts), dtype=torch.int64, device=device)
    return torch.arange(len(sizes), device=device).repeat_interleave(sizes)
