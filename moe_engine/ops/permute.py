"""Rows copied and summed by an index, in both directions, and the order of rows by expert.

The same two moves happen twice in a layer: tokens are copied to the rows that travel and summed when these come
back, and received rows are copied to their experts and summed after them. One `RowMap` describes a pair of such
moves; each is the other's backward, so no index is ever computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import moe_kernels
from moe_engine.ops.first_order import first_order


@dataclass(frozen=True)
class RowMap:
    """Which of R outer rows each of N inner rows is a copy of, and the inverse.

    source [N] int64: the outer row; places [R, k] int64: the inner rows of each outer row in the order in which
    they are summed, -1 for none.
    """

    source: Tensor
    places: Tensor


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowMap) -> Tensor:
        ctx.rows = rows
        return moe_kernels.permute(x, rows.source)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return moe_kernels.unpermute(grads[0], ctx.rows.places), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowMap) -> Tensor:
        ctx.rows = rows
        return moe_kernels.unpermute(x, rows.places)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return moe_kernels.permute(grads[0], ctx.rows.source), None


def permute(x: Tensor, rows: RowMap) -> Tensor:
    """Copy outer rows to inner ones: x [R, D] -> [N, D]. Gradients are summed in fp32 in the order of `places`."""
    out: Tensor = _Permute.apply(x, rows)
    return out


class _StandIn(_Permute):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowMap) -> Tensor:
        ctx.rows = rows
        return x.new_zeros(()).expand(len(rows.source), x.shape[1])


def permute_stand_in(x: Tensor, rows: RowMap) -> Tensor:
    """For autograd what `permute(x, rows)` is, zeros without memory: for numbers that go there by another way."""
    out: Tensor = _StandIn.apply(x, rows)
    return out


class _PermuteFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowMap, count: int, numbers: bool) -> tuple[Tensor, Tensor]:
        ctx.rows = rows
        first = moe_kernels.permute(x, rows.source[:count]) if numbers else x.new_zeros(()).expand(count, x.shape[1])
        return first, x.new_zeros(()).expand(len(rows.source) - count, x.shape[1])

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return moe_kernels.unpermute(torch.cat(grads), ctx.rows.places), None, None, None


def permute_first(x: Tensor, rows: RowMap, count: int, numbers: bool = True) -> tuple[Tensor, Tensor]:
    """The first `count` rows of `permute(x, rows)`, and of the others what `permute_stand_in` gives (numbers=False: of
    both). For autograd they are one: an outer row's gradients are summed over all of its inner rows, and rounded once.
    """
    first, others = _PermuteFirst.apply(x, rows, count, numbers)
    return first, others


def unpermute(x: Tensor, rows: RowMap) -> Tensor:
    """Sum inner rows into outer ones, in fp32 in the order of `places`: x [N, D] -> [R, D], in x's dtype."""
    out: Tensor = _Unpermute.apply(x, rows)
    return out


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return _take(values, index)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _take(grads[0], ctx.inverse), None, None


def _take(values: Tensor, index: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # a size may be unknown: -1 finds a zero at the end
        flat = values.reshape(-1)
        return torch.cat((flat, flat.new_zeros(1)))[index]
    if values.numel() == 0:
        return values.new_zeros(index.shape)
    return values.take(index.clamp(min=0)).masked_fill_(index < 0, 0)


def take(values: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """values.flatten()[index], 0 where the index is -1, for an index that names no element twice.

    `inverse`, shaped like `values`, says where each value went (-1: nowhere), so that backward is a take as well.
    """
    out: Tensor = _Take.apply(values, index, inverse)
    return out


@dataclass(frozen=True)
class ExpertOrder:
    """Rows in the order of their experts.

    rows: from received rows [R] to expert rows [N]; slots [N]: the flat index r*k + slot each came from;
    counts: expert rows of each local expert. In a compiled graph, and where rows are bounded, N does not depend on the
    choices: unused slots come last, as rows of no expert, and counts is a tensor.
    """

    rows: RowMap
    slots: Tensor
    counts: list[int] | Tensor


def order_by_expert(local_ids: Tensor, num_experts: int, bound: int = 0) -> ExpertOrder:
    """Group the slots of received rows by expert: local_ids [R, k], -1 for an unused slot.

    Within an expert, rows keep their order; the rows of one received row are summed in the order of its slots.
    bound: so many slots are used at most, and the host is not to ask how many (0: it asks).
    """
    flat = local_ids.reshape(-1).long()
    keys = flat.where(flat >= 0, num_experts)
    if bound or torch.compiler.is_compiling():
        return _order_of_fixed_size(keys, local_ids.shape, num_experts, bound or len(keys))
    counts: list[int] = torch.bincount(keys, minlength=num_experts + 1).tolist()[:num_experts]
    slots = _sorted_places(keys, num_experts)[: sum(counts)]
    places = torch.full_like(flat, -1).scatter_(0, slots, torch.arange(len(slots), device=flat.device))
    return ExpertOrder(RowMap(slots // local_ids.shape[1], places.view(local_ids.shape)), slots, counts)


def _sorted_places(keys: Tensor, largest: int) -> Tensor:
    """Where each of the keys, 0 … largest, stands when they are sorted; equal ones keep their order."""
    if keys.device.type != "cpu":
        return keys.argsort(stable=True)
    # Numpy counts keys of one or two bytes, and takes a fifth of the time of torch's sort.
    narrow = np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.int64
    return torch.from_numpy(keys.numpy().astype(narrow).argsort(kind="stable"))


def _order_of_fixed_size(keys: Tensor, shape: torch.Size, num_experts: int, size: int) -> ExpertOrder:
    """The same without a size that depends on the data."""
    slots = keys.argsort(stable=True)
    places = torch.zeros_like(keys).scatter_(0, slots, torch.arange(len(slots), device=keys.device))
    places = places.masked_fill(keys == num_experts, -1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=keys.device).index_add_(
        0, keys, torch.ones_like(keys)
    )
    slots = slots[:size]
    return ExpertOrder(RowMap(slots // shape[1], places.view(shape)), slots, counts[:num_experts])
