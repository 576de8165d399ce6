"""A choice of experts that keeps a stated assumption: what a dry run's router gives in place of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import ModelConfig
from moe_engine.planner.architecture import architecture
from moe_engine.planner.routing import RowCounts, row_counts


class AssumedChoices:
    """Stands beside a layer's router (`moe.choices`): the same choice for any micro-batch of as many tokens."""

    def __init__(self, choose: Callable[[int], Tensor]) -> None:
        self.choose = cache(choose)

    def given(self, tokens: int, device: torch.device, label: str) -> Tensor | None:
        return self.choose(tokens).clone()  # a tensor of its own for each micro-batch, as a router's

    def taken(self, expert_ids: Tensor, label: str) -> None:
        """Nobody asks."""


def expert_choice(model: ModelConfig, tokens: int, ep: int, busiest: int, load: float, exact: bool) -> Tensor:
    """Expert ids [T, K] of a rank's tokens, by the assumption of `planner.routing`; see `row_counts`."""
    if ep == 1 or (exact and load == 1.0):
        return even_choice(tokens, model.top_k, model.num_experts)
    rows = row_counts(architecture(model), tokens, ep, load, exact)
    return choice_over_ranks(tokens, model.top_k, model.num_experts, rows, busiest)


def even_choice(tokens: int, top_k: int, num_experts: int) -> Tensor:
    """Expert ids [T, K], ascending in each row, that give every expert the same number of tokens."""
    ids = torch.arange(tokens * top_k) % num_experts
    return ids.view(tokens, top_k).sort(dim=1).values


def choice_over_ranks(tokens: int, top_k: int, num_experts: int, rows: RowCounts, busiest: int) -> Tensor:
    """Expert ids [T, K], ascending in each row, whose tokens go to the ranks as `rows` says.

    A rank's experts are a block of consecutive ids, and get equally many of its rows.
    """
    num_local, to_rank = num_experts // rows.ep, rows.to_rank(busiest)
    if len(set(to_rank)) == 1:
        token, rank = _in_turn(tokens, rows)
    else:
        token, rank = _by_rank(tokens, to_rank, busiest)
    place = torch.arange(len(rank))
    ranks_of_token = torch.bincount(token, minlength=tokens)[token]
    within_token = _within(token, tokens)
    # A token's choices over its rows: as even as they can be, those left over going round.
    left = top_k % ranks_of_token
    choices = top_k // ranks_of_token + ((within_token - token) % ranks_of_token < left)
    if int(choices.max()) > num_local or int(ranks_of_token.max()) > top_k:
        raise ConfigError(
            f"train.micro_batch: {tokens} tokens are too few to choose experts on {rows.ep} ranks as assumed; "
            "use more, or plan.load=1"
        )
    row = torch.repeat_interleave(place, choices)  # of each choice
    local = _within(rank[row], rows.ep) % num_local  # a rank's experts in turn
    order = token[row].argsort(stable=True)
    return (rank[row] * num_local + local)[order].view(tokens, top_k).sort(dim=1).values


def _within(kinds: Tensor, number: int) -> Tensor:
    """For each entry, how many earlier ones are of its kind; `number` kinds."""
    order = kinds.argsort(stable=True)
    counts = torch.bincount(kinds, minlength=number)
    first = (counts.cumsum(0) - counts)[kinds[order]]
    found = torch.empty_like(kinds)
    found[order] = torch.arange(len(kinds)) - first
    return found


def _in_turn(tokens: int, rows: RowCounts) -> tuple[Tensor, Tensor]:
    """Token and rank of each row: a token takes the next ranks, the next token those after them."""
    ends = torch.arange(1, tokens + 1) * rows.sent // tokens
    counts = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64))
    return torch.repeat_interleave(torch.arange(tokens), counts), torch.arange(rows.sent) % rows.ep


def _by_rank(tokens: int, to_rank: list[int], busiest: int) -> tuple[Tensor, Tensor]:
    """Token and rank of each row, for ranks with different numbers: rank after rank, the busiest first.

    Tokens come in turn, again and again, so that none goes to a rank twice. The last turn is over some tokens alone,
    which are spread out, so that the busiest rank has its share of tokens with many rows.
    """
    ranks = torch.arange(len(to_rank)).roll(-busiest)
    counts = torch.tensor(to_rank)[ranks]
    first_row, sent = counts.cumsum(0) - counts, int(counts.sum())
    turns, rest = divmod(sent, tokens)
    last = torch.arange(rest) * tokens // max(rest, 1)
    across = int((first_row < turns * tokens).sum()) - 1  # the rank with rows before and in the last turn
    before = turns * tokens - int(first_row[across])
    after = int(counts[across]) - before
    if rest and after > 0 and int(last[after - 1]) >= tokens - before:
        last = torch.arange(rest)
    token = torch.cat((torch.arange(turns * tokens) % tokens, last))
    return token, torch.repeat_interleave(ranks, counts)
