"""The exchanges as nodes of a compiled graph: one op for dispatch, one for combine, one for each backward.

`torch.compile` cannot look into sizes that other ranks decide. So a graph calls custom ops, which do what the
functions of `exchange` do, with the handle's parts as tensors and the group by its name. Only an all-to-all among
contiguous blocks of experts is offered: all that a layer in somebody else's model has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_engine.distributed.collectives import Communicator, Pending
from moe_engine.moe.dispatch import exchange
from moe_engine.moe.dispatch.all_to_all import AllToAllHandle
from moe_engine.moe.dispatch.links import Links
from moe_engine.moe.dispatch.rows import RowPlan
from moe_engine.moe.placement import ExpertPlacement
from moe_engine.ops.permute import RowMap, permute, unpermute


class Way(NamedTuple):
    """A handle in tensors: `RowPlan`'s, and splits [2, ranks]: rows to each rank and from it."""

    source: Tensor
    places: Tensor
    choice_of_slot: Tensor
    slot_of_choice: Tensor
    splits: Tensor


def dispatch(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, placement: ExpertPlacement, links: Links
) -> tuple[exchange.Rows, Way]:
    """Tokens [T, D] to the rows [R, D] of this rank's experts, and the way back."""
    op = torch.ops.moe_engine.dispatch
    x, ids, weights, *way = op(
        x, expert_ids, expert_weights, placement.num_experts, links.rows.group_name, links.exact, links.fp8
    )
    return exchange.Rows(x, ids, weights), Way(*way)


def combine(rows: Tensor, way: Way, links: Links) -> Tensor:
    """What the experts made, [R, D], back to the tokens: [T, D]."""
    out: Tensor = torch.ops.moe_engine.combine(rows, *way, links.rows.group_name, links.exact, links.fp8)
    return out


def _links(group: str, exact: bool, fp8: bool) -> Links:
    communicator = Communicator.of_name(group)
    return Links(communicator, communicator, exact, fp8)


def _handle(way: Way, links: Links) -> AllToAllHandle:
    sent, received = way.splits
    plan = RowPlan(RowMap(way.source, way.places), way.choice_of_slot, way.slot_of_choice, sent)
    return AllToAllHandle(links, "", plan, Pending(received[:, None]), None, way.slot_of_choice)


@torch.library.custom_op("moe_engine::dispatch", mutates_args=())
def _dispatch(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, num_experts: int, group: str, exact: bool, fp8: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    links = _links(group, exact, fp8)
    placement = ExpertPlacement(num_experts, links.size)
    handle = exchange.plan(expert_ids, placement, links)
    assert isinstance(handle, AllToAllHandle)
    packed = exchange.pack_rows(x, expert_ids, expert_weights, placement, handle)
    rows = exchange.dispatch_wait(exchange.dispatch_start(packed, handle))
    splits = torch.stack((handle.sent.counts, handle.received.wait()[:, 0]))
    sent = handle.sent
    # An op's results are tensors of their own.
    x, ids, weights = rows.numbers().clone(), rows.local_ids.clone(), rows.weights.clone()
    source, places, choice_of_slot = sent.tokens.source.clone(), sent.tokens.places.clone(), sent.choice_of_slot.clone()
    return x, ids, weights, source, places, choice_of_slot, sent.slot_of_choice.clone(), splits


@_dispatch.register_fake
def _(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, num_experts: int, group: str, exact: bool, fp8: bool
) -> Any:
    (T, K), ranks = expert_ids.shape, Communicator.of_name(group).size
    context = torch.library.get_ctx()
    arrived, sent = context.new_dynamic_size(), context.new_dynamic_size()
    slots = 1 if exact else min(K, num_experts // ranks)
    return (
        x.new_empty(arrived, x.shape[1]),
        expert_ids.new_empty(arrived, slots, dtype=torch.int32),
        expert_weights.new_empty(arrived, slots),
        expert_ids.new_empty(sent),
        expert_ids.new_empty(T, K if exact else min(K, ranks)),
        expert_ids.new_empty(sent, slots),
        expert_ids.new_empty(T, K),
        expert_ids.new_empty(2, ranks),
    )


def _dispatch_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output[3:])
    ctx.options = inputs[4:]


def _dispatch_gradient(ctx: Any, d_x: Tensor, _: Any, d_weights: Tensor, *__: Any) -> Any:
    d_tokens, d_choices = torch.ops.moe_engine.dispatch_backward(d_x, d_weights, *ctx.saved_tensors, *ctx.options)
    return d_tokens, None, d_choices, None, None, None, None


@torch.library.custom_op("moe_engine::dispatch_backward", mutates_args=())
def _dispatch_backward(
    d_x: Tensor,
    d_weights: Tensor,
    source: Tensor,
    places: Tensor,
    choice_of_slot: Tensor,
    slot_of_choice: Tensor,
    splits: Tensor,
    group: str,
    exact: bool,
    fp8: bool,
) -> tuple[Tensor, Tensor]:
    handle = _handle(Way(source, places, choice_of_slot, slot_of_choice, splits), _links(group, exact, fp8))
    d_sent, d_slots = exchange.dispatch_backward_start(d_x, d_weights, handle).wait()
    return unpermute(d_sent, handle.tokens), handle.sent.unpack_weights(d_slots)


@_dispatch_backward.register_fake
def _(
    d_x: Tensor,
    d_weights: Tensor,
    source: Tensor,
    places: Tensor,
    choice_of_slot: Tensor,
    slot_of_choice: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    return d_x.new_empty(places.shape[0], d_x.shape[1]), d_weights.new_empty(slot_of_choice.shape)


@torch.library.custom_op("moe_engine::combine", mutates_args=())
def _combine(
    rows: Tensor,
    source: Tensor,
    places: Tensor,
    choice_of_slot: Tensor,
    slot_of_choice: Tensor,
    splits: Tensor,
    group: str,
    exact: bool,
    fp8: bool,
) -> Tensor:
    handle = _handle(Way(source, places, choice_of_slot, slot_of_choice, splits), _links(group, exact, fp8))
    return exchange.combine_wait(exchange.combine_start(rows, handle))


@_combine.register_fake
def _(rows: Tensor, source: Tensor, places: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(places.shape[0], rows.shape[1])


def _combine_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[1:6])
    ctx.options, ctx.rows = inputs[6:], inputs[0].shape[0]


def _combine_gradient(ctx: Any, d_out: Tensor) -> Any:
    d_rows = torch.ops.moe_engine.combine_backward(d_out, ctx.rows, *ctx.saved_tensors, *ctx.options)
    return d_rows, *([None] * 8)


@torch.library.custom_op("moe_engine::combine_backward", mutates_args=())
def _combine_backward(
    d_out: Tensor,
    rows: int,
    source: Tensor,
    places: Tensor,
    choice_of_slot: Tensor,
    slot_of_choice: Tensor,
    splits: Tensor,
    group: str,
    exact: bool,
    fp8: bool,
) -> Tensor:
    handle = _handle(Way(source, places, choice_of_slot, slot_of_choice, splits), _links(group, exact, fp8))
    return exchange.combine_backward_start(permute(d_out, handle.tokens), handle).wait()


@_combine_backward.register_fake
def _(d_out: Tensor, rows: int, *_: Any) -> Tensor:
    return d_out.new_empty(rows, d_out.shape[1])


_dispatch.register_autograd(_dispatch_gradient, setup_context=_dispatch_setup)
_combine.register_autograd(_combine_gradient, setup_context=_combine_setup)
