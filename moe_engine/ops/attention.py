"""Attention for a CPU: softmax(QK^T)V in blocks that stay in its cache, with log-sum-exp and its own backward.

For a few heads of one row at a time, a block of queries meets a tile of keys: scores, softmax and their gradients are
made, used and forgotten while they are in the second-level cache, so memory grows with the length and not with its
square. Forward takes the softmax online (Milakov and Gimelshein, arXiv 1805.02867) and keeps its log-sum-exp; backward
makes it again from that (Dao et al., arXiv 2205.14135). What a query may see is told by places and documents
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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.ops.autocast import without_autocast

EDGE = 64  # queries and keys are known to be seen, or not, by blocks of this size
QUERY_BLOCK = 64  # smaller ones skip more of what is not seen, and multiply slower
LONG_QUERY_BLOCK = 128  # for more keys than one tile
KEY_TILE = 512
HEADS = 4  # query heads at a time, if they share no keys: with their keys and scores they take about 2 MB
FILL = 4  # columns added to queries and keys in backward: one is used, the others keep the width a multiple of 4


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

    def hidden(self, row: int, queries: slice, keys: slice) -> Tensor:
        """Which of these keys each of these queries does not see: bool [queries, keys]."""
        hidden = torch.zeros((), dtype=torch.bool, device=self.q_places.device)
        if self.causal:
            hidden = self.k_places[keys] > self.q_places[queries, None]
        if self.q_documents is not None and self.k_documents is not None:
            hidden = hidden | (self.k_documents[row, keys] != self.q_documents[row, queries, None])
        return hidden


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
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the visible keys, and the logarithm of the softmax's denominator.

    q [B, Sq, H, d], k [B, Sk, G, d], v [B, Sk, G, e] -> out [B, Sq, H, e] in `dtype` (None: v's), lse [B, Sq, H] in
    fp32 (fp64). G divides H: head g of keys and values serves query heads g H/G … (g+1) H/G - 1. A query without a
    visible key gives 0 and -inf. Not recorded by autograd.
    """
    (B, Sq, H, _), G, e = q.shape, k.shape[2], v.shape[-1]
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(B, Sq, H, e, dtype=dtype or v.dtype, device=q.device)
    lse = torch.full((B, Sq, H), -math.inf, dtype=wide, device=q.device)
    for b, heads, queries in _heads(B, H, G):
        q_ = _grouped(q, b, queries, heads).mul_(scale)
        k_, v_ = _wide(k, b, heads), _wide(v, b, heads)
        to = out[b, :, queries].unflatten(1, (k_.shape[0], H // G))  # [Sq, heads, H/G, e]
        lse_to = lse[b, :, queries].unflatten(1, (k_.shape[0], H // G))
        for rows, steps in itertools.groupby(_steps(visible, b), key=lambda step: step.queries):
            block, sums, top = _online(q_[:, :, rows].flatten(1, 2), k_, v_, visible, b, steps)
            block = block.div_(sums.clamp(min=1))  # 1 at least where any key is seen: the greatest score's own
            shape = (H // G, rows.stop - rows.start)
            to[rows] = block.unflatten(1, shape).permute(2, 0, 1, 3)
            lse_to[rows] = top.add_(sums.log_()).squeeze(2).unflatten(1, shape).permute(2, 0, 1)
    return out, lse


def _online(q: Tensor, k: Tensor, v: Tensor, visible: Visible, b: int, steps: Iterator[Step]) -> list[Tensor]:
    """Softmax over the tiles of the steps, q [heads, R, d].

    Returns exp(scores - top) v [heads, R, e], the sums of exp(scores - top) and top, the greatest score [heads, R, 1].
    """
    found: list[Tensor] = []
    for step in steps:
        scores = torch.bmm(q, k[:, step.keys].transpose(1, 2))
        _hide(scores, visible, b, step, -math.inf)
        top = scores.amax(dim=2, keepdim=True).clamp_(min=torch.finfo(q.dtype).min)  # finite: -inf - -inf is NaN
        if found:
            torch.maximum(top, found[2], out=top)
        weights = scores.sub_(top).exp_()
        added = weights.sum(dim=2, keepdim=True)
        if found:
            block, sums, last_top = found
            shrink = last_top.sub_(top).exp_()
            block.mul_(shrink).baddbmm_(weights, v[:, step.keys])
            found = [block, sums.mul_(shrink).add_(added), top]
        else:
            found = [torch.bmm(weights, v[:, step.keys]), added, top]
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through `attention_forward`, in `dtype` (None: each tensor's own).

    out [B, Sq, H, e] and lse [B, Sq, H] may be those of more keys than k has here: then the results are the share of
    these keys, and shares add up. d_lse [B, Sq, H]: gradient of lse, if it has one.
    """
    (B, _, H, d), (G, e) = q.shape, v.shape[2:]
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device) for x in (q, k, v))
    for b, heads, queries in _heads(B, H, G):
        n, group = heads.stop - heads.start, H // G
        d_out_ = _grouped(d_out, b, queries, heads, FILL)
        mean = (d_out_[..., :e] * _grouped(out, b, queries, heads)).sum(dim=-1)  # [heads, H/G, Sq]
        if d_lse is not None:
            mean -= _grouped(d_lse.unsqueeze(-1), b, queries, heads).squeeze(-1)
        d_out_[..., e] = mean.neg_()
        q_ = _grouped(q, b, queries, heads, FILL).mul_(scale)
        log_sums = _grouped(lse.unsqueeze(-1), b, queries, heads).squeeze(-1)
        q_[..., d] = log_sums.masked_fill_(log_sums == -math.inf, 0).neg_()
        k_, v_ = _wide(k, b, heads, FILL), _wide(v, b, heads, FILL)
        k_[..., d], v_[..., e] = 1, 1
        d_q_, d_k_, d_v_ = (x.new_zeros(*x.shape[:-1], w) for x, w in ((q_, d), (k_, d), (v_, e)))
        # Tile by tile, so that the gradients of a tile's keys stay in the cache.
        for step in sorted(_steps(visible, b), key=lambda step: step.keys.start // KEY_TILE):
            q_rows, d_rows = q_[:, :, step.queries].flatten(1, 2), d_out_[:, :, step.queries].flatten(1, 2)
            p = torch.bmm(q_rows, k_[:, step.keys].transpose(1, 2)).exp_()
            _hide(p, visible, b, step, 0)
            d_v_[:, step.keys].baddbmm_(p.transpose(1, 2), d_rows[..., :e])
            d_scores = torch.bmm(d_rows, v_[:, step.keys].transpose(1, 2)).mul_(p)
            d_k_[:, step.keys].baddbmm_(d_scores.transpose(1, 2), q_rows[..., :d])
            d_rows_q = torch.bmm(d_scores, k_[:, step.keys, :d])
            d_q_[:, :, step.queries] += d_rows_q.unflatten(1, (group, -1))
        d_q[b, :, queries].unflatten(1, (n, group)).copy_(d_q_.mul_(scale).permute(2, 0, 1, 3))
        d_k[b, :, heads], d_v[b, :, heads] = d_k_.transpose(0, 1), d_v_.transpose(0, 1)
    return d_q, d_k, d_v


def _heads(B: int, H: int, G: int) -> Iterator[tuple[int, slice, slice]]:
    """Each row, a few key-value heads, and the query heads that they serve."""
    at_once = max(1, HEADS * G // H)
    for b in range(B):
        for start in range(0, G, at_once):
            stop = min(start + at_once, G)
            yield b, slice(start, stop), slice(start * (H // G), stop * (H // G))


def _steps(visible: Visible, b: int) -> list[Step]:
    return visible.steps[b if len(visible.steps) > 1 else 0]


def _wide(x: Tensor, b: int, heads: slice, fill: int = 0) -> Tensor:
    """Some heads of row b of x [B, S, heads, n] in fp32 (fp64): [heads, S, n + fill], the last `fill` columns 0."""
    x = x[b, :, heads].transpose(0, 1)
    y = torch.empty(*x.shape[:2], x.shape[2] + fill, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    y[..., : x.shape[2]] = x
    y[..., x.shape[2] :] = 0
    return y


def _grouped(x: Tensor, b: int, queries: slice, heads: slice, fill: int = 0) -> Tensor:
    """Some query heads of row b, by the key-value head that serves them: [heads, H/G, S, n + fill], wide."""
    return _wide(x, b, queries, fill).unflatten(0, (heads.stop - heads.start, -1))


def _hide(scores: Tensor, visible: Visible, b: int, step: Step, value: float) -> None:
    """Set what queries may not see to `value`: scores [heads, H/G * queries, keys of the step]."""
    if step.edge is None:
        return
    edge = slice(step.edge.start - step.keys.start, step.edge.stop - step.keys.start)
    by_query = scores.unflatten(1, (-1, step.queries.stop - step.queries.start))
    by_query[..., edge].masked_fill_(visible.hidden(b, step.queries, step.edge), value)


class _Attention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = attention_forward(q, k, v, visible, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.visible, ctx.scale = visible, scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (d_out, d_lse), (q, k, v, out, lse) = grads, ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        return *attention_backward(d_out, q, k, v, out, lse, ctx.visible, ctx.scale, d_lse), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
    """`attention_forward` under autograd, both results with gradients."""
    out, lse = _Attention.apply(q, k, v, visible, scale)
    return out, lse
