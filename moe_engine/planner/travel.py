"""How rows travel where their numbers are not those of `routing` alone: in two hops, in bounded rounds, limited.

Counted from the assumed choices themselves, as a dry run's ranks count them: all ranks of the group choose alike, and
each other one sends here what this one sends to itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moe_engine.planner.architecture import Architecture
from moe_engine.planner.choices import Ints, expert_choice, within
from moe_engine.planner.strategy import Strategy


@dataclass(frozen=True)
class Leg:
    """One round of one micro-batch of a rank: rows that leave it; that come for its experts; of these the (token,
    expert) pairs. With two hops `sent` cross between nodes, `passing` come from there, and `onward` go on within.
    """

    sent: int
    received: int
    choices: int
    passing: int = 0
    onward: int = 0


@dataclass(frozen=True)
class Travel:
    """All rounds. slots: experts that a row can be for; node_slots: … that one between nodes can be for; nodes: of the
    group, 0 without two hops."""

    legs: tuple[Leg, ...]
    slots: int
    node_slots: int = 0
    nodes: int = 0


def travels(strategy: Strategy) -> bool:
    """Whether rows are to be counted here."""
    bounded = strategy.max_recv_rows >= strategy.layout.ep > 1
    return strategy.windows is None and bool(strategy.on_node or bounded or strategy.capacity_factor)


@lru_cache(maxsize=64)
def travel(model: Architecture, strategy: Strategy, tokens: int, load: float) -> Travel:
    """The rounds of a micro-batch of `tokens` on the busiest rank of its group."""
    ep, exact = strategy.layout.ep, strategy.dispatch == "expert"
    num_local = model.num_experts // ep
    slots = 1 if exact else min(model.top_k, num_local)
    ids = expert_choice(model, tokens, ep, 0, load, exact)
    if strategy.capacity_factor:
        ids = _limited(ids, model.num_experts, strategy.capacity_factor)
    ranks = np.where(ids < 0, -1, ids // num_local)
    on_node = strategy.on_node or 1
    units, num_units = np.where(ranks < 0, -1, ranks // on_node), ep // on_node
    rounds = _rounds(units, num_units, strategy.max_recv_rows // ep, exact)
    legs = []
    for number in range(int(rounds.max(initial=0)) + 1):
        chosen = np.where(rounds == number, ranks, -1)
        to_rank = _rows(chosen, ep, exact)
        leg = Leg(int(to_rank.sum()), ep * int(to_rank[0]), ep * int((chosen == 0).sum()))
        if strategy.on_node:
            to_node = _rows(np.where(chosen < 0, -1, chosen // on_node), num_units, exact)
            passing = num_units * int(to_node[0])
            leg = Leg(int(to_node.sum()), leg.received, leg.choices, passing, num_units * int(to_rank[:on_node].sum()))
        legs.append(leg)
    node_slots = 1 if exact else min(model.top_k, num_local * on_node)
    return Travel(tuple(legs), slots, node_slots if strategy.on_node else 0, num_units if strategy.on_node else 0)


def _limited(ids: Ints, num_experts: int, factor: float) -> Ints:
    """-1 for choices beyond each expert's limit, the last tokens' first."""
    limit = math.ceil(factor * ids.size / num_experts)
    return np.where(within(ids.ravel(), num_experts).reshape(ids.shape) < limit, ids, -1)


def _pairs(units: Ints, exact: bool) -> tuple[Ints, Ints]:
    """Unit of each row, by unit and then token, and the row of each choice [T, K], -1 where there is none."""
    T, K = units.shape
    chosen = (units >= 0).ravel()
    token = np.repeat(np.arange(T), K)
    key = units.ravel().astype(np.int64) * T + token
    if exact:
        key = key * K + np.tile(np.arange(K), T)
    found, inverse = np.unique(key[chosen], return_inverse=True)
    row = np.full(T * K, -1)
    row[chosen] = inverse
    return found // (T * K if exact else T), row.reshape(T, K)


def _rows(units: Ints, number: int, exact: bool) -> Ints:
    """Rows to each unit."""
    return np.bincount(_pairs(units, exact)[0], minlength=number)


def _rounds(units: Ints, number: int, share: int, exact: bool) -> Ints:
    """The round of each choice [T, K], -1 for none, with at most `share` rows to each unit in one."""
    unit_of_row, row = _pairs(units, exact)
    if not share:
        return np.where(row < 0, -1, 0)
    rounds = within(unit_of_row, number) // share
    return np.where(row < 0, -1, rounds[row] if len(rounds) else -1)
