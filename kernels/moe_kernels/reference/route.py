"""Routing of tokens to experts without its gradient, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def route(
    logits: Tensor,
    expert_bias: Tensor,
    top_k: int,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "sum_top2",
    score_function: str = "sigmoid",
    normalize: bool = True,
    route_scale: float = 1.0,
    token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """DeepSeek-V3's routing (arXiv 2412.19437, section 2.1.2): logits [T, E] fp32, expert_bias [E] fp32.

    scores = sigmoid (or softmax) of the logits; the top_k best of scores + bias among the experts of the top_groups
    best of num_groups equal groups, a group's score being the sum of its two best (`sum_top2`) or its best (`max`).
    Of equal ones the lower index; NaN is the smallest score. Weights are the unbiased scores of the chosen,
    normalised to sum 1 in log space if asked, times route_scale.

    Returns expert_ids [T, K] int64, ascending in each row; weights [T, K] fp32; scores [T, E]; the number of tokens
    of each expert [E] int64, without those whose token_mask [T] is False.
    """
    scores = 1 / (1 + torch.exp(-logits)) if score_function == "sigmoid" else logits.softmax(dim=1)
    biased = scores + expert_bias
    if top_groups < num_groups:
        grouped = biased.unflatten(1, (num_groups, -1))  # [T, G, E/G]
        best = grouped.topk(2 if group_score == "sum_top2" else 1, dim=2).values
        allowed = torch.zeros_like(best[:, :, 0], dtype=torch.bool).scatter_(
            1, _best(best.sum(dim=2), top_groups), True
        )
        biased = grouped.masked_fill(~allowed[:, :, None], float("-inf")).flatten(1)
    ids = _best(biased, top_k).sort(dim=1).values
    if normalize:
        chosen = logits.gather(1, ids)
        weights = (torch.nn.functional.logsigmoid(chosen) if score_function == "sigmoid" else chosen).softmax(dim=1)
    else:
        weights = scores.gather(1, ids)
    counted = ids if token_mask is None else ids[token_mask]
    counts = torch.bincount(counted.flatten(), minlength=logits.shape[1])
    return ids, weights * route_scale, scores, counts


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of each row; of equal ones the first; NaN is the smallest."""
    values = values.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    return values.argsort(dim=1, descending=True, stable=True)[:, :count]
