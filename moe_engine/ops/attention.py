"""Attention for a CPU: softmax(QK^T)V in blocks that stay in its cache, with log-sum-exp and its own backward.

A block of queries of one head meets a tile of keys: scores, softmax and their gradients are made, used and forgotten
while they are in the second-level cache, so memory grows with the length and not with its square. Forward keeps the
softmax's log-sum-exp, and backward makes the softmax again from that (Dao et al., arXiv 2205.14135). What a query may see is
told by places and documents (`ops.visible`), so the queries of one part of a sequence can meet the keys of another, as
context parallel ranks do. Rows of one tile have a shorter way, `ops.short_attention`.

Everything inside is fp32 (fp64 for fp64): many CPUs have no 16-bit products, and scores deserve the precision. What can
be is done by the products: with one more number of each query and 1 of each key, scores arrive less any number, which in
backward is their log-sum-exp; likewise d_out and v give the softmax's gradient less its mean.

A softmax needs something near the greatest score only so that nothing overflows. Where each query sees itself that is
its score with its own key, known before any block; sums tell when it was too small, and then, as wherever queries meet the
keys of others, the greatest score is sought tile by tile (Milakov and Gimelshein, arXiv 1805.02867).

A row is computed by itself in products of fixed shape, so its bits do not depend on the rows beside it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_engine.ops.attention_order import backward_steps, forward_runs
from moe_engine.ops.attention_parts import Piece, Scratch, Views, cut, for_pieces, hidden, length, rows_of, size
from moe_engine.ops.autocast import without_autocast
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
        q_, k_ = scratch.queries("q", q, piece, FILL), scratch.keys("k", k, piece, FILL)
        v_ = scratch.keys("v", v, piece)
        own, sums, top = (scratch(name, q_.shape[:3]) for name in ("own", "sums", "top"))
        if visible.each_sees_itself:
            torch.linalg.vecdot(q_[..., :d], k_[:, :, None, :d], out=own)
        torch.mul(own, scale * LOG2E, out=top)
        k_[..., d], q_[..., d] = 1, own.neg_()
        sums.zero_()
        of_heads = -1, piece.group
        to, lse_to = (x[piece.row, :, piece.queries].unflatten(1, of_heads) for x in (out, lse))  # [Sq, heads, H/G, …]
        for run in scratch.once(piece, visible, lambda: _forward_runs(q_, k_, v_, d, visible, piece, scratch)):
            _softmax(run, scale * LOG2E, visible.each_sees_itself)
            block = run.block.div_(run.sums.clamp(min=1))  # as they are where any key is seen: own less own gave 1
            cut(to, 0, run.queries).copy_(block.unflatten(1, of_heads).transpose(0, 1))
        lse_to.copy_(top.add_(sums.log2_()).mul_(LN2).transpose(0, 1))

    for_pieces(attend, q, k, visible)
    return out, lse


class _ForwardStep(NamedTuple):
    """Views of the buffers that a step works on, the same for all pieces of a shape: made once a call."""

    q: Tensor  # [heads, rows, d + 1]
    k_t: Tensor  # [heads, d + 1, keys]
    v: Tensor  # [heads, keys, e]
    scores: Tensor  # [heads, rows, keys]
    edge: tuple[Tensor, Tensor] | None  # the part of the scores that a mask is added to, and the mask
    block: Tensor  # [heads, rows, e], and likewise the step's rows of what `_ForwardRun` has
    sums: Tensor
    top: Tensor
    first: bool


class _ForwardRun(NamedTuple):
    """As much of the queries' rows.

    column: the last number of queries, less which scores arrive; block: sums of 2^(scores - top) v; sums: of
    2^(scores - top); top: a number near the greatest score. Scores are powers of 2.
    """

    queries: slice
    column: Tensor  # [heads, queries, H/G]
    block: Tensor  # [heads, R, e]
    sums: Tensor  # [heads, R, 1]
    top: Tensor  # [heads, R, 1]
    steps: list[_ForwardStep]


def _forward_runs(
    q: Tensor, k: Tensor, v: Tensor, d: int, visible: Visible, piece: Piece, scratch: Scratch
) -> list[_ForwardRun]:
    """q [heads, Sq, H/G, d + FILL], k [heads, Sk, d + FILL], v [heads, Sk, e], which are buffers."""
    runs = forward_runs(visible, piece.row, piece.group)
    heads, group, e = q.shape[0], piece.group, v.shape[2]
    sums, top = (scratch(name, q.shape[:3]).unsqueeze(3) for name in ("sums", "top"))
    scratch.reserve("scores", heads * group * max((size(step) for run in runs for step in run.steps), default=0))
    scratch.reserve("block", heads * group * e * max((length(run.queries) for run in runs), default=0))
    q_of = Views(lambda part: rows_of(q, part)[..., : d + 1])
    k_t_of = Views(lambda part: cut(k, 1, part)[..., : d + 1].transpose(1, 2))
    v_of = Views(lambda part: cut(v, 1, part))
    sums_of, top_of = Views(lambda part: rows_of(sums, part)), Views(lambda part: rows_of(top, part))
    found = []
    for run in runs:
        block = scratch.part("block", (heads, length(run.queries), group, e))
        steps = []
        for step in run.steps:
            rows, keys = step.queries, step.keys
            scores = scratch.part("scores", (heads, length(rows) * group, length(keys)))
            edge = hidden(scores, visible, piece.row, step, group)
            part = rows_of(block, slice(rows.start - run.queries.start, rows.stop - run.queries.start))
            of_step = part, sums_of(rows), top_of(rows)
            steps.append(_ForwardStep(q_of(rows), k_t_of(keys), v_of(keys), scores, edge, *of_step, step.first))
        rows = run.queries
        column = cut(q, 1, rows)[..., d]
        found.append(_ForwardRun(rows, column, block.flatten(1, 2), sums_of(rows), top_of(rows), steps))
    return found


def _softmax(run: _ForwardRun, scale: float, own: bool) -> None:
    """Fill block and sums, which are 0 before, and top, unless it is the queries' own scores."""
    if own:
        for step in run.steps:
            step.scores.baddbmm_(step.q, step.k_t, beta=0, alpha=scale)
            if step.edge is not None:
                step.edge[0].add_(step.edge[1])
            step.sums.add_(step.scores.exp2_().sum(dim=2, keepdim=True))
            step.block.baddbmm_(step.scores, step.v, beta=0 if step.first else 1)
        if run.sums.max().item() < LIMIT:  # false for NaN
            return
        run.sums.zero_()
        run.column.zero_()
    least = torch.finfo(run.top.dtype).min  # -inf - -inf is NaN
    run.top.fill_(least)
    for step in run.steps:
        step.scores.baddbmm_(step.q, step.k_t, beta=0, alpha=scale)
        if step.edge is not None:
            step.edge[0].add_(step.edge[1])
        top = step.scores.amax(dim=2, keepdim=True).clamp_(min=least)
        torch.maximum(top, step.top, out=top)
        if not step.first:
            shrink = step.top.sub_(top).exp2_()
            step.block.mul_(shrink)
            step.sums.mul_(shrink)
        step.top.copy_(top)
        step.sums.add_(step.scores.sub_(top).exp2_().sum(dim=2, keepdim=True))
        step.block.baddbmm_(step.scores, step.v, beta=0 if step.first else 1)


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
        operands = q_, k_, v_, d_out_
        d_q_, d_k_, d_v_ = (
            scratch(f"d_{name}", (*x.shape[:-1], size)).zero_()
            for name, x, size in (("q", q_, d), ("k", k_, d), ("v", v_, e))
        )
        gradients = d_q_, d_k_, d_v_
        for step in scratch.once(piece, visible, lambda: _backward_steps(operands, gradients, visible, piece, scratch)):
            step.p.baddbmm_(step.q_wide, step.k_t, beta=0, alpha=scale * LOG2E)
            if step.edge is not None:
                step.edge[0].add_(step.edge[1])
            step.p.exp2_()
            step.d_v.baddbmm_(step.p_t, step.d_out)
            step.d_scores.baddbmm_(step.d_out_wide, step.v_t, beta=0).mul_(step.p)
            step.d_k.baddbmm_(step.d_scores_t, step.q, alpha=scale)
            step.d_q.baddbmm_(step.d_scores, step.k, alpha=scale)
        d_q[piece.row, :, piece.queries].unflatten(1, (-1, piece.group)).copy_(d_q_.transpose(0, 1))
        d_k[piece.row, :, piece.heads], d_v[piece.row, :, piece.heads] = d_k_.transpose(0, 1), d_v_.transpose(0, 1)

    for_pieces(attend, q, k, visible)
    return d_q, d_k, d_v


class _BackwardStep(NamedTuple):
    """As `_ForwardStep`. Operands with one more number are wide."""

    q: Tensor  # [heads, rows, d]
    q_wide: Tensor
    k: Tensor  # [heads, keys, d]
    k_t: Tensor  # [heads, d + 1, keys]
    v_t: Tensor  # [heads, e + 1, keys]
    d_out: Tensor  # [heads, rows, e]
    d_out_wide: Tensor
    d_q: Tensor  # [heads, rows, d]
    d_k: Tensor  # [heads, keys, d]
    d_v: Tensor  # [heads, keys, e]
    p: Tensor  # [heads, rows, keys]
    p_t: Tensor
    d_scores: Tensor  # [heads, rows, keys]
    d_scores_t: Tensor
    edge: tuple[Tensor, Tensor] | None


def _backward_steps(
    operands: tuple[Tensor, ...], gradients: tuple[Tensor, ...], visible: Visible, piece: Piece, scratch: Scratch
) -> list[_BackwardStep]:
    """operands q, k, v, d_out, with FILL more columns, and gradients of q, k, v, which are buffers."""
    q, k, v, d_out = operands
    d_q, d_k, d_v = gradients
    heads, group, d, e = q.shape[0], piece.group, d_q.shape[-1], d_v.shape[-1]
    order = backward_steps(visible, piece.row, group)
    for name in ("scores", "d_scores"):
        scratch.reserve(name, heads * group * max((size(step) for step in order), default=0))

    def of_queries(part: slice) -> tuple[Tensor, ...]:
        q_, d_out_ = rows_of(q, part), rows_of(d_out, part)
        return q_[..., :d], q_[..., : d + 1], d_out_[..., :e], d_out_[..., : e + 1], rows_of(d_q, part)

    def of_keys(part: slice) -> tuple[Tensor, ...]:
        k_, v_ = cut(k, 1, part), cut(v, 1, part)
        transposed = (x.transpose(1, 2) for x in (k_[..., : d + 1], v_[..., : e + 1]))
        return k_[..., :d], *transposed, cut(d_k, 1, part), cut(d_v, 1, part)

    queries_of, keys_of = Views(of_queries), Views(of_keys)
    found = []
    for step in order:
        q_, q_wide, d_out_, d_out_wide, d_q_ = queries_of(step.queries)
        k_, k_t, v_t, d_k_, d_v_ = keys_of(step.keys)
        shape = heads, length(step.queries) * group, length(step.keys)
        p, d_scores = scratch.part("scores", shape), scratch.part("d_scores", shape)
        views = (q_, q_wide, k_, k_t, v_t, d_out_, d_out_wide, d_q_, d_k_, d_v_)
        edge = hidden(p, visible, piece.row, step, group)
        found.append(_BackwardStep(*views, p, p.transpose(1, 2), d_scores, d_scores.transpose(1, 2), edge))
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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        return *attention_backward(grads[0], q, k, v, out, lse, ctx.visible, ctx.scale), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> Tensor:
    """The first result of `attention_forward` under autograd."""
    if is_short(q.device, visible):
        return short_attention(q, k, v, visible, scale)
    out: Tensor = _Attention.apply(q, k, v, visible, scale)
    return out
