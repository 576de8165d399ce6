"""Which keys a query of attention sees, told by places and documents, and the steps in which blocks meet tiles.

The queries of one part of a sequence can meet the keys of another, as context parallel ranks do. Tiles where nothing is
seen are skipped, and only tiles on an edge are masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

EDGE = 64  # queries and keys are known to be seen, or not, by blocks of this size
QUERY_BLOCK = 64  # smaller ones skip more of what is not seen, and multiply slower
LONG_QUERY_BLOCK = 128  # for more keys than one tile
LONG_ROWS = 512  # of as many rows at most: queries times the heads that share keys
LEAST_QUERY_BLOCK = 16  # however many those are
KEY_TILE = 512

T = TypeVar("T")


class Step(NamedTuple):
    """A block of queries and the keys of one tile, of which some are seen; `edge`: those not seen by all queries.

    first: whether it is the first of its queries, which `ops.attention_order` finds.
    """

    queries: slice
    keys: slice
    edge: slice | None
    first: bool = False


@dataclass(frozen=True)
class Visible:
    """Which keys each query sees: those of its own document and, if `causal`, at no later place; with a `window` the
    nearest so many places, its own included.

    q_places [Sq], k_places [Sk] int64: places in the whole sequence, the same in every row; q_documents [B, Sq],
    k_documents [B, Sk] whole numbers, or None: one document. Make one for all layers: it finds its steps once.
    """

    q_places: Tensor
    k_places: Tensor
    q_documents: Tensor | None = None
    k_documents: Tensor | None = None
    causal: bool = True
    window: int = 0  # 0: none; only where causal

    @property
    def whole_causal(self) -> bool:
        """Whether this is plain causal attention over whole rows of one document each."""
        return self.causal and self.q_documents is None and self.q_places is self.k_places and not self.window

    @property
    def each_sees_itself(self) -> bool:
        """Whether queries are those of the keys' own places."""
        return self.q_places is self.k_places and self.q_documents is self.k_documents

    def query_block(self, group: int = 1) -> int:
        """Queries of a block, where `group` query heads share keys. A tile is a whole number of blocks."""
        if self.k_places.numel() <= KEY_TILE:
            return QUERY_BLOCK
        return min(LONG_QUERY_BLOCK, self.run_length(group))

    def run_length(self, group: int) -> int:
        """Queries whose blocks go together where all of a tile is seen: a whole number of blocks."""
        return max(LEAST_QUERY_BLOCK, LONG_ROWS >> (group - 1).bit_length())

    def steps_of(self, row: int, group: int = 1) -> list[Step]:
        """The steps of a row, in the order of queries, then keys."""
        block = self.query_block(group)
        steps = self.once(("steps", block), lambda: self._steps(block))
        return steps[row if len(steps) > 1 else 0]

    def once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What `make` gives, made the first time that `key` is asked for."""
        known = self._made  # asked for once: a thread that asks for the first time, too, may put another in its place
        if key not in known:
            known[key] = make()
        found: T = known[key]
        return found

    def _steps(self, block: int) -> list[list[Step]]:
        """In the order of queries, then keys: for each row, or once if all rows see alike."""
        rows = 1 if self.q_documents is None else self.q_documents.shape[0]
        if not (self.q_places.numel() and self.k_places.numel()):
            return [[] for _ in range(rows)]
        seen, all_seen = self._blocks(block)
        return [list(self._row_steps(block, *both)) for both in zip(seen, all_seen, strict=True)]

    def _blocks(self, block: int) -> tuple[Tensor, Tensor]:
        """Whether a block sees any of a block, if in doubt True, and whether it sees all: bool [rows, nq, nk] each."""
        (q_low, q_high), (k_low, k_high) = _ends(self.q_places[None], block), _ends(self.k_places[None], EDGE)
        q_low, q_high, k_low, k_high = q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None]
        seen = k_low <= q_high if self.causal else (k_low <= k_high) & (q_low <= q_high)
        all_seen = k_high <= q_low if self.causal else seen
        if self.window:
            seen, all_seen = seen & (q_low - k_high < self.window), all_seen & (q_high - k_low < self.window)
        if self.q_documents is not None and self.k_documents is not None:
            (q_first, q_last), (k_first, k_last) = _ends(self.q_documents, block), _ends(self.k_documents, EDGE)
            q_first, q_last, k_first, k_last = (
                q_first[:, :, None],
                q_last[:, :, None],
                k_first[:, None],
                k_last[:, None],
            )
            seen = seen & (k_first <= q_last) & (k_last >= q_first)
            all_seen = all_seen & (k_first == q_last) & (k_last == q_first) & (k_first == k_last)
        return seen, all_seen

    def _row_steps(self, block: int, seen: Tensor, all_seen: Tensor) -> Iterator[Step]:
        """Steps of one row from what blocks see, [nq, nk]."""
        per_tile = KEY_TILE // EDGE
        fill = -seen.shape[1] % per_tile
        seen = F.pad(seen, (0, fill)).unflatten(1, (-1, per_tile))  # [nq, tiles, blocks of a tile]
        edge = seen & ~F.pad(all_seen, (0, fill)).unflatten(1, (-1, per_tile))
        # A block that is not seen between others that are is masked, not cut out.
        first, last = _first_last(seen)
        places = torch.arange(per_tile, device=seen.device)
        edge = edge | (~seen & (places >= first[..., None]) & (places <= last[..., None]))
        ends = zip(
            *(x.tolist() for x in (seen.any(dim=2), first, last, edge.any(dim=2), *_first_last(edge))), strict=True
        )
        Sq, Sk = self.q_places.numel(), self.k_places.numel()
        for i, columns in enumerate(ends):
            queries = slice(i * block, min((i + 1) * block, Sq))
            for tile, (any_seen, start, stop, any_edge, edge_start, edge_stop) in enumerate(zip(*columns, strict=True)):
                if any_seen:
                    keys = _keys(tile, start, stop, Sk)
                    yield Step(queries, keys, _keys(tile, edge_start, edge_stop, Sk) if any_edge else None)

    def mask(self, row: int, step: Step, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of a step's edge: 0 where seen, -inf where not, [queries, keys]."""
        assert step.edge is not None
        queries, keys = step.queries, step.edge
        # On the diagonal of plain causal rows all masks are alike.
        place = (keys.start - queries.start,) if self.whole_causal else (row, queries.start, keys.start)
        key = (*place, queries.stop - queries.start, keys.stop - keys.start, dtype)
        known = self._masks  # see `once`
        if key in known:
            return known[key]
        hidden = torch.zeros((), dtype=torch.bool, device=self.q_places.device)
        if self.causal:
            hidden = self.k_places[keys] > self.q_places[queries, None]
        if self.window:
            hidden = hidden | (self.q_places[queries, None] - self.k_places[keys] >= self.window)
        if self.q_documents is not None and self.k_documents is not None:
            hidden = hidden | (self.k_documents[row, keys] != self.q_documents[row, queries, None])
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)
        # As many as the edges of a few documents have: memory must stay linear in the length.
        rows = 1 if self.q_documents is None else self.q_documents.shape[0]
        if len(known) < 4 * rows * (1 + self.q_places.numel() // (queries.stop - queries.start)):
            known[key] = mask
        return mask

    @cached_property
    def _made(self) -> dict[tuple[Any, ...], Any]:
        return {}

    @cached_property
    def _masks(self) -> dict[tuple[Any, ...], Tensor]:
        return {}


def whole_rows(
    length: int, documents: Tensor | None = None, device: torch.device | None = None, window: int = 0
) -> Visible:
    """Whole rows, causal: a query sees keys up to its own place, of its own document where `documents` [B, S] are."""
    places = torch.arange(length, device=device)
    return Visible(places, places, documents, documents, window=window if window < length else 0)


def _ends(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Least and greatest of each block of columns: x [rows, S] -> two [rows, blocks]."""
    fill = -x.shape[1] % block
    if fill:
        x = torch.cat((x, x[:, -1:].expand(-1, fill)), dim=1)
    return x.unflatten(1, (-1, block)).aminmax(dim=2)


def _first_last(x: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the first and the last True of bool [..., n]."""
    flags = x.byte()
    return flags.argmax(dim=-1), x.shape[-1] - 1 - flags.flip(-1).argmax(dim=-1)


def _keys(tile: int, first: int, last: int, length: int) -> slice:
    """The keys of blocks first … last of a tile."""
    return slice(tile * KEY_TILE + first * EDGE, min(tile * KEY_TILE + (last + 1) * EDGE, length))
