"""Rows that do not fit: a rank never holds more than `max_recv_rows` received rows, and none is dropped.

Each of the group's ranks may send an equal share of the bound to each destination at once. What a rank has beyond it
for some destination goes in further rounds, one after the other: rows travel, the experts work, and what they made
travels back before the next round starts. Nothing of a further round is kept for backward but the tokens, which are
here anyway: backward sends the rows again, computes again, and sends gradients back, round by round. So skewed
routing costs time, and the memory of a rank stays bounded.

All ranks take part in as many rounds as the one with the most needs: the number travels with the counts. A token's
rows, and in backward its rows' gradients, are summed in the same order as without the bound, whichever rounds they
went in, and rounded once: the output and every gradient have the same bits but those of the experts' weights, which
are a product for each round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_engine.moe.dispatch.rows import RowPlan, plan_rows
from moe_engine.ops.first_order import first_order
from moe_engine.ops.permute import RowMap

if TYPE_CHECKING:
    from moe_engine.moe.dispatch.handle import DispatchHandle

# (handle, x, weights) -> (rows as they went, in autograd; rows that came back), [N, D] each
Exchange = Callable[["DispatchHandle", Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rounds:
    """How one rank's choices are shared out over rounds, of which it fills the first `count`.

    sums: from tokens to the rows of all rounds, one round after the other, in the order in which a token's rows are
    summed; start: the exchange of a round's choices.
    """

    count: int
    sums: RowMap
    start: Callable[[int], DispatchHandle]


@torch.no_grad()
def share_out(units: Tensor, num_units: int, row_per_choice: bool, share: int) -> tuple[Tensor, RowMap, int]:
    """(round of each choice [T, K], `Rounds.sums`, how many) for at most `share` rows to each unit in a round."""
    plan = plan_rows(units, num_units, units.shape[1], row_per_choice)
    first = torch.repeat_interleave(plan.counts.cumsum(0) - plan.counts, plan.counts)
    round_of_row = (torch.arange(len(first), device=units.device) - first) // share
    return _of_choice(plan, round_of_row), _by_round(plan, round_of_row), max(1, -(-max(plan.splits) // share))


def _of_choice(plan: RowPlan, round_of_row: Tensor) -> Tensor:
    slot, slots = plan.slot_of_choice, plan.choice_of_slot.shape[1]
    if not len(round_of_row):
        return torch.full_like(slot, -1)
    return round_of_row[slot.clamp(min=0) // slots].masked_fill(slot < 0, -1)


def _by_round(plan: RowPlan, round_of_row: Tensor) -> RowMap:
    order = round_of_row.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    places = plan.tokens.places
    if len(order):
        places = torch.where(places >= 0, place[places.clamp(min=0)], -1)
    return RowMap(plan.tokens.source[order], places)


def further_rows(
    rows: Tensor,
    x: Tensor,
    weights: Tensor,
    handle: DispatchHandle | None,
    exchange: Exchange,
    parameters: Sequence[Tensor],
) -> Tensor | None:
    """The rows of all rounds but the first, there and back: [N, D], or None where one round was enough for all ranks.

    rows [N, D] stand for what goes (`Rows.further`) and take its gradients; x [T, D], of which they are made, and
    weights [T, K] are those of all tokens; `parameters`: what `exchange` needs gradients of besides. It communicates:
    all ranks of the group must come here in the same order.
    """
    if handle is None or handle.rounds is None or handle.num_rounds == 1:
        return None
    handles = [handle.rounds.start(number) for number in range(1, handle.num_rounds)]
    wanted = (p for p in parameters if p.requires_grad)
    back: Tensor = _Further.apply(exchange, handles, x.detach(), rows, weights, *wanted)
    return back


class _Further(torch.autograd.Function):
    """Rounds one after the other, forward and, with the forward again, backward."""

    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        handles: list[DispatchHandle],
        x: Tensor,
        _rows: Tensor,
        weights: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.exchange, ctx.handles, ctx.parameters = exchange, handles, parameters
        ctx.save_for_backward(x, weights)
        return torch.cat([exchange(handle, x, weights)[1] for handle in handles])

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weights = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        d_rows: list[Tensor] = []
        sums: list[Tensor | None] = [None] * (1 + len(ctx.parameters))
        pieces = grads[0].split([sum(handle.sent.splits) for handle in ctx.handles])
        for handle, d_back in zip(ctx.handles, pieces, strict=True):
            with torch.enable_grad():
                rows, back = ctx.exchange(handle, x, weights)
            d_sent, *found = torch.autograd.grad(back, (rows, weights, *ctx.parameters), d_back, allow_unused=True)
            d_rows.append(d_sent)
            sums = [_added(old, new) for old, new in zip(sums, found, strict=True)]
        return (None, None, None, torch.cat(d_rows), *sums)


def _added(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Their sum, in fp32 at least: it is rounded when all rounds are in it."""
    if old is None or new is None:
        return new if old is None else old
    wide = torch.promote_types(old.dtype, torch.float32)
    return old.to(wide) + new.to(wide)
