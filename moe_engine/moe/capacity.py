"""A limit on each expert's tokens: choices beyond it are dropped (Switch Transformer, arXiv 2101.03961)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def limit_load(
    expert_ids: Tensor,
    expert_weights: Tensor,
    num_experts: int,
    factor: float,
    by_score: bool,
    token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep at most ceil(factor * T * K / num_experts) choices of each expert, those with the largest weights or the
    first ones.

    expert_ids, expert_weights [T, K]; token_mask [T] bool: padding is no token, its choices are dropped. Returns
    ids with -1 and weights with 0 where a choice is dropped, and [dropped, all] choices of tokens, int64. Weights that
    are kept stay as they are. What is dropped depends on which tokens are routed together, and so on the layout.
    """
    T, K = expert_ids.shape
    valid = torch.ones_like(expert_ids, dtype=torch.bool) if token_mask is None else token_mask[:, None].expand(T, K)
    count = valid.sum()
    capacity: Tensor | int = math.ceil(factor * (T * K) / num_experts)
    if token_mask is not None:  # known to the device alone
        capacity = torch.ceil(factor * count.double() / num_experts).long()
    wanted = expert_ids.where(valid, num_experts).flatten()
    order = torch.arange(T * K, device=expert_ids.device)
    if by_score:
        order = expert_weights.detach().flatten().argsort(descending=True, stable=True)
    order = order[wanted[order].argsort(stable=True)]  # by expert, the best of each first
    loads = torch.bincount(wanted, minlength=num_experts + 1)
    place = torch.empty_like(order)
    place[order] = torch.arange(T * K, device=order.device) - (loads.cumsum(0) - loads)[wanted[order]]
    kept = valid & (place.view(T, K) < capacity)
    dropped = torch.stack((count - kept.sum(), count))
    return expert_ids.masked_fill(~kept, -1), expert_weights.masked_fill(~kept, 0), dropped
