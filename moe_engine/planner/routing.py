"""How many rows the ranks of an expert-parallel group exchange, by an assumption that is stated.

A token sends one row to each rank that has some of its experts. Experts drawn at random lie on `distinct_ranks` of
them on the average. Of these rows every rank gets equally many, but for the busiest, which gets `load` times the mean;
and every rank of the group routes its tokens alike. A plan and a dry run count by this one rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.planner.architecture import Architecture
from moe_engine.planner.symmetric import WindowSizes


@dataclass(frozen=True)
class RowCounts:
    """Rows of one rank's tokens: to each of the other ranks on the average, and to the busiest.

    room: where kernels put rows, how many there are at any rank, real or not.
    """

    ep: int
    sent: int  # to all ranks
    busiest: int  # to the busiest
    room: int = 0

    @property
    def received(self) -> int:
        """Rows that come to the busiest rank, from all of its group."""
        return self.room or self.ep * self.busiest

    def in_windows(self, windows: WindowSizes | None) -> RowCounts:
        """The same where kernels put rows: as many as there could be."""
        return self if windows is None else RowCounts(self.ep, windows.sent, self.busiest, windows.most_rows)

    def to_rank(self, busiest: int) -> list[int]:
        """Rows to each rank, where `busiest` is the busiest."""
        if self.ep == 1:
            return [self.sent]
        share, more = divmod(self.sent - self.busiest, self.ep - 1)
        others = [share + (i < more) for i in range(self.ep - 1)]
        return [*others[:busiest], self.busiest, *others[busiest:]]


def row_counts(model: Architecture, tokens: int, ep: int, load: float = 1.0, exact: bool = False) -> RowCounts:
    """The rows of a rank's `tokens`; `exact`: one for each (token, expert), as `moe.combine=exact` sends them."""
    copies = model.top_k if exact else distinct_ranks(model, ep)
    mean = min(round(tokens * copies / ep), tokens * min(model.top_k, ep if not exact else model.top_k) // ep)
    most = tokens * min(model.top_k, model.num_experts // ep) if exact else tokens
    return RowCounts(ep, ep * mean, min(round(mean * load), most, ep * mean))


def distinct_ranks(model: Architecture, ep: int) -> float:
    """How many of `ep` ranks a token's experts lie on, for top_k experts drawn at random without replacement.

    With node-limited routing (`top_groups` of `num_groups`), the draw is among the experts of the chosen groups.
    """
    if not model.num_experts:
        return 0.0
    ranks, experts = float(ep), model.num_experts
    if model.num_groups > model.top_groups and ep > 1:
        ranks = ep * model.top_groups / model.num_groups
        experts = model.num_experts * model.top_groups // model.num_groups
    if ranks <= 1:
        return 1.0
    per_rank = experts / ranks
    missed = 1.0
    for drawn in range(model.top_k):
        missed *= max(0.0, (experts - per_rank - drawn) / (experts - drawn))
    return ranks * (1.0 - missed)
