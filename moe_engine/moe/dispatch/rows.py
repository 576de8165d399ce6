"""Which rows a rank sends: index arithmetic on the choices of its tokens, without communication.

A *unit* is where a choice is to go: a rank, or a node of ranks. A token sends one row to each unit that one of its
choices is at, or one row for each choice. Choices may be masked (-1) and may name units in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    splits: rows for each unit.
    """

    tokens: RowMap
    choice_of_slot: Tensor
    slot_of_choice: Tensor
    splits: list[int]

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
def plan_rows(units: Tensor, num_units: int, slots: int, row_per_choice: bool = False) -> RowPlan:
    """Lay out the rows of choices at `units` [T, K] (-1: none), with `slots` slots each (1 with a row per choice)."""
    T, K = units.shape
    device = units.device
    # Columns by unit, in the order of choices within one; masked ones last.
    columns = units.where(units >= 0, num_units).argsort(dim=1, stable=True)
    units = units.gather(1, columns)
    starts = units >= 0  # which of them begin a row
    if not row_per_choice:
        starts[:, 1:] &= units[:, 1:] != units[:, :-1]
    unordered = starts.flatten().nonzero()[:, 0]  # each row's first choice, token by token
    unit_of_row = units.flatten()[unordered]
    first = unordered[unit_of_row.argsort(stable=True)]  # by unit, then token
    row_of_start = torch.full((T * K,), -1, device=device)
    row_of_start[first] = torch.arange(len(first), device=device)

    choices = torch.arange(T, device=device)[:, None] * K + columns
    slot = _slots(units, starts, row_of_start, slots)
    used = slot >= 0
    choice_of_slot = torch.full((len(first), slots), -1, device=device)
    choice_of_slot.view(-1)[slot[used]] = choices[used]
    slot_of_choice = torch.empty_like(slot).scatter_(1, columns, slot)
    if row_per_choice:
        places = slot_of_choice
    else:
        places = torch.full((T, min(K, num_units)), -1, device=device)
        ordinal = (starts.cumsum(dim=1) - 1).flatten()[first]  # which of its token's rows each row is
        places[first // K, ordinal] = row_of_start[first]
    splits: list[int] = torch.bincount(unit_of_row, minlength=num_units).tolist()
    return RowPlan(RowMap(first // K, places), choice_of_slot, slot_of_choice, splits)


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
