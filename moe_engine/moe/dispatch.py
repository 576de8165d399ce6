"""Tokens travel to their experts and back: expert parallelism by all-to-all.

A token crosses the wire once per destination rank (`dedup`): its row carries, in up to k slots, which of that
rank's experts want it and with what weight; the rank sums its experts' outputs, and one row comes back. In `exact`
mode there is one row per (token, expert) instead, summed at the source in expert order: more bytes, but the same
bits for any number of ranks, since with one rank, too, a token's experts are summed in expert order from rounded
rows.

The layout is computed once, in `plan`, and its handle serves all four exchanges: the backward of dispatch is a
combine with the same handle (rows and weights return together), the backward of combine a dispatch. Rows arrive in
the order (source rank, token). Each exchange is a start and a wait, so that other work can go between; a rank that
sends and receives nothing joins all of them. With one rank nothing is copied and nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.distributed.collectives import Communicator, Pending
from moe_engine.moe.placement import ExpertPlacement
from moe_engine.ops.permute import RowMap, permute, take, unpermute


@dataclass(frozen=True)
class Rows:
    """Rows and what their experts are: x [R, D]; local_ids [R, k] int32, the expert's index on the rank that
    computes, ascending, -1 for an unused slot; weights [R, k] fp32 (fp64 in an fp64 model), 0 for an unused slot.
    """

    x: Tensor
    local_ids: Tensor
    weights: Tensor


@dataclass(frozen=True)
class DispatchHandle:
    """The way of one micro-batch's tokens over the wire, the same for both directions and their backwards.

    tokens: from tokens [T] to sent rows [R_sent], places in the order in which a token's rows are summed;
    choice_of_slot [R_sent, k]: which choice (flat index t*K + column) fills a slot, -1 for none;
    slot_of_choice [T, K]: its inverse, flat index row*k + slot;
    send_splits: rows to each rank; received: the pending exchange of these numbers.
    """

    ep: Communicator
    label: str
    tokens: RowMap
    choice_of_slot: Tensor
    slot_of_choice: Tensor
    send_splits: list[int]
    received: Pending

    @property
    def recv_splits(self) -> list[int]:
        """Rows from each rank (waits for the exchange of counts)."""
        splits: list[int] = self.received.wait().tolist()
        return splits

    def send(self, x: Tensor, what: str) -> Pending:
        """Start sending rows [R_sent, …] to their experts: [R, …]."""
        return self.ep.all_to_all(x, self.send_splits, self.recv_splits, f"{self.label} {what}")

    def send_back(self, x: Tensor, what: str) -> Pending:
        """Start sending rows [R, …] back to where their tokens are: [R_sent, …]."""
        return self.ep.all_to_all(x, self.recv_splits, self.send_splits, f"{self.label} {what}")


@torch.no_grad()
def plan(
    expert_ids: Tensor,
    placement: ExpertPlacement,
    ep: Communicator,
    ep_counts: Communicator,
    exact: bool = False,
    label: str = "",
) -> DispatchHandle | None:
    """Lay out the rows of `expert_ids` [T, K] and start the exchange of counts.

    In each row they are in the order of (rank, id); with `exact`, of ids: the order in which outputs are summed.

    None with one rank: its rows are the tokens themselves. `label` goes into the collective log.
    """
    if ep.size == 1:
        return None
    T, K = expert_ids.shape
    ranks = placement.rank_of(expert_ids)
    starts = _row_starts(ranks, exact)
    unordered = starts.flatten().nonzero()[:, 0]  # each row's first choice, token by token
    rank_of_row = ranks.flatten()[unordered]
    first_choice = unordered[rank_of_row.argsort(stable=True)]  # by rank, then token
    row_of_start = torch.full((T * K,), -1, device=expert_ids.device)
    row_of_start[first_choice] = torch.arange(len(first_choice), device=expert_ids.device)
    send_counts = torch.bincount(rank_of_row, minlength=ep.size)
    received = ep_counts.all_to_all(send_counts, [1] * ep.size, [1] * ep.size, f"{label} counts")

    slots = 1 if exact else min(K, placement.num_local)
    slot_of_choice = _slot_of_choice(starts, row_of_start, slots)
    choice_of_slot = torch.full((len(first_choice), slots), -1, device=expert_ids.device)
    choice_of_slot.view(-1)[slot_of_choice.flatten()] = torch.arange(T * K, device=expert_ids.device)
    places = torch.full((T, K if exact else min(K, ep.size)), -1, device=expert_ids.device)
    ordinal = (starts.cumsum(dim=1) - 1).flatten()[first_choice]  # which of its token's rows each row is
    places[first_choice // K, ordinal] = row_of_start[first_choice]
    return DispatchHandle(
        ep, label, RowMap(first_choice // K, places), choice_of_slot, slot_of_choice, send_counts.tolist(), received
    )


def _row_starts(ranks: Tensor, exact: bool) -> Tensor:
    """Which choices [T, K] begin a row: every one (exact), or the first of each destination rank."""
    starts = torch.ones_like(ranks, dtype=torch.bool)
    if not exact:
        starts[:, 1:] = ranks[:, 1:] != ranks[:, :-1]
    return starts


def _slot_of_choice(starts: Tensor, row_of_start: Tensor, slots: int) -> Tensor:
    """Flat slot index (row*slots + slot) of every choice [T, K]: a row's choices fill its slots in order."""
    T, K = starts.shape
    column = torch.arange(K, device=starts.device).expand(T, K)
    start_column = column.where(starts, 0).cummax(dim=1).values if K else column
    start = torch.arange(T, device=starts.device)[:, None] * K + start_column
    return row_of_start[start] * slots + column - start_column


def pack_rows(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, placement: ExpertPlacement, handle: DispatchHandle | None
) -> Rows:
    """The rows to send: x [T, D], expert_ids and expert_weights [T, K]."""
    local_ids = placement.local_id(expert_ids).to(torch.int32)
    if handle is None:
        return Rows(x, local_ids, expert_weights)
    choice = handle.choice_of_slot
    return Rows(
        x=permute(x, handle.tokens),
        local_ids=local_ids.flatten()[choice.clamp(min=0)].masked_fill_(choice < 0, -1)
        if local_ids.numel()
        else choice.to(torch.int32),
        weights=take(expert_weights, choice, handle.slot_of_choice),
    )


@dataclass(frozen=True)
class PendingDispatch:
    """A dispatch on its way."""

    rows: Rows
    handle: DispatchHandle | None
    x: Pending | None = None
    slots: Pending | None = None


@dataclass(frozen=True)
class PendingCombine:
    """A combine on its way."""

    x: Tensor
    handle: DispatchHandle | None
    sent: Pending | None = None


def dispatch_start(rows: Rows, handle: DispatchHandle | None) -> PendingDispatch:
    """Start sending packed rows to their experts; they must stay unchanged until the wait."""
    if handle is None:
        return PendingDispatch(rows, None)
    # Ids and weights share one message of int32 columns.
    slots = torch.cat((rows.local_ids, rows.weights.detach().view(torch.int32)), dim=1)
    return PendingDispatch(rows, handle, handle.send(rows.x, "dispatch x"), handle.send(slots, "dispatch slots"))


def dispatch_wait(pending: PendingDispatch) -> Rows:
    """The rows that arrived for this rank's experts, [R, D] and [R, k], in the order (source rank, token)."""
    if pending.handle is None or pending.slots is None:
        return pending.rows
    k, sent = pending.rows.local_ids.shape[1], pending.rows
    slots = pending.slots.wait()
    # A true copy: of a single row `contiguous` would keep the slice, which may start between two fp64 numbers.
    arrived = slots[:, k:].clone(memory_format=torch.contiguous_format).view(sent.weights.dtype)
    x, weights = _Dispatch.apply(sent.x, sent.weights, arrived, pending)
    return Rows(x, slots[:, :k], weights)


def combine_start(x: Tensor, handle: DispatchHandle | None) -> PendingCombine:
    """Start sending the experts' output rows [R, D] back; they must stay unchanged until the wait."""
    return PendingCombine(x, handle, None if handle is None else handle.send_back(x, "combine"))


def combine_arrive(pending: PendingCombine) -> Tensor:
    """The rows that came back [R_sent, D], not summed."""
    if pending.handle is None:
        return pending.x
    rows: Tensor = _Combine.apply(pending.x, pending)
    return rows


def sum_rows(rows: Tensor, handle: DispatchHandle | None) -> Tensor:
    """Routed output [T, D]: each token's rows summed in fp32 in the order of ranks (exact: of experts)."""
    return rows if handle is None else unpermute(rows, handle.tokens)


def combine_wait(pending: PendingCombine) -> Tensor:
    """Wait for the rows and sum them."""
    return sum_rows(combine_arrive(pending), pending.handle)


@dataclass(frozen=True)
class PendingGradients:
    """The gradients of dispatched rows on their way back to their tokens."""

    x: Pending
    weights: Pending

    def wait(self) -> tuple[Tensor, Tensor]:
        """(d_x [R_sent, D], d_weights [R_sent, k])."""
        return self.x.wait(), self.weights.wait()


def dispatch_backward_start(d_x: Tensor, d_weights: Tensor, handle: DispatchHandle) -> PendingGradients:
    """Start sending the gradients of arrived rows, d_x [R, D] and d_weights [R, k], back: no autograd."""
    return PendingGradients(
        handle.send_back(d_x, "dispatch x backward"), handle.send_back(d_weights, "dispatch slots backward")
    )


def combine_backward_start(d_rows: Tensor, handle: DispatchHandle) -> Pending:
    """Start sending the gradients of the rows that came back, [R_sent, D], to their experts: no autograd."""
    return handle.send(d_rows, "combine backward")


class _Dispatch(torch.autograd.Function):
    """Communication only: forward waits for what was started, backward sends both gradients back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, arrived: Tensor, pending: PendingDispatch
    ) -> tuple[Tensor, Tensor]:
        assert pending.x is not None
        ctx.handle = pending.handle
        return pending.x.wait(), arrived.view_as(arrived)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_x, d_weights = dispatch_backward_start(grads[0], grads[1], ctx.handle).wait()
        return d_x, d_weights, None, None


class _Combine(torch.autograd.Function):
    """Communication only: forward waits for what was started, backward sends the gradient to the experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: PendingCombine) -> Tensor:
        assert pending.sent is not None
        ctx.handle = pending.handle
        return pending.sent.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return combine_backward_start(grads[0], ctx.handle).wait(), None
