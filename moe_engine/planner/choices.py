"""The experts that a rank's tokens choose by a stated assumption (`routing`), choice by choice.

A dry run routes by it, and the arithmetic counts from it where row numbers alone do not say enough: over nodes, under
bounds and limits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_engine.config.errors import ConfigError
from moe_engine.planner.architecture import Architecture
from moe_engine.planner.routing import RowCounts, row_counts

Ints = npt.NDArray[np.int64]


def expert_choice(model: Architecture, tokens: int, ep: int, busiest: int, load: float, exact: bool) -> Ints:
    """Expert ids [T, K] of a rank's tokens, by the assumption of `planner.routing`; see `row_counts`."""
    if ep == 1 or (exact and load == 1.0):
        return even_choice(tokens, model.top_k, model.num_experts)
    rows = row_counts(model, tokens, ep, load, exact)
    return choice_over_ranks(tokens, model.top_k, model.num_experts, rows, busiest)


def even_choice(tokens: int, top_k: int, num_experts: int) -> Ints:
    """Expert ids [T, K], ascending in each row, that give every expert the same number of tokens."""
    ids = np.arange(tokens * top_k) % num_experts
    return np.sort(ids.reshape(tokens, top_k), axis=1)


def choice_over_ranks(tokens: int, top_k: int, num_experts: int, rows: RowCounts, busiest: int) -> Ints:
    """Expert ids [T, K], ascending in each row, whose tokens go to the ranks as `rows` says.

    A rank's experts are a block of consecutive ids, and get equally many of its rows.
    """
    num_local, to_rank = num_experts // rows.ep, rows.to_rank(busiest)
    if len(set(to_rank)) == 1:
        token, rank = _in_turn(tokens, rows)
    else:
        token, rank = _by_rank(tokens, to_rank, busiest)
    place = np.arange(len(rank))
    ranks_of_token = np.bincount(token, minlength=tokens)[token]
    within_token = within(token, tokens)
    # A token's choices over its rows: as even as they can be, those left over going round.
    left = top_k % ranks_of_token
    choices = top_k // ranks_of_token + ((within_token - token) % ranks_of_token < left)
    if choices.max() > num_local or ranks_of_token.max() > top_k:
        raise ConfigError(
            f"train.micro_batch: {tokens} tokens are too few to choose experts on {rows.ep} ranks as assumed; "
            "use more, or plan.load=1"
        )
    row = np.repeat(place, choices)  # of each choice
    local = within(rank[row], rows.ep) % num_local  # a rank's experts in turn
    order = token[row].argsort(kind="stable")
    return np.sort((rank[row] * num_local + local)[order].reshape(tokens, top_k), axis=1)


def within(kinds: Ints, number: int) -> Ints:
    """For each entry, how many earlier ones are of its kind; `number` kinds."""
    order = kinds.argsort(kind="stable")
    counts = np.bincount(kinds, minlength=number)
    first = (counts.cumsum() - counts)[kinds[order]]
    found = np.empty_like(kinds)
    found[order] = np.arange(len(kinds)) - first
    return found


def _in_turn(tokens: int, rows: RowCounts) -> tuple[Ints, Ints]:
    """Token and rank of each row: a token takes the next ranks, the next token those after them."""
    ends = np.arange(1, tokens + 1) * rows.sent // tokens
    counts = np.diff(ends, prepend=0)
    return np.repeat(np.arange(tokens), counts), np.arange(rows.sent) % rows.ep


def _by_rank(tokens: int, to_rank: list[int], busiest: int) -> tuple[Ints, Ints]:
    """Token and rank of each row, for ranks with different numbers: rank after rank, the busiest first.

    Tokens come in turn, again and again, so that none goes to a rank twice. The last turn is over some tokens alone,
    which are spread out, so that the busiest rank has its share of tokens with many rows.
    """
    ranks = np.roll(np.arange(len(to_rank)), -busiest)
    counts = np.array(to_rank)[ranks]
    first_row, sent = counts.cumsum() - counts, int(counts.sum())
    turns, rest = divmod(sent, tokens)
    last = np.arange(rest) * tokens // max(rest, 1)
    across = int((first_row < turns * tokens).sum()) - 1  # the rank with rows before and in the last turn
    before = turns * tokens - int(first_row[across])
    after = int(counts[across]) - before
    if rest and after > 0 and int(last[after - 1]) >= tokens - before:
        last = np.arange(rest)
    token = np.concatenate((np.arange(turns * tokens) % tokens, last))
    return token, np.repeat(ranks, counts)
