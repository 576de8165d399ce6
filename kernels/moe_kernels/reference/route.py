"""Routing of tokens to experts without its gradient, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
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
    """DeepSeek-V3's routing (arXiv 2412.19437, section 2.1.2): logits [T, E] fp32 or fp64, expert_bias [E] fp32.

    scores = sigmoid (or softmax) of the logits; the top_k best of scores + bias among the experts of the top_groups
    best of num_groups equal groups, a group's score being the sum of its two best (`sum_top2`) or its best (`max`).
    Of equal ones the lower index; NaN is the smallest score. Weights are the unbiased scores of the chosen,
    normalised to sum 1 in log space if asked, times route_scale.

    Returns expert_ids [T, K] int64, ascending in each row; weights [T, K]; scores [T, E]; the number of tokens
    of each expert [E] int64, without those whose token_mask [T] is False.
    """
    scores = sigmoid(logits) if score_function == "sigmoid" else logits.softmax(dim=1)
    biased = scores + expert_bias
    if top_groups < num_groups:
        grouped = biased.unflatten(1, (num_groups, -1))  # [T, G, E/G]
        best = grouped.topk(2 if group_score == "sum_top2" else 1, dim=2).values
        allowed = choose(best.sum(dim=2), top_groups)
        # -inf, not 0: a masked expert must lose against any allowed one, however negative its bias.
        biased = grouped.masked_fill(~allowed[:, :, None], float("-inf")).flatten(1)
    ids = chosen_ids(choose(biased, top_k), top_k)
    counted = ids if token_mask is None else ids[token_mask]
    counts = torch.bincount(counted.flatten(), minlength=logits.shape[1])
    return ids, weigh(logits, ids, score_function, normalize, route_scale), scores, counts


def weigh(logits: Tensor, expert_ids: Tensor, score_function: str, normalize: bool, route_scale: float) -> Tensor:
    """Weights [T, K] of chosen experts, differentiable. Normalised in log space: tiny scores still sum to 1."""
    if normalize:
        chosen = logits.gather(1, expert_ids)
        weights = (log_sigmoid(chosen) if score_function == "sigmoid" else chosen).softmax(dim=1)
    elif score_function == "sigmoid":
        weights = sigmoid(logits.gather(1, expert_ids))
    else:
        weights = logits.softmax(dim=1).gather(1, expert_ids)
    return weights * route_scale


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) from exp, whose CPU code gives an element the same bits wherever it stands."""
    return 1 / (1 + torch.exp(-x))


def log_sigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)), finite and with a gradient for any finite x; absolute error about one unit in 1.

    Not by log1p: unlike exp and log, its CPU code gives an element other bits at the end of a tensor. The minimum
    with 0 is written so that its gradient at 0 is 1/2.
    """
    return (x - x.abs()) / 2 - torch.log(1 + torch.exp(-x.abs()))


@torch.no_grad()
def choose(scores: Tensor, k: int) -> Tensor:
    """A mask of the k largest entries of each row: scores [T, N] -> bool [T, N], exactly k True in every row.

    torch.topk alone returns tied entries in an order that depends on device, size and algorithm: of equal ones the
    lower index wins here. NaN counts as the smallest score, so that a diverging run shows NaN and no index error.
    """
    scores = scores.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    least = scores.topk(k, dim=1).values[:, -1:]
    above = scores > least
    tied = scores == least
    wanted = k - above.sum(dim=1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=1) <= wanted))


def chosen_ids(mask: Tensor, k: int) -> Tensor:
    """Indices of the True entries of a mask with k in each row: bool [T, N] -> int64 [T, k], ascending."""
    if torch.compiler.is_compiling():  # a graph wants sizes that do not depend on the data
        ids = torch.arange(mask.shape[1], device=mask.device).where(mask, mask.shape[1])
        return ids.sort(dim=1).values[:, :k]
    return mask.nonzero()[:, 1].clone().view(-1, k)  # its own memory from the start, as an op's result must have
