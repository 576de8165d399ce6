"""Attention for a CPU: softmax(QK^T)V in blocks that stay in its cache, with log-sum-exp and its own backward.

For a few heads of one row at a time, a block of queries meets a tile of keys: scores, softmax and their gradients are
made, used and forgotten while they are in the second-level cache, so memory grows with the length and not with its
square. Forward takes the softmax online (Milakov and Gimelshein, arXiv 1805.02867) and keeps its log-sum-exp; backward
makes it again from that (Dao et al., arXiv 2205.14135), but for up to one tile of keys, where it is kept: to read it is
faster. What a query may see is told by places and documents
(`Visible`), so the queries of one part of a sequence can meet the keys of another, as context parallel ranks do;
tiles where nothing is seen are skipped, and only tiles on an edge are masked.

Everything inside is fp32 (fp64 for fp64): many CPUs have no 16-bit products, and scores deserve the precision. Two
subtractions of backward are done by its products: with -log-sum-exp as one more number of each query and 1 of each
key, scores arrive as the logarithm of the softmax; likewise d_out and v give the softmax's gradient less its mean.

A row is computed by itself in products of fixed shape, so its bits do not depend on the rows beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.ops.autocast import without_autocast
from moe_engine.ops.threads import share_out

EDGE = 64  # queries and keys are known to be seen, or not, by blocks of this size
QUERY_BLOCK = 64  # smaller ones skip more of what is not seen, and multiply slower
LONG_QUERY_BLOCK = 128  # for more keys than one tile
KEY_TILE = 512
KEPT_KEYS = KEY_TILE  # for no more keys than this the softmax is kept for backward, beyond it is made again
HEADS = 4  # query heads at a time, if they share no keys: with their keys and scores they take about 2 MB
LONG_HEADS = 2  # as many where keys are more than one tile
SHARED_PAIRS = 1 << 20  # queries times keys of all heads from which threads get heads of their own
FILL = 4  # columns added to queries and keys in backward: one is used, the others keep the width a multiple of 4


# The softmax by (row, first key head, first query): of a few heads and a block of queries, [heads, rows, keys].
Kept = dict[tuple[int, int, int], Tensor]


class Step(NamedTuple):
    """A block of queries and the keys of one tile, of which some are seen; `edge`: those not seen by all queries."""

    queries: slice
    keys: slice
    edge: slice | None


@dataclass(frozen=True)
class Visible:
    """Which keys each query sees: those of its own document and, if `causal`, at no later place.

    q_places [Sq], k_places [Sk] int64: places in the whole sequence, the same in every row; q_documents [B, Sq],
    k_documents [B, Sk] whole numbers, or None: one document. Make one for all layers: it finds its steps once.
    """

    q_places: Tensor
    k_places: Tensor
    q_documents: Tensor | None = None
    k_documents: Tensor | None = None
    causal: bool = True

    @property
    def whole_causal(self) -> bool:
        """Whether this is plain causal attention over whole rows of one document each."""
        return self.causal and self.q_documents is None and self.q_places is self.k_places

    def steps_of(self, row: int) -> list[Step]:
        """The steps of a row, in the order of queries, then keys."""
        return self.steps[row if len(self.steps) > 1 else 0]

    @cached_property
    def steps(self) -> list[list[Step]]:
        """In the order of queries, then keys: for each row, or once if all rows see alike."""
        rows = 1 if self.q_documents is None else self.q_documents.shape[0]
        if not (self.q_places.numel() and self.k_places.numel()):
            return [[] for _ in range(rows)]
        block = QUERY_BLOCK if self.k_places.numel() <= KEY_TILE else LONG_QUERY_BLOCK
        seen, all_seen = self._blocks(block)
        return [list(self._row_steps(block, *both)) for both in zip(seen, all_seen, strict=True)]

    def _blocks(self, block: int) -> tuple[Tensor, Tensor]:
        """Whether a block sees any of a block, if in doubt True, and whether it sees all: bool [rows, nq, nk] each."""
        (q_low, q_high), (k_low, k_high) = _ends(self.q_places[None], block), _ends(self.k_places[None], EDGE)
        q_low, q_high, k_low, k_high = q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None]
        seen = k_low <= q_high if self.causal else (k_low <= k_high) & (q_low <= q_high)
        all_seen = k_high <= q_low if self.causal else seen
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
        if key in self._masks:
            return self._masks[key]
        hidden = torch.zeros((), dtype=torch.bool, device=self.q_places.device)
        if self.causal:
            hidden = self.k_places[keys] > self.q_places[queries, None]
        if self.q_documents is not None and self.k_documents is not None:
            hidden = hidden | (self.k_documents[row, keys] != self.q_documents[row, queries, None])
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)
        # As many as the edges of a few documents have: memory must stay linear in the length.
        if len(self._masks) < 4 * len(self.steps) * (1 + self.q_places.numel() // QUERY_BLOCK):
            self._masks[key] = mask
        return mask

    @cached_property
    def _masks(self) -> dict[tuple[Any, ...], Tensor]:
        return {}


def whole_rows(length: int, documents: Tensor | None = None, device: torch.device | None = None) -> Visible:
    """Whole rows, causal: a query sees keys up to its own place, of its own document where `documents` [B, S] are."""
    places = torch.arange(length, device=device)
    return Visible(places, places, documents, documents)


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


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visible,
    scale: float,
    dtype: torch.dtype | None = None,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the visible keys, and the logarithm of the softmax's denominator.

    q [B, Sq, H, d], k [B, Sk, G, d], v [B, Sk, G, e] -> out [B, Sq, H, e] in `dtype` (None: v's), lse [B, Sq, H] in
    fp32 (fp64). G divides H: head g of keys and values serves query heads g H/G … (g+1) H/G - 1. A query without a
    visible key gives 0 and -inf. `kept` is filled with the softmax for backward: only where there is one tile of keys.
    Not recorded by autograd. Of tensors without data (device `meta`) only sizes come.
    """
    (B, Sq, H, _), G, e = q.shape, k.shape[2], v.shape[-1]
    out = torch.zeros(B, Sq, H, e, dtype=dtype or v.dtype, device=q.device)
    lse = torch.full((B, Sq, H), -math.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)

    def attend(scratch: _Scratch, b: int, heads: slice, queries: slice) -> None:
        q_ = scratch.grouped("q", q[b, :, queries], heads).mul_(scale)
        k_, v_ = scratch.wide("k", k[b, :, heads]), scratch.wide("v", v[b, :, heads])
        operands = k_.transpose(1, 2), v_, visible, b, scratch
        to, lse_to = (x[b, :, queries].unflatten(1, q_.shape[:2]) for x in (out, lse))  # [Sq, heads, H/G, …]
        for rows, steps in itertools.groupby(visible.steps_of(b), key=lambda step: step.queries):
            block, sums, top, weights = _online(_cut(q_, 2, rows).flatten(1, 2), *operands, steps, kept is not None)
            at_least_1 = sums.clamp(min=1)  # as they are where any key is seen: the greatest score's own is 1
            block.div_(at_least_1)
            if kept is not None:
                kept[b, heads.start, rows.start] = weights.div_(at_least_1)
            shape = (H // G, rows.stop - rows.start)
            _cut(to, 0, rows).copy_(block.unflatten(1, shape).permute(2, 0, 1, 3))
            _cut(lse_to, 0, rows).copy_(top.add_(sums.log_()).squeeze(2).unflatten(1, shape).permute(2, 0, 1))

    _for_heads(attend, q, k, visible)
    return out, lse


def _online(
    q: Tensor, k_t: Tensor, v: Tensor, visible: Visible, b: int, scratch: _Scratch, steps: Iterator[Step], keep: bool
) -> list[Tensor]:
    """Softmax over the tiles of the steps: q [heads, R, d], k_t [heads, d, Sk], v [heads, Sk, e].

    Returns exp(scores - top) v [heads, R, e], the sums of exp(scores - top), top, the greatest score [heads, R, 1], and
    exp(scores - top) of the last tile, in memory of its own if `keep`.
    """
    found: list[Tensor] = []
    for step in steps:
        keys = _cut(k_t, 2, step.keys)
        scores = torch.bmm(q, keys) if keep else scratch.product("scores", q, keys)
        _hide(scores, visible, b, step)
        top = scores.amax(dim=2, keepdim=True).clamp_(min=torch.finfo(q.dtype).min)  # finite: -inf - -inf is NaN
        if found:
            torch.maximum(top, found[2], out=top)
        weights = scores.sub_(top).exp_()
        added = weights.sum(dim=2, keepdim=True)
        if found:
            block, sums, last_top, _ = found
            shrink = last_top.sub_(top).exp_()
            block.mul_(shrink).baddbmm_(weights, _cut(v, 1, step.keys))
            found = [block, sums.mul_(shrink).add_(added), top, weights]
        else:
            found = [scratch.product("block", weights, _cut(v, 1, step.keys)), added, top, weights]
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
    d_lse: Tensor | None = None,
    dtype: torch.dtype | None = None,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through `attention_forward`, in `dtype` (None: each tensor's own).

    out [B, Sq, H, e] and lse [B, Sq, H] may be those of more keys than k has here: then the results are the share of
    these keys, and shares add up. d_lse [B, Sq, H]: gradient of lse, if it has one; `kept`: what forward filled, then
    without d_lse.
    """
    d, e = q.shape[3], v.shape[3]
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device) for x in (q, k, v))

    def attend(scratch: _Scratch, b: int, heads: slice, queries: slice) -> None:
        fill = FILL if kept is None else 0
        d_out_ = scratch.grouped("d_out", d_out[b, :, queries], heads, fill)
        q_ = scratch.grouped("q", q[b, :, queries], heads, fill).mul_(scale)
        k_, v_ = scratch.wide("k", k[b, :, heads], fill), scratch.wide("v", v[b, :, heads], fill)
        if kept is None:
            mean = scratch.grouped("out", out[b, :, queries], heads).mul_(d_out_[..., :e]).sum(dim=-1)
            if d_lse is not None:
                mean -= scratch.grouped("d_lse", d_lse[b, :, queries, None], heads).squeeze(-1)
            log_sums = scratch.grouped("lse", lse[b, :, queries, None], heads).squeeze(-1)
            d_out_[..., e], q_[..., d] = mean.neg_(), log_sums.masked_fill_(log_sums == -math.inf, 0).neg_()
            k_[..., d], v_[..., e] = 1, 1
        d_q_ = scratch("d_q", (*q_.shape[:-1], d)).zero_()
        d_k_, d_v_ = scratch("d_k", (*k_.shape[:-1], d)).zero_(), scratch("d_v", (*v_.shape[:-1], e)).zero_()
        plain_k, k_t, v_t = k_[..., :d], k_.transpose(1, 2), v_.transpose(1, 2)
        # Tile by tile, so that the gradients of a tile's keys stay in the cache.
        for step in sorted(visible.steps_of(b), key=lambda step: step.keys.start // KEY_TILE):
            q_rows, d_rows = _cut(q_, 2, step.queries).flatten(1, 2), _cut(d_out_, 2, step.queries).flatten(1, 2)
            if kept is None:
                p = scratch.product("scores", q_rows, _cut(k_t, 2, step.keys))
                _hide(p, visible, b, step)
                p.exp_()
            else:
                p = kept[b, heads.start, step.queries.start]
            _cut(d_v_, 1, step.keys).baddbmm_(p.transpose(1, 2), d_rows[..., :e])
            d_scores = scratch.product("d_scores", d_rows, _cut(v_t, 2, step.keys))
            d_scores = d_scores.mul_(p) if kept is None else torch._softmax_backward_data(d_scores, p, 2, p.dtype)
            _cut(d_k_, 1, step.keys).baddbmm_(d_scores.transpose(1, 2), q_rows[..., :d])
            block = scratch.product("block", d_scores, _cut(plain_k, 1, step.keys))
            _cut(d_q_, 2, step.queries).add_(block.unflatten(1, (q_.shape[1], -1)))
        d_q[b, :, queries].unflatten(1, q_.shape[:2]).copy_(d_q_.mul_(scale).permute(2, 0, 1, 3))
        d_k[b, :, heads], d_v[b, :, heads] = d_k_.transpose(0, 1), d_v_.transpose(0, 1)

    _for_heads(attend, q, k, visible)
    return d_q, d_k, d_v


class _Scratch:
    """Buffers that are made once a call and used for every few heads: they stay in the cache, and mapped.

    dtype: fp32, or fp64 for fp64 tensors.
    """

    def __init__(self, like: Tensor) -> None:
        self.dtype, self.device = torch.promote_types(like.dtype, torch.float32), like.device
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """What `name` held in this shape before, or zeros."""
        if (name, *shape) not in self._buffers:
            self._buffers[name, *shape] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self._buffers[name, *shape]

    def wide(self, name: str, x: Tensor, fill: int = 0) -> Tensor:
        """x [S, heads, n] -> [heads, S, n + fill], the last `fill` columns as they were, 0 at first."""
        S, heads, n = x.shape
        wide = self(name, (heads, S, n + fill))
        (wide[..., :n] if fill else wide).copy_(x.transpose(0, 1))
        return wide

    def grouped(self, name: str, x: Tensor, heads: slice, fill: int = 0) -> Tensor:
        """x [S, query heads, n] by the key-value head that serves them: [heads, H/G, S, n + fill]."""
        return self.wide(name, x, fill).unflatten(0, (heads.stop - heads.start, -1))

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Batched matrix product."""
        out = self(name, (a.shape[0], a.shape[1], b.shape[2]))
        return torch.bmm(a, b, out=out)


def _cut(x: Tensor, dim: int, part: slice) -> Tensor:
    return x.narrow(dim, part.start, part.stop - part.start)


def _for_heads(attend: Callable[[_Scratch, int, slice, slice], None], q: Tensor, k: Tensor, visible: Visible) -> None:
    """`attend` for each row and a few heads: (row, key-value heads, the query heads they serve). No data: for none."""
    (B, Sq, H, _), (_, Sk, G, _) = q.shape, k.shape
    if q.is_meta:
        return
    at_once = max(1, (HEADS if Sk <= KEY_TILE else LONG_HEADS) * G // H)
    pieces = []
    for b in range(B):
        visible.steps_of(b)  # found here, not by several threads at once
        for start in range(0, G, at_once):
            stop = min(start + at_once, G)
            pieces.append((b, slice(start, stop), slice(start * (H // G), stop * (H // G))))

    def work(some: Sequence[tuple[int, slice, slice]]) -> None:
        scratch = _Scratch(q)
        for piece in some:
            attend(scratch, *piece)

    if q.device.type == "cpu" and B * H * Sq * Sk >= SHARED_PAIRS:
        share_out(work, pieces)
    else:
        with torch.no_grad():
            work(pieces)


def _hide(scores: Tensor, visible: Visible, b: int, step: Step) -> None:
    """Set what queries may not see to -inf: scores [heads, H/G * queries, keys of the step]."""
    if step.edge is None:
        return
    edge = scores.narrow(2, step.edge.start - step.keys.start, step.edge.stop - step.edge.start)
    mask = visible.mask(b, step, scores.dtype)
    edge.unflatten(1, (-1, mask.shape[0])).add_(mask)


class _Attention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
        keep = k.shape[1] <= KEPT_KEYS and any(ctx.needs_input_grad) and not q.is_meta
        kept: Kept | None = {} if keep else None
        out, lse = attention_forward(q, k, v, visible, scale, kept=kept)
        ctx.places = sorted(kept or {})
        ctx.save_for_backward(q, k, v, out, lse, *((kept or {})[place] for place in ctx.places))
        ctx.visible, ctx.scale, ctx.keep = visible, scale, keep
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (d_out, d_lse), (q, k, v, out, lse, *softmax) = grads, ctx.saved_tensors
        kept = dict(zip(ctx.places, softmax, strict=True)) if ctx.keep and d_lse is None else None
        d_out = torch.zeros_like(out) if d_out is None else d_out
        return *attention_backward(d_out, q, k, v, out, lse, ctx.visible, ctx.scale, d_lse, kept=kept), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
    """`attention_forward` under autograd, both results with gradients."""
    out, lse = _Attention.apply(q, k, v, visible, scale)
    return out, lse
