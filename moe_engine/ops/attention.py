"""Attention for a CPU: softmax(QK^T)V in blocks that stay in its cache, with log-sum-exp and its own backward.

For a few heads of one row at a time, a block of queries meets a tile of keys: scores, softmax and their gradients are
made, used and forgotten while they are in the second-level cache, so memory grows with the length and not with its
square. Forward takes the softmax online (Milakov and Gimelshein, arXiv 1805.02867) and keeps its log-sum-exp; backward
makes it again from that (Dao et al., arXiv 2205.14135). What a query may see is told by places and documents
(`ops.visible`), so the queries of one part of a sequence can meet the keys of another, as context parallel ranks do.
Rows of one tile have a shorter way, `ops.short_attention`.

Everything inside is fp32 (fp64 for fp64): many CPUs have no 16-bit products, and scores deserve the precision. Two
subtractions of backward are done by its products: with -log-sum-exp as one more number of each query and 1 of each
key, scores arrive as the logarithm of the softmax; likewise d_out and v give the softmax's gradient less its mean.

A row is computed by itself in products of fixed shape, so its bits do not depend on the rows beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_engine.ops.attention_parts import Piece, Scratch, cut, for_pieces, hide, rows_of
from moe_engine.ops.autocast import without_autocast
from moe_engine.ops.short_attention import is_short, short_attention
from moe_engine.ops.visible import KEY_TILE, Step, Visible

FILL = 4  # columns added to queries and keys in backward: one is used, the others keep the width a multiple of 4


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the visible keys, and the logarithm of the softmax's denominator.

    q [B, Sq, H, d], k [B, Sk, G, d], v [B, Sk, G, e] -> out [B, Sq, H, e] in `dtype` (None: v's), lse [B, Sq, H] in
    fp32 (fp64). G divides H: head g of keys and values serves query heads g H/G … (g+1) H/G - 1. A query without a
    visible key gives 0 and -inf. Not recorded by autograd. Of tensors without data (device `meta`) only sizes come.
    """
    (B, Sq, H, _), e = q.shape, v.shape[-1]
    out = torch.zeros(B, Sq, H, e, dtype=dtype or v.dtype, device=q.device)
    lse = torch.full((B, Sq, H), -math.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)

    def attend(scratch: Scratch, piece: Piece) -> None:
        q_ = scratch.queries("q", q, piece)
        k_t, v_ = scratch.keys("k", k, piece).transpose(1, 2), scratch.keys("v", v, piece)
        heads, group = (-1, piece.group), piece.group
        to, lse_to = (x[piece.row, :, piece.queries].unflatten(1, heads) for x in (out, lse))  # [Sq, heads, H/G, …]
        for rows, steps in itertools.groupby(visible.steps_of(piece.row), key=lambda step: step.queries):
            block, sums, top = _online(rows_of(q_, rows), k_t, v_, visible, piece, scratch, steps, scale)
            block.div_(sums.clamp(min=1))  # as it is where any key is seen: the greatest score's own is 1
            cut(to, 0, rows).copy_(block.unflatten(1, (-1, group)).transpose(0, 1))
            cut(lse_to, 0, rows).copy_(top.add_(sums.log_()).squeeze(2).unflatten(1, (-1, group)).transpose(0, 1))

    for_pieces(attend, q, k, visible)
    return out, lse


def _online(
    q: Tensor,
    k_t: Tensor,
    v: Tensor,
    visible: Visible,
    piece: Piece,
    scratch: Scratch,
    steps: Iterator[Step],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the tiles of the steps: q [heads, R, d], k_t [heads, d, Sk], v [heads, Sk, e].

    Returns exp(scores - top) v [heads, R, e], the sums of exp(scores - top), and top, the greatest score [heads, R, 1].
    """
    found: tuple[Tensor, Tensor, Tensor] | None = None
    for step in steps:
        scores = scratch.product("scores", q, cut(k_t, 2, step.keys), scale)
        hide(scores, visible, piece.row, step, piece.group)
        top = scores.amax(dim=2, keepdim=True).clamp_(min=torch.finfo(q.dtype).min)  # finite: -inf - -inf is NaN
        if found is not None:
            torch.maximum(top, found[2], out=top)
        weights = scores.sub_(top).exp_()
        added = weights.sum(dim=2, keepdim=True)
        if found is None:
            found = scratch.product("block", weights, cut(v, 1, step.keys)), added, top
        else:
            block, sums, last_top = found
            shrink = last_top.sub_(top).exp_()
            block.mul_(shrink).baddbmm_(weights, cut(v, 1, step.keys))
            found = block, sums.mul_(shrink).add_(added), top
    assert found is not None
    return found


def attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: Visible,
    scale: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through `attention_forward`, in `dtype` (None: each tensor's own).

    out [B, Sq, H, e] and lse [B, Sq, H] may be those of more keys than k has here: then the results are the share of
    these keys, and shares add up.
    """
    d, e = q.shape[3], v.shape[3]
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device) for x in (q, k, v))

    def attend(scratch: Scratch, piece: Piece) -> None:
        d_out_, q_ = scratch.queries("d_out", d_out, piece, FILL), scratch.queries("q", q, piece, FILL)
        k_, v_ = scratch.keys("k", k, piece, FILL), scratch.keys("v", v, piece, FILL)
        mean = scratch.queries("out", out, piece).mul_(d_out_[..., :e]).sum(dim=-1)
        log_sums = scratch.queries("lse", lse.unsqueeze(-1), piece).squeeze(-1)
        d_out_[..., e] = mean.neg_()
        q_[..., d] = log_sums.masked_fill_(log_sums == -math.inf, 0).div_(-scale)
        k_[..., d], v_[..., e] = 1, 1
        d_q_ = scratch("d_q", (*q_.shape[:-1], d)).zero_()
        d_k_, d_v_ = scratch("d_k", (*k_.shape[:-1], d)).zero_(), scratch("d_v", (*v_.shape[:-1], e)).zero_()
        plain_k, k_t, v_t = k_[..., :d], k_.transpose(1, 2), v_.transpose(1, 2)
        # Tile by tile, so that the gradients of a tile's keys stay in the cache.
        for step in sorted(visible.steps_of(piece.row), key=lambda step: step.keys.start // KEY_TILE):
            q_rows, d_rows = rows_of(q_, step.queries), rows_of(d_out_, step.queries)
            p = scratch.product("scores", q_rows, cut(k_t, 2, step.keys), scale)
            hide(p, visible, piece.row, step, piece.group)
            p.exp_()
            cut(d_v_, 1, step.keys).baddbmm_(p.transpose(1, 2), d_rows[..., :e])
            d_scores = scratch.product("d_scores", d_rows, cut(v_t, 2, step.keys)).mul_(p)
            cut(d_k_, 1, step.keys).baddbmm_(d_scores.transpose(1, 2), q_rows[..., :d], alpha=scale)
            rows_of(d_q_, step.queries).baddbmm_(d_scores, cut(plain_k, 1, step.keys), alpha=scale)
        d_q[piece.row, :, piece.queries].unflatten(1, (-1, piece.group)).copy_(d_q_.transpose(0, 1))
        d_k[piece.row, :, piece.heads], d_v[piece.row, :, piece.heads] = d_k_.transpose(0, 1), d_v_.transpose(0, 1)

    for_pieces(attend, q, k, visible)
    return d_q, d_k, d_v


class _Attention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> Tensor:
        out, lse = attention_forward(q, k, v, visible, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.visible, ctx.scale = visible, scale
        return out

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        return *attention_backward(grads[0], q, k, v, out, lse, ctx.visible, ctx.scale), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> Tensor:
    """The first result of `attention_forward` under autograd."""
    if is_short(q.device, visible):
        return short_attention(q, k, v, visible, scale)
    out: Tensor = _Attention.apply(q, k, v, visible, scale)
    return out
