"""Exchanges of rows, each a start and a wait, forward and backward.

There are two sets of functions for the two who call them. Under ordinary autograd `dispatch_wait` and `combine_arrive`
record what their backwards have to send. An executor that runs a graph in pieces detaches what these return, and
starts the exchanges of the backward itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.moe.dispatch.all_to_all import plan_all_to_all
from moe_engine.moe.dispatch.further import Rounds, share_out
from moe_engine.moe.dispatch.handle import DispatchHandle, Slots
from moe_engine.moe.dispatch.hierarchical import plan_hierarchical
from moe_engine.moe.dispatch.links import Journey, Links
from moe_engine.moe.dispatch.nvshmem import plan_nvshmem
from moe_engine.moe.placement import ExpertPlacement
from moe_engine.ops.coded import CodedGradient, numbers, stand_in
from moe_engine.ops.first_order import first_order
from moe_engine.ops.fp8 import Codes
from moe_engine.ops.permute import permute, permute_first, permute_stand_in, unpermute
from moe_engine.ops.row_bytes import codes_of, encode


@dataclass(frozen=True)
class Rows:
    """Rows and what their experts are: x [R, D]; local_ids [R, k] int32, the expert's index on the rank that
    computes, ascending, -1 for an unused slot; weights [R, k] fp32 (fp64 in an fp64 model), 0 for an unused slot.

    message: of rows that are to travel in fp8, their bytes (`ops.row_bytes`); codes: of rows that came in fp8; with
    either, x only stands for the rows in autograd (`ops.coded`), and `gradient` is the way of the gradient of what is
    made of rows that came.
    further: of rows to be sent, where they are bounded: stands in autograd for those of all rounds but the first
    [N, D], whose gradients are summed with those of the first.
    most_choices: where only the device knows how many rows arrived, rows without experts follow those that did, and so
    many slots are used at most; 0: all are rows.
    """

    x: Tensor
    local_ids: Tensor
    weights: Tensor
    message: Tensor | None = None
    codes: Codes | None = None
    gradient: CodedGradient | None = None
    most_choices: int = 0
    further: Tensor | None = None

    def numbers(self) -> Tensor:
        """The rows that came, as numbers [R, D]."""
        return self.x if self.codes is None else numbers(self.x, self.codes)


def plan(expert_ids: Tensor, placement: ExpertPlacement, links: Links, label: str = "") -> DispatchHandle | None:
    """Lay out the rows of `expert_ids` [T, K] (ascending in each row, -1 for a masked choice) and start the exchange
    of counts.

    None where nothing needs to be laid out: with one rank the rows are the tokens themselves. `label` goes into the
    collective log.
    """
    if links.size == 1 and not links.fp8:
        return None
    if links.windows is not None:
        return plan_nvshmem(expert_ids, placement, links, label)
    backend = plan_all_to_all if links.nodes is None else plan_hierarchical
    share = links.max_recv_rows // links.size
    if not share or links.size == 1:
        return backend(expert_ids, placement, links, label, None)
    units, num_units = placement.rank_of(expert_ids), links.size
    if links.nodes is not None:
        between, within = links.nodes
        units, num_units = torch.div(units, within.size, rounding_mode="floor"), between.size
    of_choice, sums, count = share_out(units, num_units, links.exact, share)

    def choices(number: int) -> Tensor:
        return expert_ids.masked_fill(of_choice != number, -1)

    def start(number: int) -> DispatchHandle:
        return backend(choices(number), placement, links, f"{label} round {number}", None)

    return backend(choices(0), placement, links, label, Rounds(count, sums, start))


def pack_rows(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, placement: ExpertPlacement, handle: DispatchHandle | None
) -> Rows:
    """The rows to send: x [T, D], expert_ids and expert_weights [T, K]."""
    if handle is None:
        return Rows(x, placement.local_id(expert_ids).to(torch.int32), expert_weights)
    return pack_for(handle, x, expert_weights)


def pack_for(handle: DispatchHandle, x: Tensor, expert_weights: Tensor) -> Rows:
    """The rows that `handle` sends: of tokens x [T, D], whose choices have `expert_weights` [T, K]."""
    local_ids, weights = handle.sent.pack_ids(handle.ids_on_wire()), handle.sent.pack_weights(expert_weights)
    fp8, further = handle.links.fp8, None
    message = permute(encode(x), handle.tokens) if fp8 else None
    if handle.rounds is not None:
        rows, further = permute_first(x, handle.sums, len(handle.tokens.source), not fp8)
    else:
        rows = permute_stand_in(x, handle.tokens) if fp8 else permute(x, handle.tokens)
    return Rows(rows, local_ids, weights, message, further=further)


@dataclass(frozen=True)
class PendingDispatch:
    """A dispatch on its way."""

    rows: Rows
    handle: DispatchHandle | None
    x: Journey[Tensor] | None = None
    slots: Journey[Slots] | None = None

    def advance(self) -> None:
        """Stand still until all of it is started."""
        if self.x is not None and self.slots is not None:
            self.slots.advance()
            self.x.advance()


@dataclass(frozen=True)
class PendingCombine:
    """A combine on its way."""

    x: Tensor
    handle: DispatchHandle | None
    sent: Journey[Tensor] | None = None

    def advance(self) -> None:
        """Stand still until all of it is started."""
        if self.sent is not None:
            self.sent.advance()


def dispatch_start(rows: Rows, handle: DispatchHandle | None) -> PendingDispatch:
    """Start sending packed rows to their experts; they must stay unchanged until the wait."""
    if handle is None:
        return PendingDispatch(rows, None)
    slots = handle.send_slots(rows.local_ids, rows.weights)
    return PendingDispatch(
        rows, handle, handle.send(rows.x if rows.message is None else rows.message, "dispatch x"), slots
    )


def dispatch_wait(pending: PendingDispatch) -> Rows:
    """The rows that arrived for this rank's experts, [R, D] and [R, k], in the order (source rank, token)."""
    rows, handle = pending.rows, pending.handle
    if handle is None or pending.slots is None or pending.x is None:
        return rows
    pending.advance()
    local_ids, arrived = pending.slots.wait()
    came = pending.x.wait()
    if rows.message is None:
        x, weights = _Dispatch.apply(rows.x, rows.weights, came, arrived, handle)
        return Rows(x, local_ids, weights, most_choices=handle.most_choices)
    codes = codes_of(came, rows.x.shape[1])
    x, weights = _Dispatch.apply(rows.x, rows.weights, stand_in(codes, rows.x.dtype), arrived, handle)
    return Rows(x, local_ids, weights, None, codes, handle.gradient, handle.most_choices)


def combine_start(x: Tensor, handle: DispatchHandle | None) -> PendingCombine:
    """Start sending the experts' output rows [R, D] back; they must stay unchanged until the wait."""
    if handle is None:
        return PendingCombine(x, None)
    if handle.links.fp8:
        handle.gradient.sent(x)
    return PendingCombine(x, handle, handle.send_back(x, "combine"))


def combine_arrive(pending: PendingCombine) -> Tensor:
    """The rows that came back [R_sent, D], not summed."""
    if pending.handle is None:
        return pending.x
    rows: Tensor = _Combine.apply(pending.x, pending)
    return rows


def sum_rows(rows: Tensor, handle: DispatchHandle | None, further: Tensor | None = None) -> Tensor:
    """Routed output [T, D]: each token's rows summed in fp32 in the order of ranks (exact: of experts).

    further: the rows of `further_rows`.
    """
    if handle is None:
        return rows
    return unpermute(rows if further is None else torch.cat((rows, further)), handle.sums)


def combine_wait(pending: PendingCombine) -> Tensor:
    """Wait for the rows and sum them."""
    return sum_rows(combine_arrive(pending), pending.handle)


@dataclass(frozen=True)
class PendingGradients:
    """The gradients of dispatched rows on their way back to their tokens."""

    x: Journey[Tensor]
    weights: Journey[Tensor]

    def advance(self) -> None:
        """Stand still until all of it is started."""
        self.x.advance()
        self.weights.advance()

    def wait(self) -> tuple[Tensor, Tensor]:
        """(d_x [R_sent, D], d_weights [R_sent, k])."""
        self.advance()
        return self.x.wait(), self.weights.wait()


def dispatch_backward_start(d_x: Tensor, d_weights: Tensor, handle: DispatchHandle) -> PendingGradients:
    """Start sending the gradients of arrived rows, d_x [R, D] and d_weights [R, k], back: no autograd."""
    return PendingGradients(handle.send_back(d_x, "dispatch x backward"), handle.send_slots_back(d_weights))


def combine_backward_start(d_rows: Tensor, handle: DispatchHandle) -> Journey[Tensor]:
    """Start sending the gradients of the rows that came back, [R_sent, D], to their experts: no autograd."""
    if not handle.links.fp8:
        return handle.send(d_rows, "combine backward")
    dim, dtype = d_rows.shape[1], d_rows.dtype

    def finish(message: Tensor) -> Tensor:
        return handle.gradient.arrived(codes_of(message, dim), dtype)

    return handle.send(encode(d_rows, gradient=True), "combine backward").then(finish)


class _Dispatch(torch.autograd.Function):
    """Communication only: forward has what came, backward sends both gradients back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, came: Tensor, arrived: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor]:
        ctx.handle = handle
        return came.view_as(came), arrived.view_as(arrived)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_x, d_weights = dispatch_backward_start(grads[0], grads[1], ctx.handle).wait()
        return d_x, d_weights, None, None, None


class _Combine(torch.autograd.Function):
    """Communication only: forward waits for what was started, backward sends the gradient to the experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: PendingCombine) -> Tensor:
        assert pending.sent is not None
        ctx.handle = pending.handle
        return pending.sent.wait()

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return combine_backward_start(grads[0], ctx.handle).wait(), None
