"""Which rows a rank sends: index arithmetic on the choices of its tokens, without communication.

A *unit* is where a choice is to go: a rank, or a node of ranks. A token sends one row to each unit that one of its
choices is at, or one row for each choice. Choices may be masked (-1) and may name units in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_engine.ops.permute import RowMap, take


@dataclass(frozen=True)
class RowPlan:
    """Rows [N] in the order (unit, token), and which choices they carry in their slots [N, k].

    tokens: from tokens [T] to rows [N], places in the order in which a token's rows are summed: of units, or of
    choices where each has its row;
    choice_of_slot [N, k]: which choice (flat index t*K + column) fills a slot, -1 for none;
    slot_of_choice [T, K]: its inverse, flat index row*k + slot, -1 for a masked choice;
    counts [units]: rows for each unit. In a fixed plan N is the most that there could be, and rows of nothing follow:
    copies of the first token without choices, of which no token knows.
    """

    tokens: RowMap
    choice_of_slot: Tensor
    slot_of_choice: Tensor
    counts: Tensor

    @cached_property
    def splits(self) -> list[int]:
        """Rows for each unit, on the host."""
        splits: list[int] = self.counts.tolist()
        return splits

    def pack_ids(self, ids: Tensor) -> Tensor:
        """Ids of the choices [T, K] in the slots [N, k] int32, -1 for an unused one."""
        choice = self.choice_of_slot
        if not ids.numel():
            return choice.to(torch.int32)
        return ids.flatten()[choice.clamp(min=0)].to(torch.int32).masked_fill_(choice < 0, -1)

    def pack_weights(self, weights: Tensor) -> Tensor:
        """Weights of the choices [T, K] in the slots [N, k], 0 for an unused one."""
        return take(weights, self.choice_of_slot, self.slot_of_choice)

    def unpack_weights(self, weights: Tensor) -> Tensor:
        """The inverse: [N, k] -> [T, K], 0 for a masked choice."""
        return take(weights, self.slot_of_choice, self.choice_of_slot)


@torch.no_grad()
def plan_rows(
    units: Tensor, num_units: int, experts: int, row_per_choice: bool = False, fixed: bool = False
) -> RowPlan:
    """Lay out the rows of choices at `units` [T, K] (-1: none), with a slot for each of a token's choices at one unit.

    experts: of a unit, so that no more choices of a token are there.
    fixed: a number of rows that does not depend on the choices, so that on a GPU the host waits for nothing.
    """
    T, K = units.shape
    slots = 1 if row_per_choice else min(K, experts)
    device = units.device
    # Columns by unit, in the order of choices within one; masked ones last.
    columns = units.where(units >= 0, num_units).argsort(dim=1, stable=True)
    units = units.gather(1, columns)
    starts = units >= 0  # which of them begin a row
    if not row_per_choice:
        starts[:, 1:] &= units[:, 1:] != units[:, :-1]
    per_token = K if row_per_choice else min(K, num_units)
    if fixed:
        first, used, counts = _fixed_starts(units, starts, num_units, T * per_token)
    else:
        unordered = starts.flatten().nonzero()[:, 0]  # each row's first choice, token by token
        unit_of_row = units.flatten()[unordered]
        first = unordered[unit_of_row.argsort(stable=True)]  # by unit, then token
        used, counts = None, torch.bincount(unit_of_row, minlength=num_units)
    row_of_start = _inverse(first, used, T * K)

    choices = torch.arange(T, device=device)[:, None] * K + columns
    slot = _slots(units, starts, row_of_start, slots)
    choice_of_slot = _scatter(slot, choices, len(first) * slots).view(len(first), slots)
    slot_of_choice = torch.empty_like(slot).scatter_(1, columns, slot)
    if row_per_choice:
        places = slot_of_choice
    else:
        ordinal = starts.cumsum(dim=1) - 1  # which of its token's rows a choice is in
        place = torch.arange(T, device=device)[:, None] * per_token + ordinal
        places = _scatter(place.where(starts, -1), row_of_start.view(T, K), T * per_token).view(T, per_token)
    return RowPlan(RowMap(first // max(K, 1), places), choice_of_slot, slot_of_choice, counts)


def _fixed_starts(units: Tensor, starts: Tensor, num_units: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(first choice of each row by unit, then token [rows], which of them are rows, rows of each unit).

    Choices that begin no row are taken for the rest; it stands for the first one.
    """
    unit_of_start = units.where(starts, num_units).flatten()
    first = unit_of_start.argsort(stable=True)[:rows]
    counts = torch.zeros(num_units + 1, dtype=torch.int64, device=units.device)
    counts.scatter_add_(0, unit_of_start, torch.ones_like(unit_of_start))
    used = unit_of_start[first] < num_units
    return first.where(used, 0), used, counts[:num_units]


def _inverse(index: Tensor, used: Tensor | None, size: int) -> Tensor:
    """Where in `index` each of `size` numbers is, -1 for nowhere."""
    places = torch.arange(len(index), device=index.device)
    return _scatter(index if used is None else index.where(used, -1), places, size)


def _scatter(places: Tensor, values: Tensor, size: int) -> Tensor:
    """[size] with each value at its place, -1 elsewhere; values at place -1 go nowhere."""
    out = torch.full((size + 1,), -1, device=values.device)
    out[places.where(places >= 0, size).flatten()] = values.flatten()
    return out[:size]


def _slots(units: Tensor, starts: Tensor, row_of_start: Tensor, slots: int) -> Tensor:
    """Flat slot index (row*slots + slot) of each choice, columns by unit: a row's choices fill its slots in order."""
    T, K = units.shape
    column = torch.arange(K, device=units.device).expand(T, K)
    start_column = column.where(starts, 0).cummax(dim=1).values if K else column
    start = torch.arange(T, device=units.device)[:, None] * K + start_column
    return (row_of_start[start] * slots + column - start_column).masked_fill_(units < 0, -1)


def join_slots(ids: Tensor, weights: Tensor) -> Tensor:
    """Ids [N, k] int32 and weights [N, k] as one message of int32 columns."""
    return torch.cat((ids, weights.detach().view(torch.int32)), dim=1)


def split_slots(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The ids [N, k] and weights [N, k] of `dtype` in a message."""
    k = message.shape[1] // (1 + dtype.itemsize // 4)
    # A true copy: of a single row `contiguous` would keep the slice, which may start between two fp64 numbers.
    return message[:, :k], message[:, k:].clone(memory_format=torch.contiguous_format).view(dtype)
