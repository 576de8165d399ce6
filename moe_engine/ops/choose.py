"""The k best of each row, with ties decided the same way everywhere: the lower index wins."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def choose(scores: Tensor, k: int) -> Tensor:
    """A mask of the k largest entries of each row: scores [T, N] -> bool [T, N], exactly k True in every row.

    torch.topk alone returns tied entries in an order that depends on device, size and algorithm. NaN counts as the
    smallest score, so that a diverging run shows a NaN loss and not an index error.
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
    return mask.nonzero()[:, 1].view(-1, k)
