"""A choice of experts that keeps a stated assumption: what a dry run's router gives in place of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from moe_engine.planner.choices import Ints


class AssumedChoices:
    """Stands beside a layer's router (`moe.choices`): the same choice for any micro-batch of as many tokens."""

    def __init__(self, choose: Callable[[int], Ints]) -> None:
        self.choose = cache(lambda tokens: torch.from_numpy(choose(tokens)))

    def given(self, tokens: int, device: torch.device, label: str) -> Tensor | None:
        return self.choose(tokens).clone()  # a tensor of its own for each micro-batch, as a router's

    def taken(self, expert_ids: Tensor, label: str) -> None:
        """Nobody asks."""
