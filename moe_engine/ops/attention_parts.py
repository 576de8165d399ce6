"""What the kinds of attention on a CPU share: a few heads of a row at a time, their buffers, and masking."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from moe_engine.ops.threads import share_out
from moe_engine.ops.visible import KEY_TILE, Step, Visible

HEADS = 8  # query heads at a time, if they share no keys: their keys and one block of scores take about 2 MB
LONG_HEADS = 1  # as many where keys are more than one tile
SHARED_PAIRS = 1 << 20  # queries times keys of all heads from which threads get heads of their own

WHOLE = slice(None)

T = TypeVar("T")


class Piece(NamedTuple):
    """A few heads of one row, the number-th: key-value heads, the query heads they serve, and how many each serves."""

    row: int
    number: int
    heads: slice
    queries: slice
    group: int


class Scratch:
    """Buffers that are made once a call and used for every few heads: they stay in the cache, and mapped.

    dtype: fp32, or fp64 for fp64 tensors.
    """

    def __init__(self, like: Tensor) -> None:
        self.dtype, self.device = torch.promote_types(like.dtype, torch.float32), like.device
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._parts: dict[str, tuple[Tensor, dict[tuple[int, ...], Tensor]]] = {}
        self._made: dict[tuple[int, int], Any] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """What `name` held in this shape before, or zeros."""
        if (name, *shape) not in self._buffers:
            self._buffers[name, *shape] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self._buffers[name, *shape]

    def part(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Numbers of any value, in memory that `name` has for all shapes."""
        size = math.prod(shape)
        if name not in self._parts or self._parts[name][0].numel() < size:
            self._parts[name] = torch.empty(size, dtype=self.dtype, device=self.device), {}
        memory, known = self._parts[name]
        if shape not in known:
            known[shape] = memory[:size].view(shape)
        return known[shape]

    def once(self, piece: Piece, visible: Visible, make: Callable[[], T]) -> T:
        """What `make` gives of these buffers: made once for all pieces of as many heads whose rows see alike."""
        key = length(piece.heads), id(visible.steps_of(piece.row, piece.group))
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    def keys(self, name: str, x: Tensor, piece: Piece, fill: int = 0) -> Tensor:
        """x [B, S, heads, n] -> the piece's [heads, S, n + fill], the last `fill` columns as they were, 0 at first."""
        x = x[piece.row, :, piece.heads]
        S, heads, n = x.shape
        wide = self(name, (heads, S, n + fill))
        (wide[..., :n] if fill else wide).copy_(x.transpose(0, 1))
        return wide

    def read_keys(self, name: str, x: Tensor, piece: Piece) -> Tensor:
        """`keys` where they need not be changed: those of x itself if they have the buffers' dtype."""
        if x.dtype != self.dtype:
            return self.keys(name, x, piece)
        return x[piece.row, :, piece.heads].transpose(0, 1)

    def read_queries(self, name: str, x: Tensor, piece: Piece) -> Tensor:
        """`queries` where they need not be changed: those of x itself if they have the buffers' dtype, and rows that
        lie evenly."""
        if x.dtype != self.dtype or piece.group > 1:
            return self.queries(name, x, piece)
        return x[piece.row, :, piece.queries, None].transpose(0, 1)

    def queries(self, name: str, x: Tensor, piece: Piece, fill: int = 0, part: slice = WHOLE) -> Tensor:
        """x [B, S, query heads, n] -> the piece's [key-value heads, S, H/G, n + fill], of a part of S."""
        x = x[piece.row, part, piece.queries]
        S, n = x.shape[0], x.shape[2]
        x = x.unflatten(1, (-1, piece.group)).transpose(0, 1)
        wide = self(name, (x.shape[0], S, piece.group, n + fill))
        (wide[..., :n] if fill else wide).copy_(x)
        return wide


def length(part: slice) -> int:
    """How many places a part has."""
    count: int = part.stop - part.start
    return count


def cut(x: Tensor, dim: int, part: slice) -> Tensor:
    """A part of a dimension: a view."""
    return x.narrow(dim, part.start, length(part))


def rows_of(x: Tensor, queries: slice) -> Tensor:
    """x [heads, S, H/G, n] -> the queries' rows, [heads, rows * H/G, n]: no copy."""
    return cut(x, 1, queries).flatten(1, 2)


def hidden(scores: Tensor, visible: Visible, row: int, step: Step, group: int) -> tuple[Tensor, Tensor] | None:
    """What a mask is to be added to, and the mask; None where all is seen: scores [heads, queries * H/G, keys]."""
    if step.edge is None:
        return None
    edge = scores.narrow(2, step.edge.start - step.keys.start, step.edge.stop - step.edge.start)
    mask = visible.mask(row, step, scores.dtype)
    return (edge, mask) if group == 1 else (edge.unflatten(1, (-1, group)), mask[:, None])


def heads_at_once(q: Tensor, k: Tensor) -> int:
    """Key-value heads of a piece: q [B, Sq, H, …], k [B, Sk, G, …]."""
    H, (Sk, G) = q.shape[2], k.shape[1:3]
    return max(1, (HEADS if Sk <= KEY_TILE else LONG_HEADS) * G // H)


def for_pieces(attend: Callable[[Scratch, Piece], None], q: Tensor, k: Tensor, visible: Visible) -> None:
    """`attend` for each row and a few heads: q [B, Sq, H, …], k [B, Sk, G, …]. Tensors without data: for none."""
    (B, Sq, H), (Sk, G) = q.shape[:3], k.shape[1:3]
    if q.is_meta:
        return
    group, at_once = H // G, heads_at_once(q, k)
    pieces = []
    for b in range(B):
        visible.steps_of(b, group)  # found here, not by several threads at once
        for number, start in enumerate(range(0, G, at_once)):
            stop = min(start + at_once, G)
            pieces.append(Piece(b, number, slice(start, stop), slice(start * group, stop * group), group))

    def work(some: Sequence[Piece]) -> None:
        scratch = Scratch(q)
        for piece in some:
            attend(scratch, piece)

    if q.device.type == "cpu" and B * H * Sq * Sk >= SHARED_PAIRS:
        share_out(work, pieces)
    else:
        with torch.no_grad():
            work(pieces)
