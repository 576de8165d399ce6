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
from typing import Any

import torch
from torch import Tensor

from moe_engine.ops.attention_parts import Piece, Scratch, cut, for_pieces, heads_at_once, hide, rows_of
from moe_engine.ops.autocast import without_autocast
from moe_engine.ops.rotary import Turn
from moe_engine.ops.visible import KEY_TILE, Visible

KEPT_KEYS = KEY_TILE  # for more keys than this the softmax is not kept


def is_short(device: torch.device, visible: Visible) -> bool:
    """Whether this way is open."""
    return device.type == "cpu" and visible.each_sees_itself and visible.k_places.numel() <= KEPT_KEYS


@dataclass(frozen=True)
class _Operands:
    """q [B, S, H, d], v [B, S, G, e], and keys k [B, S, G, d], or [B, S, G, d - r] and `shared` [B, S, r], their last r
    numbers. turn: what is still to be done to queries.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    shared: Tensor | None
    turn: Turn | None

    def queries(self, scratch: Scratch, piece: Piece) -> Tensor:
        """[heads, S, H/G, d]."""
        wide = scratch.queries("q", self.q, piece)
        if self.turn is not None:
            self.turn.end(wide, piece.row)
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

    def put_queries(self, d_q: Tensor, piece: Piece) -> None:
        """d_q [heads, S, H/G, d] is used up."""
        if self.turn is not None:
            self.turn.end(d_q, piece.row)
        self.q[piece.row, :, piece.queries].unflatten(1, (-1, piece.group)).copy_(d_q.transpose(0, 1))

    def put_keys_values(self, d_k: Tensor, d_v: Tensor, piece: Piece) -> None:
        """[heads, S, d] and [heads, S, e]."""
        own = self.k.shape[3]
        self.k[piece.row, :, piece.heads] = d_k[..., :own].transpose(0, 1)
        self.v[piece.row, :, piece.heads] = d_v.transpose(0, 1)
        if self.shared is not None:
            torch.sum(d_k[..., own:], dim=0, out=self.shared[piece.number, piece.row])


# The softmax of a few heads and a block of queries, [heads, rows, keys], by (row, first key head, first query).
_Kept = dict[tuple[int, int, int], Tensor]


def _forward(x: _Operands, visible: Visible, scale: float, kept: _Kept | None) -> Tensor:
    """Out [B, S, H, e] in v's dtype; `kept` is filled for `_backward`."""
    out = torch.empty(*x.q.shape[:3], x.v.shape[3], dtype=x.v.dtype, device=x.q.device)

    def attend(scratch: Scratch, piece: Piece) -> None:
        q, k_t, v = x.queries(scratch, piece), x.keys(scratch, piece).transpose(1, 2), scratch.keys("v", x.v, piece)
        to = out[piece.row, :, piece.queries].unflatten(1, (-1, piece.group))  # [S, heads, H/G, e]
        for step in visible.steps_of(piece.row):
            scores = scratch.product("scores", rows_of(q, step.queries), cut(k_t, 2, step.keys), scale)
            hide(scores, visible, piece.row, step, piece.group)
            softmax = scores.softmax(dim=2)
            block = scratch.product("block", softmax, cut(v, 1, step.keys))
            cut(to, 0, step.queries).copy_(block.unflatten(1, (-1, piece.group)).transpose(0, 1))
            if kept is not None:
                kept[piece.row, piece.heads.start, step.queries.start] = softmax

    for_pieces(attend, x.q, x.k, visible)
    return out


def _backward(d_out: Tensor, x: _Operands, to: _Gradients, visible: Visible, scale: float, kept: _Kept) -> None:
    def attend(scratch: Scratch, piece: Piece) -> None:
        q, k, v = x.queries(scratch, piece), x.keys(scratch, piece), scratch.keys("v", x.v, piece)
        d_rows, v_t = scratch.queries("d_out", d_out, piece), v.transpose(1, 2)
        d_q, d_k, d_v = scratch("d_q", q.shape), scratch("d_k", k.shape), scratch("d_v", v.shape)
        # The last queries first: they mostly see all keys, and what is then set need not be zero before.
        steps = visible.steps_of(piece.row)[::-1]
        add = 0 if steps and steps[0].keys == slice(0, k.shape[1]) else 1
        if add:
            d_k.zero_()
            d_v.zero_()
        for step in steps:
            softmax = kept[piece.row, piece.heads.start, step.queries.start]
            q_block, d_block = rows_of(q, step.queries), rows_of(d_rows, step.queries)
            cut(d_v, 1, step.keys).baddbmm_(softmax.transpose(1, 2), d_block, beta=add)
            d_softmax = scratch.product("d_softmax", d_block, cut(v_t, 2, step.keys))
            d_scores = torch._softmax_backward_data(d_softmax, softmax, 2, softmax.dtype)
            cut(d_k, 1, step.keys).baddbmm_(d_scores.transpose(1, 2), q_block, beta=add, alpha=scale)
            rows_of(d_q, step.queries).baddbmm_(d_scores, cut(k, 1, step.keys), beta=0, alpha=scale)
            add = 1
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
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> Tensor:
        kept: _Kept | None = {} if any(ctx.needs_input_grad) else None
        out = _forward(_Operands(q, k, v, None, None), visible, scale, kept)
        _save(ctx, (q, k, v), kept)
        ctx.visible, ctx.scale = visible, scale
        return out

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (q, k, v), kept = _saved(ctx, 3)
        d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        x, to = _Operands(q, k, v, None, None), _Gradients(d_q, d_k, d_v, None, None)
        _backward(grads[0], x, to, ctx.visible, ctx.scale, kept)
        return d_q, d_k, d_v, None, None


def short_attention(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> Tensor:
    """softmax(scale * q k^T) v over the visible keys, where `is_short`: q [B, S, H, d], k [B, S, G, d], v [B, S, G, e]
    -> [B, S, H, e], in v's dtype. Head g of keys and values serves query heads g H/G … (g+1) H/G - 1.
    """
    out: Tensor = _ShortAttention.apply(q, k, v, visible, scale)
    return out


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, k_rope: Tensor, visible: Visible, scale: float, turn: Turn, value: int
    ) -> Tensor:
        kept: _Kept | None = {} if any(ctx.needs_input_grad) else None
        out = _forward(_latent_operands(q, kv, k_rope, turn, value), visible, scale, kept)
        _save(ctx, (q, kv, k_rope), kept)
        ctx.visible, ctx.scale, ctx.turn, ctx.value = visible, scale, turn, value
        return out

    @staticmethod
    @without_autocast
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
        return d_q, d_kv, shared.sum(dim=0).to(k_rope.dtype), None, None, None, None


def _latent_operands(q: Tensor, kv: Tensor, k_rope: Tensor, turn: Turn, value: int) -> _Operands:
    k, v = kv.split((kv.shape[3] - value, value), dim=3)
    return _Operands(q, k, v, k_rope, turn)


def latent_attention(
    q: Tensor, kv: Tensor, k_rope: Tensor, visible: Visible, scale: float, turn: Turn, value: int
) -> Tensor:
    """`short_attention` of queries whose last r numbers `turn` turns, and keys that end with those of `k_rope`.

    q [B, S, H, n + r]; kv [B, S, H, n + value], a head's key, then its values; k_rope [B, S, r], turned already
    -> [B, S, H, value]. Turned queries are not rounded to q's dtype.
    """
    out: Tensor = _LatentAttention.apply(q, kv, k_rope, visible, scale, turn, value)
    return out
