"""A CPU's attention where keys are one tile, and each query sees itself: the softmax is made once and kept.

For so few keys it is faster to read the softmax again in backward than to make it again: 512 numbers at most for each
query and head. A block of queries sees all of its keys at once, so torch's own softmax does in one pass what an online
one does in five. The rest is as in `ops.attention`: a few heads of a row at a time, in fp32 (fp64).

`latent_attention` is the same for keys and values as multi-head latent attention makes them: they are read where the
projection left them, beside one rotary key that all heads share, and queries are turned in the cache, so that neither
keys nor turned queries ever exist whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_engine.ops.attention_parts import (
    Piece,
    Scratch,
    cut,
    for_pieces,
    heads_at_once,
    hidden,
    length,
    rows_of,
)
from moe_engine.ops.autocast import without_autocast
from moe_engine.ops.first_order import first_order
from moe_engine.ops.rotary import Turn
from moe_engine.ops.visible import KEY_TILE, Visible

KEPT_KEYS = KEY_TILE  # for more keys than this the softmax is not kept


def is_short(device: torch.device, visible: Visible) -> bool:
    """Whether this way is open."""
    return device.type == "cpu" and visible.each_sees_itself and visible.k_places.numel() <= KEPT_KEYS


@dataclass(frozen=True)
class _Operands:
    """q [B, S, H, d], v [B, S, G, e], and keys k [B, S, G, d], or [B, S, G, d - r] and `shared` [B, S, r], their last r
    numbers. turn: what is still to be done to queries, in buffers.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    shared: Tensor | None
    turn: Turn | None

    def queries(self, scratch: Scratch, piece: Piece) -> Tensor:
        """[heads, S, H/G, d]."""
        if self.turn is None:
            return scratch.read_queries("q", self.q, piece)
        wide = scratch.queries("q", self.q, piece)
        turned = self.turn.end(wide, piece.row)
        turned.copy_(turned.to(self.q.dtype))  # rounded as where turned queries exist whole: ranks that share rows
        return wide

    def keys(self, scratch: Scratch, piece: Piece) -> Tensor:
        """[heads, S, d]."""
        if self.shared is None:
            return scratch.keys("k", self.k, piece)
        own = self.k[piece.row, :, piece.heads].transpose(0, 1)
        wide = scratch("k", (*own.shape[:2], self.q.shape[3]))
        wide[..., : own.shape[2]], wide[..., own.shape[2] :] = own, self.shared[piece.row]
        return wide


@dataclass(frozen=True)
class _Gradients:
    """Where gradients of `_Operands` go. Those of a shared key come from all heads, and are summed in fp32 (fp64)."""

    q: Tensor
    k: Tensor
    v: Tensor
    shared: Tensor | None  # [pieces of a row, B, S, r]: of each few heads
    turn: Turn | None  # back

    def queries(self, scratch: Scratch, piece: Piece) -> Tensor:
        """Where a gradient of the queries is made, [heads, S, H/G, d]: where it goes, if that is as in a buffer."""
        if self.q.dtype == scratch.dtype and piece.group == 1:
            return self.q[piece.row, :, piece.queries, None].transpose(0, 1)
        return scratch("d_q", (length(piece.heads), self.q.shape[1], piece.group, self.q.shape[3]))

    def put_queries(self, d_q: Tensor, piece: Piece) -> None:
        """d_q, made in `queries`, is used up."""
        if self.turn is not None:
            self.turn.end(d_q, piece.row)
        if self.q.dtype != d_q.dtype or piece.group > 1:
            self.q[piece.row, :, piece.queries].unflatten(1, (-1, piece.group)).copy_(d_q.transpose(0, 1))

    def values(self, scratch: Scratch, piece: Piece) -> Tensor:
        """Where a gradient of the values is made, [heads, S, e], as `queries`."""
        to = self.v[piece.row, :, piece.heads].transpose(0, 1)
        return to if self.v.dtype == scratch.dtype else scratch("d_v", to.shape)

    def put_keys_values(self, d_k: Tensor, d_v: Tensor, piece: Piece) -> None:
        """[heads, S, d] and [heads, S, e], made in `values`."""
        own = self.k.shape[3]
        self.k[piece.row, :, piece.heads] = d_k[..., :own].transpose(0, 1)
        if self.v.dtype != d_v.dtype:
            self.v[piece.row, :, piece.heads] = d_v.transpose(0, 1)
        if self.shared is not None:
            torch.sum(d_k[..., own:], dim=0, out=self.shared[piece.number, piece.row])


# The softmax of a few heads and a block of queries, [heads, rows, keys], by (row, first key head, first query).
_Kept = dict[tuple[int, int, int], Tensor]


class _ForwardStep(NamedTuple):
    """Views of the buffers that a step works on, the same for all pieces of a shape: made once a call.

    Where they are to be cut of operands or of results, `queries` and `keys` say.
    """

    queries: slice
    keys: slice
    k_t: Tensor  # [heads, d, keys]
    scores: Tensor  # [heads, rows, keys]
    edge: tuple[Tensor, Tensor] | None  # the part of the scores that a mask is added to, and the mask


def _forward_steps(k: Tensor, visible: Visible, piece: Piece, scratch: Scratch) -> list[_ForwardStep]:
    """k [heads, S, d], which is a buffer."""
    found = []
    for step in visible.steps_of(piece.row):
        k_t = cut(k, 1, step.keys).transpose(1, 2)
        scores = scratch("scores", (k.shape[0], length(step.queries) * piece.group, k_t.shape[2]))
        edge = hidden(scores, visible, piece.row, step, piece.group)
        found.append(_ForwardStep(step.queries, step.keys, k_t, scores, edge))
    return found


def _forward(x: _Operands, visible: Visible, scale: float, kept: _Kept | None) -> Tensor:
    """Out [B, S, H, e] in v's dtype; `kept` is filled for `_backward`."""
    out = torch.empty(*x.q.shape[:3], x.v.shape[3], dtype=x.v.dtype, device=x.q.device)

    def attend(scratch: Scratch, piece: Piece) -> None:
        q, k, v = x.queries(scratch, piece), x.keys(scratch, piece), scratch.read_keys("v", x.v, piece)
        to = out[piece.row, :, piece.queries].unflatten(1, (-1, piece.group)).transpose(0, 1)  # [heads, S, H/G, e]
        at_once = out.dtype == scratch.dtype and piece.group == 1
        for step in scratch.once(piece, visible, lambda: _forward_steps(k, visible, piece, scratch)):
            step.scores.baddbmm_(rows_of(q, step.queries), step.k_t, beta=0, alpha=scale)
            if step.edge is not None:
                step.edge[0].add_(step.edge[1])
            softmax = step.scores.softmax(dim=2)
            rows, values = cut(to, 1, step.queries), cut(v, 1, step.keys)
            if at_once:
                torch.bmm(softmax, values, out=rows[:, :, 0])
            else:
                rows.copy_(torch.bmm(softmax, values).unflatten(1, (-1, piece.group)))
            if kept is not None:
                kept[piece.row, piece.heads.start, step.queries.start] = softmax

    for_pieces(attend, x.q, x.k, visible)
    return out


class _BackwardStep(NamedTuple):
    """As `_ForwardStep`. `first`: what gradients of keys and values are set to, not added to."""

    queries: slice
    keys: slice
    k: Tensor  # [heads, keys, d]
    d_k: Tensor  # [heads, keys, d]
    d_softmax: Tensor  # [heads, rows, keys]
    first: bool


def _backward_steps(k: Tensor, d_k: Tensor, visible: Visible, piece: Piece, scratch: Scratch) -> list[_BackwardStep]:
    """k and its gradient, which are buffers.

    The last queries first: they mostly see all keys, and what is set then need not be zero before.
    """
    found: list[_BackwardStep] = []
    for step in visible.steps_of(piece.row)[::-1]:
        rows, keys = step.queries, step.keys
        k_, d_k_ = cut(k, 1, keys), cut(d_k, 1, keys)
        d_softmax = scratch("d_softmax", (k.shape[0], length(rows) * piece.group, k_.shape[1]))
        first = not found and keys == slice(0, k.shape[1])
        found.append(_BackwardStep(rows, keys, k_, d_k_, d_softmax, first))
    return found


def _backward(d_out: Tensor, x: _Operands, to: _Gradients, visible: Visible, scale: float, kept: _Kept) -> None:
    def attend(scratch: Scratch, piece: Piece) -> None:
        q, k, v = x.queries(scratch, piece), x.keys(scratch, piece), scratch.read_keys("v", x.v, piece)
        d_k, d_v, d_q = scratch("d_k", k.shape), to.values(scratch, piece), to.queries(scratch, piece)
        d_result, v_t = scratch.read_queries("d_out", d_out, piece), v.transpose(1, 2)
        steps = scratch.once(piece, visible, lambda: _backward_steps(k, d_k, visible, piece, scratch))
        if not (steps and steps[0].first):
            d_k.zero_()
            d_v.zero_()
        for step in steps:
            softmax, add = kept[piece.row, piece.heads.start, step.queries.start], 0 if step.first else 1
            d_rows = rows_of(d_result, step.queries)
            cut(d_v, 1, step.keys).baddbmm_(softmax.transpose(1, 2), d_rows, beta=add)
            torch.bmm(d_rows, cut(v_t, 2, step.keys), out=step.d_softmax)
            d_scores = torch._softmax_backward_data(step.d_softmax, softmax, 2, softmax.dtype)
            step.d_k.baddbmm_(d_scores.transpose(1, 2), rows_of(q, step.queries), beta=add, alpha=scale)
            rows_of(d_q, step.queries).baddbmm_(d_scores, step.k, beta=0, alpha=scale)
        to.put_queries(d_q, piece)
        to.put_keys_values(d_k, d_v, piece)

    for_pieces(attend, x.q, x.k, visible)


def _save(ctx: Any, tensors: tuple[Tensor, ...], kept: _Kept | None) -> None:
    ctx.places = sorted(kept or {})
    ctx.save_for_backward(*tensors, *((kept or {})[place] for place in ctx.places))


def _saved(ctx: Any, count: int) -> tuple[tuple[Tensor, ...], _Kept]:
    tensors = ctx.saved_tensors
    return tensors[:count], dict(zip(ctx.places, tensors[count:], strict=True))


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, keep: bool) -> Tensor:
        kept: _Kept | None = {} if keep and any(ctx.needs_input_grad) else None
        out = _forward(_Operands(q, k, v, None, None), visible, scale, kept)
        _save(ctx, (q, k, v), kept)
        ctx.visible, ctx.scale = visible, scale
        return out

    @staticmethod
    @without_autocast
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        (q, k, v), kept = _saved(ctx, 3)
        d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        x, to = _Operands(q, k, v, None, None), _Gradients(d_q, d_k, d_v, None, None)
        _backward(grads[0], x, to, ctx.visible, ctx.scale, kept)
        return d_q, d_k, d_v, None, None, None


def short_attention(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> Tensor:
    """softmax(scale * q k^T) v over the visible keys, where `is_short`: q [B, S, H, d], k [B, S, G, d], v [B, S, G, e]
    -> [B, S, H, e], in v's dtype. Head g of keys and values serves query heads g H/G … (g+1) H/G - 1.
    """
    out: Tensor = _ShortAttention.apply(q, k, v, visible, scale, torch.is_grad_enabled())
    return out


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        k_rope: Tensor,
        visible: Visible,
        scale: float,
        turn: Turn,
        value: int,
        keep: bool,
    ) -> Tensor:
        kept: _Kept | None = {} if keep and any(ctx.needs_input_grad) else None
        out = _forward(_latent_operands(q, kv, k_rope, turn, value), visible, scale, kept)
        _save(ctx, (q, kv, k_rope), kept)
        ctx.visible, ctx.scale, ctx.turn, ctx.value = visible, scale, turn, value
        return out

    @staticmethod
    @without_autocast
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, kv, k_rope), kept = _saved(ctx, 3)
        turn: Turn = ctx.turn
        x = _latent_operands(q, kv, k_rope, turn, ctx.value)
        d_q, d_kv = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (q, kv))
        pieces = -(-kv.shape[2] // heads_at_once(q, kv))
        wide = torch.promote_types(q.dtype, torch.float32)
        shared = torch.empty(pieces, *k_rope.shape, dtype=wide, device=q.device)
        d_k, d_v = d_kv.split((kv.shape[3] - ctx.value, ctx.value), dim=3)
        _backward(grads[0], x, _Gradients(d_q, d_k, d_v, shared, turn.back), ctx.visible, ctx.scale, kept)
        return d_q, d_kv, shared.sum(dim=0).to(k_rope.dtype), None, None, None, None, None


def _latent_operands(q: Tensor, kv: Tensor, k_rope: Tensor, turn: Turn, value: int) -> _Operands:
    k, v = kv.split((kv.shape[3] - value, value), dim=3)
    return _Operands(q, k, v, k_rope, None if turned_in_place(q) else turn)


def turned_in_place(q: Tensor) -> bool:
    """Whether queries of this format are to be turned where they are before `latent_attention`: no rounding follows."""
    return q.dtype in (torch.float32, torch.float64)


def latent_attention(
    q: Tensor, kv: Tensor, k_rope: Tensor, visible: Visible, scale: float, turn: Turn, value: int
) -> Tensor:
    """`short_attention` of queries whose last r numbers `turn` turns, and keys that end with those of `k_rope`.

    Where `turned_in_place`, queries come as `turn.ends` left them, which autograd does not see; their gradients are in
    any case those of queries before it. q [B, S, H, n + r]; kv [B, S, H, n + value], a head's key, then its values;
    k_rope [B, S, r], turned already
    -> [B, S, H, value].
    """
    out: Tensor = _LatentAttention.apply(q, kv, k_rope, visible, scale, turn, value, torch.is_grad_enabled())
    return out
