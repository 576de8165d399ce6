"""Attention for a CPU: softmax(QK^T)V in blocks that stay in its cache, with log-sum-exp and its own backward.

A block of queries of one head meets a tile of keys: scores, softmax and their gradients are made, used and forgotten
while they are in the second-level cache, so memory grows with the length and not with its square. Forward keeps the
softmax's log-sum-exp, and backward makes the softmax again from that (Dao et al., arXiv 2205.14135). What a query may
see is told by places and documents (`ops.visible`), so the queries of one part of a sequence can meet the keys of
another, as context parallel ranks do. Rows of one tile have a shorter way, `ops.short_attention`.

Everything inside is fp32 (fp64 for fp64): many CPUs have no 16-bit products, and scores deserve the precision. Some
subtractions are done by the products: with one more number of each query and 1 of each key, scores arrive less any
number, which in backward is their log-sum-exp; likewise d_out and v give the softmax's gradient less its mean.

A softmax needs something near the greatest score only so that nothing overflows. Where each query sees itself that is
its score with its own key, known before any tile; sums tell when it was too small, and then, as wherever queries meet
the keys of others, the greatest score is sought tile by tile (Milakov and Gimelshein, arXiv 1805.02867).

A row is computed by itself in products of fixed shape, so its bits do not depend on the rows beside it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_engine.ops.attention_order import runs_of
from moe_engine.ops.attention_parts import Piece, Scratch, cut, for_pieces, hidden, length, rows_of
from moe_engine.ops.autocast import without_autocast
from moe_engine.ops.first_order import first_order
from moe_engine.ops.short_attention import is_short, short_attention
from moe_engine.ops.visible import Visible

FILL = 16  # columns added to queries and keys: one is used, the others keep rows on borders of cache lines
LOG2E, LN2 = math.log2(math.e), math.log(2)  # powers of 2: torch's exp is slow where results are 0 or nearly
LIMIT = 2.0**60  # of sums of powers; products of these with values do not overflow


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the visible keys, and the logarithm of the softmax's denominator.

    q [B, Sq, H, d], k [B, Sk, G, d], v [B, Sk, G, e] -> out [B, Sq, H, e] in `dtype` (None: v's), lse [B, Sq, H] in
    fp32 (fp64). G divides H: head g of keys and values serves query heads g H/G … (g+1) H/G - 1. A query without a
    visible key gives 0 and -inf. Not recorded by autograd. Of tensors without data (device `meta`) only sizes come.
    """
    (B, Sq, H, d), e = q.shape, v.shape[-1]
    out = torch.zeros(B, Sq, H, e, dtype=dtype or v.dtype, device=q.device)
    lse = torch.full((B, Sq, H), -math.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)

    def attend(scratch: Scratch, piece: Piece) -> None:
        k_, v_ = scratch.keys("k", k, piece, FILL), scratch.keys("v", v, piece)
        k_[..., d] = 1
        of_heads = -1, piece.group
        to, lse_to = (x[piece.row, :, piece.queries].unflatten(1, of_heads) for x in (out, lse))  # [Sq, heads, H/G, …]
        for run in scratch.once(piece, visible, lambda: _forward_runs(k_, v_, visible, piece, scratch)):
            q_, top = scratch.queries("q", q, piece, FILL, run.queries), run.top.squeeze(3)
            if visible.each_sees_itself:
                torch.linalg.vecdot(q_[..., :d], cut(k_, 1, run.queries)[:, :, None, :d], out=top)
                torch.neg(top, out=q_[..., d])
            _softmax(run, q_[..., d], scale * LOG2E, visible.each_sees_itself)
            logs = run.sums.log2().add_(run.top).mul_(LN2).squeeze(3)
            cut(lse_to, 0, run.queries).copy_(logs.transpose(0, 1))
            run.block.div_(run.sums.clamp_(min=torch.finfo(lse.dtype).tiny))  # about 1 or more where any key is seen
            cut(to, 0, run.queries).copy_(run.block.transpose(0, 1))

    for_pieces(attend, q, k, visible)
    return out, lse


class _ForwardStep(NamedTuple):
    """Views of the buffers that a step works on, the same for all pieces of a shape: made once a call."""

    q: Tensor  # [heads, rows, d + 1]
    k_t: Tensor  # [heads, d + 1, keys]
    v: Tensor  # [heads, keys, e]
    scores: Tensor  # [heads, rows, keys]
    edge: tuple[Tensor, Tensor] | None  # the part of the scores that a mask is added to, and the mask
    block: Tensor  # [heads, rows, e], as the next two a part of its run's
    sums: Tensor  # [heads, rows, 1]
    top: Tensor  # [heads, rows, 1]
    first: bool


class _ForwardRun(NamedTuple):
    """top: a number near each query's greatest score; block: sums of 2^(scores - top) v; sums: of 2^(scores - top)."""

    queries: slice
    block: Tensor  # [heads, queries, H/G, e]
    sums: Tensor  # [heads, queries, H/G, 1]
    top: Tensor  # [heads, queries, H/G, 1]
    steps: list[_ForwardStep]


def _forward_runs(k: Tensor, v: Tensor, visible: Visible, piece: Piece, scratch: Scratch) -> list[_ForwardRun]:
    """k [heads, Sk, d + FILL], v [heads, Sk, e], which are buffers."""
    (heads, _, wide), e, group = k.shape, v.shape[2], piece.group
    d = wide - FILL

    @cache
    def buffers(queries: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = heads, queries, group
        return scratch("block", (*shape, e)), scratch("sums", (*shape, 1)), scratch("top", (*shape, 1))

    @cache
    def of_rows(queries: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        part, (block, sums, top) = slice(start, stop), buffers(queries)
        q = rows_of(scratch("q", (heads, queries, group, wide)), part)[..., : d + 1]
        return q, rows_of(block, part), rows_of(sums, part), rows_of(top, part)

    @cache
    def of_keys(start: int, stop: int) -> tuple[Tensor, Tensor]:
        part = slice(start, stop)
        return cut(k, 1, part)[..., : d + 1].transpose(1, 2), cut(v, 1, part)

    found = []
    for queries, steps in runs_of(visible, piece.row, group):
        views = []
        for step in steps:
            rows = (place - queries.start for place in (step.queries.start, step.queries.stop))
            q, block, sums, top = of_rows(length(queries), *rows)
            scores = scratch.part("scores", (heads, q.shape[1], length(step.keys)))
            edge = hidden(scores, visible, piece.row, step, group)
            k_t, v_ = of_keys(step.keys.start, step.keys.stop)
            views.append(_ForwardStep(q, k_t, v_, scores, edge, block, sums, top, step.first))
        found.append(_ForwardRun(queries, *buffers(length(queries)), views))
    return found


def _softmax(run: _ForwardRun, column: Tensor, scale: float, own: bool) -> None:
    """Fill block and sums, and top, unless it is the queries' own scores: of products, not yet scaled.

    column [heads, queries, H/G]: the last number of queries, less which scores arrive. scale: of powers of 2.
    """
    if not own:
        _online(run, column, scale)
        return
    run.sums.zero_()
    for step in run.steps:
        _scores(step, scale)
        step.sums.add_(step.scores.exp2_().sum(dim=2, keepdim=True))
        step.block.baddbmm_(step.scores, step.v, beta=0 if step.first else 1)
    run.top.mul_(scale)
    if not run.sums.max().item() < LIMIT:  # or NaN
        results = run.block, run.sums, run.top
        right, found = run.sums < LIMIT, [x.clone() for x in results]
        _online(run, column, scale)
        for x, before in zip(results, found, strict=True):  # a query's bits do not depend on others that went wrong
            x.copy_(torch.where(right, before, x))


def _online(run: _ForwardRun, column: Tensor, scale: float) -> None:
    least = torch.finfo(run.top.dtype).min  # -inf - -inf is NaN
    run.sums.zero_()
    run.top.fill_(least)
    column.zero_()
    for step in run.steps:
        _scores(step, scale)
        top = step.scores.amax(dim=2, keepdim=True).clamp_(min=least)
        torch.maximum(top, step.top, out=top)
        if not step.first:
            shrink = step.top.sub_(top).exp2_()
            step.block.mul_(shrink)
            step.sums.mul_(shrink)
        step.top.copy_(top)
        step.sums.add_(step.scores.sub_(top).exp2_().sum(dim=2, keepdim=True))
        step.block.baddbmm_(step.scores, step.v, beta=0 if step.first else 1)


def _scores(step: _ForwardStep, scale: float) -> None:
    step.scores.baddbmm_(step.q, step.k_t, beta=0, alpha=scale)
    if step.edge is not None:
        step.edge[0].add_(step.edge[1])


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
    d_k, d_v = (torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device) for x in (k, v))
    d_q = torch.zeros(q.shape, dtype=dtype or q.dtype, device=q.device)  # of queries that see nothing

    def attend(scratch: Scratch, piece: Piece) -> None:
        k_, v_ = scratch.keys("k", k, piece, FILL), scratch.keys("v", v, piece, FILL)
        k_[..., d], v_[..., e] = 1, 1
        d_k_, d_v_ = scratch("d_k", (*k_.shape[:2], d)).zero_(), scratch("d_v", (*v_.shape[:2], e)).zero_()
        operands = k_, v_, d_k_, d_v_
        to = d_q[piece.row, :, piece.queries].unflatten(1, (-1, piece.group))
        for run in scratch.once(piece, visible, lambda: _backward_runs(operands, visible, piece, scratch)):
            q_, d_out_ = (scratch.queries(*x, piece, FILL, run.queries) for x in (("q", q), ("d_out", d_out)))
            mean = scratch.queries("out", out, piece, part=run.queries).mul_(d_out_[..., :e]).sum(dim=-1)
            log_sums = scratch.queries("lse", lse.unsqueeze(-1), piece, part=run.queries).squeeze(-1)
            torch.neg(mean, out=d_out_[..., e])
            torch.div(log_sums.masked_fill_(log_sums == -math.inf, 0), -scale, out=q_[..., d])
            for step in run.steps:
                step.p.baddbmm_(step.q_wide, step.k_t, beta=0, alpha=scale * LOG2E)
                if step.edge is not None:
                    step.edge[0].add_(step.edge[1])
                step.p.exp2_()
                step.d_v.baddbmm_(step.p_t, step.d_out)
                step.d_scores.baddbmm_(step.d_out_wide, step.v_t, beta=0).mul_(step.p)
                step.d_k.baddbmm_(step.d_scores_t, step.q, alpha=scale)
                step.d_q.baddbmm_(step.d_scores, step.k, alpha=scale, beta=0 if step.first else 1)
            cut(to, 0, run.queries).copy_(run.d_q.transpose(0, 1))
        d_k[piece.row, :, piece.heads], d_v[piece.row, :, piece.heads] = d_k_.transpose(0, 1), d_v_.transpose(0, 1)

    for_pieces(attend, q, k, visible)
    return d_q, d_k, d_v


class _BackwardStep(NamedTuple):
    """As `_ForwardStep`. Operands with one more number are wide."""

    q: Tensor  # [heads, rows, d]
    q_wide: Tensor
    d_out: Tensor  # [heads, rows, e]
    d_out_wide: Tensor
    d_q: Tensor  # [heads, rows, d]
    k: Tensor  # [heads, keys, d]
    k_t: Tensor  # [heads, d + 1, keys]
    v_t: Tensor  # [heads, e + 1, keys]
    d_k: Tensor  # [heads, keys, d]
    d_v: Tensor  # [heads, keys, e]
    p: Tensor  # [heads, rows, keys]
    p_t: Tensor
    d_scores: Tensor  # [heads, rows, keys]
    d_scores_t: Tensor
    edge: tuple[Tensor, Tensor] | None
    first: bool


class _BackwardRun(NamedTuple):
    queries: slice
    d_q: Tensor  # [heads, queries, H/G, d]
    steps: list[_BackwardStep]


def _backward_runs(
    operands: tuple[Tensor, ...], visible: Visible, piece: Piece, scratch: Scratch
) -> list[_BackwardRun]:
    """operands k and v, with FILL more columns, and gradients of both, which are buffers."""
    k, v, d_k, d_v = operands
    heads, group, d, e = k.shape[0], piece.group, d_k.shape[2], d_v.shape[2]

    @cache
    def of_rows(queries: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        shapes = (("q", d + FILL), ("d_out", e + FILL), ("d_q", d))
        q, d_out, d_q = (
            rows_of(scratch(name, (heads, queries, group, size)), slice(start, stop)) for name, size in shapes
        )
        return q[..., :d], q[..., : d + 1], d_out[..., :e], d_out[..., : e + 1], d_q

    @cache
    def of_keys(start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        k_, v_, d_k_, d_v_ = (cut(x, 1, slice(start, stop)) for x in operands)
        return k_[..., :d], k_[..., : d + 1].transpose(1, 2), v_[..., : e + 1].transpose(1, 2), d_k_, d_v_

    found = []
    for queries, steps in runs_of(visible, piece.row, group):
        views = []
        for step in steps:
            rows = (place - queries.start for place in (step.queries.start, step.queries.stop))
            of_queries, of_tile = of_rows(length(queries), *rows), of_keys(step.keys.start, step.keys.stop)
            shape = heads, of_queries[0].shape[1], length(step.keys)
            p, d_scores = scratch.part("scores", shape), scratch.part("d_scores", shape)
            scores = p, p.transpose(1, 2), d_scores, d_scores.transpose(1, 2)
            edge = hidden(p, visible, piece.row, step, group)
            views.append(_BackwardStep(*of_queries, *of_tile, *scores, edge, step.first))
        found.append(_BackwardRun(queries, scratch("d_q", (heads, length(queries), group, d)), views))
    return found


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
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        return *attention_backward(grads[0], q, k, v, out, lse, ctx.visible, ctx.scale), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> Tensor:
    """The first result of `attention_forward` under autograd."""
    if is_short(q.device, visible):
        return short_attention(q, k, v, visible, scale)
    out: Tensor = _Attention.apply(q, k, v, visible, scale)
    return out
