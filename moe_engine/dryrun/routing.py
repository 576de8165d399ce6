"""A choice of experts that keeps a stated assumption: what a dry run's router gives in place of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.planner.routing import RowCounts


def even_choice(tokens: int, top_k: int, num_experts: int) -> Tensor:
    """Expert ids [T, K], ascending in each row, that give every expert the same number of tokens."""
    ids = torch.arange(tokens * top_k) % num_experts
    return ids.view(tokens, top_k).sort(dim=1).values


def choice_over_ranks(tokens: int, top_k: int, num_experts: int, rows: RowCounts, busiest: int) -> Tensor:
    """Expert ids [T, K], ascending in each row, whose tokens go to the ranks as `rows` says.

    A rank's experts are a block of consecutive ids, and get equally many of its rows.
    """
    num_local, to_rank = num_experts // rows.ep, torch.tensor(rows.to_rank(busiest))
    rank = torch.repeat_interleave(torch.arange(rows.ep), to_rank)  # of each row
    first_row = to_rank.cumsum(0) - to_rank  # of each rank
    token = _tokens(tokens, to_rank, first_row)
    ranks_of_token = torch.bincount(token, minlength=tokens)[token]
    # A token's choices over its rows: as even as they can be, those left over going round.
    place = torch.arange(len(rank))
    left = top_k % ranks_of_token
    choices = top_k // ranks_of_token + ((place // tokens - token) % ranks_of_token < left)
    if int(choices.max()) > num_local or int(ranks_of_token.max()) > top_k:
        raise ValueError(f"{top_k} experts of a token do not lie on {rows.sent / tokens:g} ranks of {num_local} each")
    before = choices.cumsum(0) - choices
    within = before - before[first_row.clamp(max=len(rank) - 1)][rank]
    row = torch.repeat_interleave(place, choices)  # of each choice
    local = (within[row] + torch.arange(len(row)) - before[row]) % num_local
    order = token[row].argsort(stable=True)
    return (rank[row] * num_local + local)[order].view(tokens, top_k).sort(dim=1).values


def _tokens(tokens: int, to_rank: Tensor, first_row: Tensor) -> Tensor:
    """The token of each row, for rows in the order of ranks: all tokens in turn, again and again.

    A rank has fewer rows than there are tokens, so none goes to it twice. The last turn is over some tokens alone,
    which are spread out, so that no rank has more than its share of tokens with many rows.
    """
    sent = int(to_rank.sum())
    turns, rest = divmod(sent, tokens)
    last = torch.arange(rest) * tokens // max(rest, 1)
    across = int((first_row < turns * tokens).sum()) - 1  # the rank with rows before and in the last turn
    before = turns * tokens - int(first_row[across])
    after = int(to_rank[across]) - before
    if rest and after > 0 and int(last[after - 1]) >= tokens - before:
        last = torch.arange(rest)
    return torch.cat((torch.arange(turns * tokens) % tokens, last))
