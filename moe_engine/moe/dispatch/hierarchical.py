"""Rows by two hops: between nodes once per destination node, then within the node once per rank.

Ranks of the group are numbered node by node, L to a node. A token's row for a node goes to the rank there that has
the place of its own rank on its own node; that rank copies it for those of its node that the row's slots name. What
the experts made comes back the same way: summed there in the order of ranks, in fp32, it crosses between nodes as one
row per (token, node) (`exact`: a row per (token, expert) all the way, not summed before its token).

Rows of one source arrive together, but sources in another order than that of their ranks; they are put in order, so
that experts see the same rows in the same order as by one all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from moe_engine.distributed.collectives import Communicator, Pending
from moe_engine.moe.dispatch.further import Rounds
from moe_engine.moe.dispatch.handle import DispatchHandle, Slots
from moe_engine.moe.dispatch.links import Journey, Links, as_it_is
from moe_engine.moe.dispatch.rows import RowPlan, join_slots, plan_rows, split_slots
from moe_engine.moe.placement import ExpertPlacement
from moe_engine.ops.permute import permute, unpermute


@dataclass(frozen=True)
class _Arrival:
    """Rows that come from the ranks of this node: how many from each, and where each belongs (None: in order)."""

    splits: list[int]
    order: Tensor | None
    inverse: Tensor | None


@dataclass(frozen=True)
class HierarchicalHandle(DispatchHandle):
    """node_ids: an expert within its node, rank * num_local + local id, for the choices [T, K]; received: from each
    rank [rows for this rank's experts, rows for this node that this rank passes on, rounds].
    """

    between: Communicator
    within: Communicator
    node_ids: Tensor
    num_local: int
    _onward: list[RowPlan] = field(default_factory=list)  # made when slots arrive here; one, once it is there

    def ids_on_wire(self) -> Tensor:
        return self.node_ids

    @property
    def onward(self) -> RowPlan:
        """From the rows that came from other nodes [P, …] to those that go on within this one."""
        return self._onward[0]

    @cached_property
    def passing(self) -> list[int]:
        """Rows from each node to pass on (waits for the exchange of counts)."""
        counts = self.received.wait().view(self.between.size, self.within.size, 3)
        passing: list[int] = counts[:, self.within.rank, 1].tolist()
        return passing

    @cached_property
    def arrival(self) -> _Arrival:
        """Of rows for this rank's experts (waits for the exchange of counts)."""
        counts = self.received.wait().view(self.between.size, self.within.size, 3)[..., 0]
        splits: list[int] = counts.sum(dim=0).tolist()
        if 1 in counts.shape:
            return _Arrival(splits, None, None)
        total = sum(splits)
        # They come by (place in the node, node, token) and are wanted by (node, place, token).
        starts = (counts.T.flatten().cumsum(0) - counts.T.flatten()).view(counts.T.shape).T.flatten()
        wanted = counts.flatten()
        shift = starts - (wanted.cumsum(0) - wanted)
        place = torch.arange(total, device=counts.device)
        order = place + torch.repeat_interleave(shift, wanted)
        inverse = torch.empty_like(order)
        inverse[order] = place
        return _Arrival(splits, order, inverse)

    def send_slots(self, ids: Tensor, weights: Tensor) -> Journey[Slots]:
        dtype = weights.dtype

        def onward(message: Tensor) -> Pending:
            node_ids, arrived = split_slots(message, dtype)
            ranks = torch.div(node_ids, self.num_local, rounding_mode="floor")  # -1 stays -1
            plan = plan_rows(ranks.long(), self.within.size, self.num_local, self.links.exact)
            self._onward[:] = [plan]
            local_ids = (node_ids % self.num_local).masked_fill_(node_ids < 0, -1)
            return self._fan_out(join_slots(plan.pack_ids(local_ids), plan.pack_weights(arrived)), "dispatch slots")

        first = self._across(join_slots(ids, weights), "dispatch slots")
        return Journey(first, lambda got: split_slots(self._in_order(got), dtype), onward)

    def send(self, x: Tensor, what: str) -> Journey[Tensor]:
        def onward(rows: Tensor) -> Pending:
            return self._fan_out(permute(rows, self.onward.tokens), what)

        return Journey(self._across(x, what), self._in_order, onward)

    def send_back(self, x: Tensor, what: str) -> Journey[Tensor]:
        return Journey(
            self._fan_in(x, what), as_it_is, lambda rows: self._across_back(unpermute(rows, self.onward.tokens), what)
        )

    def send_slots_back(self, d_weights: Tensor) -> Journey[Tensor]:
        what = "dispatch slots backward"
        return Journey(
            self._fan_in(d_weights, what),
            as_it_is,
            lambda rows: self._across_back(self.onward.unpack_weights(rows), what),
        )

    def _across(self, x: Tensor, what: str) -> Pending:
        return self.between.all_to_all(x, self.sent.splits, self.passing, f"{self.label} {what}")

    def _across_back(self, x: Tensor, what: str) -> Pending:
        return self.between.all_to_all(x, self.passing, self.sent.splits, f"{self.label} {what}")

    def _fan_out(self, x: Tensor, what: str) -> Pending:
        return self.within.all_to_all(x, self.onward.splits, self.arrival.splits, f"{self.label} {what}")

    @torch.no_grad()
    def _fan_in(self, x: Tensor, what: str) -> Pending:
        inverse = self.arrival.inverse
        x = x if inverse is None else x.index_select(0, inverse)
        return self.within.all_to_all(x, self.arrival.splits, self.onward.splits, f"{self.label} {what}")

    def _in_order(self, x: Tensor) -> Tensor:
        return x if self.arrival.order is None else x.index_select(0, self.arrival.order)


@torch.no_grad()
def plan_hierarchical(
    expert_ids: Tensor, placement: ExpertPlacement, links: Links, label: str, rounds: Rounds | None
) -> HierarchicalHandle:
    """Lay out the rows of `expert_ids` [T, K] for nodes and start the exchange of counts."""
    assert links.nodes is not None
    between, within = links.nodes
    ranks = placement.rank_of(expert_ids)
    nodes = torch.div(ranks, within.size, rounding_mode="floor")  # -1 stays -1
    sent = plan_rows(nodes, between.size, within.size * placement.num_local, links.exact)
    counts = torch.zeros(between.size, within.size, 3, dtype=torch.int64, device=expert_ids.device)
    counts[..., 0] = _rows_per_rank(ranks, links).view(between.size, within.size)
    counts[:, within.rank, 1] = sent.counts
    counts[..., 2] = rounds.count if rounds else 1
    once = [1] * links.size
    received = links.counts.all_to_all(counts.flatten(0, 1), once, once, f"{label} counts")
    node_ids = (ranks % within.size * placement.num_local + placement.local_id(expert_ids)).masked_fill(ranks < 0, -1)
    return HierarchicalHandle(links, label, sent, received, rounds, between, within, node_ids, placement.num_local)


def _rows_per_rank(ranks: Tensor, links: Links) -> Tensor:
    """Rows that each rank [size] gets in the end from choices at `ranks` [T, K], -1 for none."""
    chosen = ranks.where(ranks >= 0, links.size)
    if links.exact:
        return torch.bincount(chosen.flatten(), minlength=links.size + 1)[: links.size]
    wanted = torch.zeros(len(ranks), links.size + 1, dtype=torch.int64, device=ranks.device)
    return wanted.scatter_(1, chosen, 1).sum(dim=0)[: links.size]
