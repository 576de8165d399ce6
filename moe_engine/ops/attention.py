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

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_engine.ops.attention_order import Run, backward_steps, forward_runs
from moe_engine.ops.attention_parts import Piece, Scratch, cut, for_pieces, hide, rows_of
from moe_engine.ops.autocast import without_autocast
from moe_engine.ops.short_attention import is_short, short_attention
from moe_engine.ops.visible import Visible

FILL = 16  # columns added to queries and keys: one is used, the others keep rows on borders of cache lines
LOG2E, LN2 = math.log2(math.e), math.log(2)
LIMIT = 2.0**60  # of sums: a greatest score is known well enough


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
        k_[..., d] = 1
        operands = _Operands(q_, k_, scratch.keys("v", v, piece), d, scale * LOG2E)
        heads, group = (-1, piece.group), piece.group
        to, lse_to = (x[piece.row, :, piece.queries].unflatten(1, heads) for x in (out, lse))  # [Sq, heads, H/G, …]
        for run in forward_runs(visible, piece.row, group):
            block, sums, top = _softmax(operands, visible, piece, scratch, run)
            lse_ = top.add_(sums.log2()).mul_(LN2).squeeze(2)
            cut(lse_to, 0, run.queries).copy_(lse_.unflatten(1, (-1, group)).transpose(0, 1))
            sums.clamp_(min=1)  # as it is where any key is seen: a score less itself gave 1
            block, sums = (x.unflatten(1, (-1, group)).transpose(0, 1) for x in (block, sums))
            torch.div(block, sums, out=cut(to, 0, run.queries))

    for_pieces(attend, q, k, visible)
    return out, lse


class _Operands(NamedTuple):
    """q [heads, Sq, H/G, d + FILL], of which column d belongs to `_online`, k [heads, Sk, d + FILL] with 1 in column d,
    v [heads, Sk, e]. scale: of scores as powers of 2.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    d: int
    scale: float


def _softmax(
    x: _Operands, visible: Visible, piece: Piece, scratch: Scratch, run: Run
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax of a run's queries, in powers of 2.

    Returns 2^(scores - top) v [heads, R, e], the sums of 2^(scores - top) [heads, R, 1], and top [heads, R, 1], the
    greatest score or one near enough to it.
    """
    found = _online(x, visible, piece, scratch, run, trusting=True)
    if any(step.known for step in run.steps) and not found[1].max().item() < LIMIT:
        found = _online(x, visible, piece, scratch, run, trusting=False)
    return found


def _online(
    x: _Operands, visible: Visible, piece: Piece, scratch: Scratch, run: Run, trusting: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_softmax`. trusting: where a step's top is known, no greater one is sought; sums beyond LIMIT, or NaN, tell
    when one should have been.
    """
    heads, R = x.q.shape[0], (run.queries.stop - run.queries.start) * piece.group
    shapes = {"block": (heads, R, x.v.shape[2]), "sums": (heads, R, 1), "top": (heads, R, 1)}
    whole = [scratch.part(name, shape) for name, shape in shapes.items()]
    for step in run.steps:
        start, stop = ((place - run.queries.start) * piece.group for place in (step.queries.start, step.queries.stop))
        block, sums, top = (each.narrow(1, start, stop - start) for each in whole)
        q, v, known = rows_of(x.q, step.queries), cut(x.v, 1, step.keys), step.known and trusting
        width = x.d + 1 if known else x.d  # with -top as one more number, scores arrive less top
        k_t = cut(x.k, 1, step.keys)[..., :width].transpose(1, 2)
        scores = scratch.product("scores", q[..., :width], k_t, x.scale)
        hide(scores, visible, piece.row, step, piece.group)
        if not known:
            greatest = scores.amax(dim=2, keepdim=True).clamp_(min=torch.finfo(q.dtype).min)  # -inf - -inf is NaN
            if not step.first:
                torch.maximum(greatest, top, out=greatest)
                shrink = top.sub_(greatest).exp2_()
                block.mul_(shrink)
                sums.mul_(shrink)
            top.copy_(greatest)
            scores.sub_(greatest)
            torch.div(greatest.squeeze(2), -x.scale, out=q[..., x.d])
        weights = scores.exp2_()
        added = weights.sum(dim=2, keepdim=True)
        block.baddbmm_(weights, v, beta=0 if step.first else 1)
        if step.first:
            sums.copy_(added)
        else:
            sums.add_(added)
    return whole[0], whole[1], whole[2]


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
        plain_k = k_[..., :d]
        for step in backward_steps(visible, piece.row, piece.group):
            q_rows, d_rows = rows_of(q_, step.queries), rows_of(d_out_, step.queries)
            k_t, v_t = (cut(x, 1, step.keys).transpose(1, 2) for x in (k_[..., : d + 1], v_[..., : e + 1]))
            p = scratch.product("scores", q_rows[..., : d + 1], k_t, scale * LOG2E)
            hide(p, visible, piece.row, step, piece.group)
            p.exp2_()
            cut(d_v_, 1, step.keys).baddbmm_(p.transpose(1, 2), d_rows[..., :e])
            d_scores = scratch.product("d_scores", d_rows[..., : e + 1], v_t).mul_(p)
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
