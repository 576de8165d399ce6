"""Rows by one all-to-all among all ranks of the group: a row for each (token, rank)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from moe_engine.moe.dispatch.further import Rounds
from moe_engine.moe.dispatch.handle import DispatchHandle, Slots
from moe_engine.moe.dispatch.links import Journey, Links, as_it_is
from moe_engine.moe.dispatch.rows import join_slots, plan_rows, split_slots
from moe_engine.moe.placement import ExpertPlacement

T = TypeVar("T")


@dataclass(frozen=True)
class AllToAllHandle(DispatchHandle):
    """local_ids of the choices [T, K]; received: from each rank [rows, rounds]."""

    local_ids: Tensor

    @cached_property
    def recv_splits(self) -> list[int]:
        """Rows from each rank (waits for the exchange of counts)."""
        splits: list[int] = self.received.wait()[:, 0].tolist()
        return splits

    def ids_on_wire(self) -> Tensor:
        return self.local_ids

    def send_slots(self, ids: Tensor, weights: Tensor) -> Journey[Slots]:
        return self._there(join_slots(ids, weights), "dispatch slots", lambda got: split_slots(got, weights.dtype))

    def send(self, x: Tensor, what: str) -> Journey[Tensor]:
        return self._there(x, what, as_it_is)

    def send_back(self, x: Tensor, what: str) -> Journey[Tensor]:
        return self._back(x, what)

    def send_slots_back(self, d_weights: Tensor) -> Journey[Tensor]:
        return self._back(d_weights, "dispatch slots backward")

    def _there(self, x: Tensor, what: str, finish: Callable[[Tensor], T]) -> Journey[T]:
        splits = self.sent.splits, self.recv_splits
        return Journey(self.links.rows.all_to_all(x, *splits, f"{self.label} {what}"), finish)

    def _back(self, x: Tensor, what: str) -> Journey[Tensor]:
        splits = self.recv_splits, self.sent.splits
        return Journey(self.links.rows.all_to_all(x, *splits, f"{self.label} {what}"), as_it_is)


@torch.no_grad()
def plan_all_to_all(
    expert_ids: Tensor, placement: ExpertPlacement, links: Links, label: str, rounds: Rounds | None
) -> AllToAllHandle:
    """Lay out the rows of `expert_ids` [T, K] and start the exchange of counts."""
    sent = plan_rows(placement.rank_of(expert_ids), links.size, placement.num_local, links.exact)
    counts = torch.stack((sent.counts, torch.full_like(sent.counts, rounds.count if rounds else 1)), dim=1)
    once = [1] * links.size
    received = links.counts.all_to_all(counts, once, once, f"{label} counts")
    return AllToAllHandle(links, label, sent, received, rounds, placement.local_id(expert_ids))
