"""Attention of some tokens over others by kernels that know two shapes only: all keys of a segment, or causally.

Fused kernels of libraries take segments of queries, each with a segment of keys, and no places. What a rank's queries
see of another shard's keys is such pairs of segments: both hold runs of consecutive places, so of two runs, cut where
the other begins or ends, one lies before the other and is seen whole, or they are the same and are seen causally, or
nothing is seen. Packed documents are cut into runs of their own. A kernel's result for some of the keys a query sees is
a share of the whole: shares are merged by their log-sum-exp, and in backward the kernel gets the output and log-sum-exp
of all keys, so that shares of the gradients add up (Dao et al., arXiv 2205.14135, section 3.1). Nothing is made again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.ops.visible import Visible

WIDTH = 8  # of which FlashAttention's head sizes are multiples


class Pair(NamedTuple):
    """A run of queries and the run of keys that it sees, each by its place among those of its document."""

    queries: range
    keys: range


class Pairs(NamedTuple):
    """What one call of a kernel computes: segments of queries, and as many of keys, one behind the other.

    causal: segments are equally long, and a query sees the keys up to its own place; else all of its segment.
    queries, keys: [n] int64, which of all tokens they are, each at most once; None: all in their order.
    q_starts, k_starts: [segments + 1] int32, where segments begin; longest: of both, the tokens of the longest one.
    """

    causal: bool
    queries: Tensor | None
    keys: Tensor | None
    q_starts: Tensor
    k_starts: Tensor
    longest: tuple[int, int]


class Kernel(Protocol):
    """Attention within pairs of segments: q [n, H, d], k [m, G, d], v [m, G, e]; G divides H."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, scale: float) -> tuple[Tensor, Tensor]:
        """Output [n, H, e] and log-sum-exp [n, H] in fp32 (fp64)."""

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: Pairs, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; out and lse are those of all keys that a query sees, also outside of `pairs`."""


@dataclass(frozen=True)
class PairedVisible(Visible):
    """The same as pairs of segments, which are found at their first use."""

    find: Callable[[], list[Pairs]] = list

    @cached_property
    def pairs(self) -> list[Pairs]:
        return self.find()


def paired_rows(visible: Visible, rows: int) -> PairedVisible:
    """Whole rows, also as pairs: what `visible` describes, of so many rows."""
    places, documents = visible.q_places, visible.q_documents
    S, device = len(places), places.device

    def find() -> list[Pairs]:
        of_rows = torch.zeros(rows, S, dtype=torch.int32) if documents is None else documents.cpu()
        return find_pairs([range(S)], [range(S)], of_rows, visible.causal, device)

    return PairedVisible(places, places, documents, documents, visible.causal, visible.window, find)


def seen_pairs(queries: Sequence[range], keys: Sequence[range], causal: bool) -> tuple[list[Pair], list[Pair]]:
    """What queries at some places see of keys at others: causal pairs, and pairs seen whole.

    queries, keys: runs of places, ascending. Every query is in one causal pair at most.
    """
    if not causal:
        both = Pair(range(sum(map(len, queries))), range(sum(map(len, keys))))
        return [], [both] if both.queries and both.keys else []
    squares: list[Pair] = []
    wholes: list[Pair] = []
    borders = sorted({border for run in (*queries, *keys) for border in (run.start, run.stop)})
    at = 0
    for run in queries:
        for start, stop in pairwise([run.start, *(b for b in borders if run.start < b < run.stop), run.stop]):
            piece = range(at, at := at + stop - start)
            before = sum(len(range(key.start, min(key.stop, start))) for key in keys)
            if any(start in key for key in keys):
                before = _joined(squares, Pair(piece, range(before, before + len(piece)))).keys.start
            if before:
                _joined(wholes, Pair(piece, range(before)))
    return squares, wholes


def _joined(pairs: list[Pair], new: Pair) -> Pair:
    """Add a pair; one that only goes on with the last, causally or over the same keys, becomes part of it."""
    if pairs and pairs[-1].queries.stop == new.queries.start:
        last = pairs[-1]
        if last.keys.stop == new.keys.start or last.keys == new.keys:
            pairs[-1] = Pair(range(last.queries.start, new.queries.stop), range(last.keys.start, new.keys.stop))
            return pairs[-1]
    pairs.append(new)
    return new


def find_pairs(
    queries: Sequence[range], keys: Sequence[range], documents: Tensor, causal: bool, device: torch.device
) -> list[Pairs]:
    """The calls of a kernel that give queries at some places of rows what they see of keys at others.

    documents [B, S]: of the whole rows, on the CPU. First the causal call, then the others: as many as a document has
    pairs seen whole, for in one call no key comes twice, so that sums over calls have a fixed order.
    """
    calls: dict[int, list[tuple[list[range], list[range]]]] = {}
    for row, of_row in enumerate(documents):
        for runs in _documents(of_row):
            (q_runs, q_tokens), (k_runs, k_tokens) = (_held(runs, places, row) for places in (queries, keys))
            squares, wholes = seen_pairs(q_runs, k_runs, causal)
            for number, pairs in enumerate([squares, *([pair] for pair in wholes)]):
                for pair in pairs:
                    tokens = _cut(q_tokens, pair.queries), _cut(k_tokens, pair.keys)
                    calls.setdefault(number, []).append(tokens)
    sizes = [len(documents) * sum(map(len, places)) for places in (queries, keys)]
    return [_call(number == 0, calls[number], sizes, device) for number in sorted(calls)]


def _documents(row: Tensor) -> list[list[range]]:
    """The places of each document [S] as runs: one each, but that padding may stand in several."""
    borders = [0, *((row[1:] != row[:-1]).nonzero().flatten() + 1).tolist(), len(row)]
    found: dict[int, list[range]] = {}
    for document, run in zip(row[borders[:-1]].tolist(), itertools.starmap(range, pairwise(borders)), strict=True):
        found.setdefault(document, []).append(run)
    return list(found.values())


def _held(runs: Sequence[range], places: Sequence[range], row: int) -> tuple[list[range], list[range]]:
    """The parts of runs that lie in a shard's places, and which of all its rows' tokens they are."""
    held, tokens, before = [], [], row * sum(map(len, places))
    for chunk in places:
        for run in runs:
            part = range(max(run.start, chunk.start), min(run.stop, chunk.stop))
            if part:
                held.append(part)
                tokens.append(range(before + part.start - chunk.start, before + part.stop - chunk.start))
        before += len(chunk)
    return held, tokens


def _cut(runs: Sequence[range], part: range) -> list[range]:
    """Of all numbers of runs, one run behind the other, those at the places of `part`."""
    found, before = [], 0
    for run in runs:
        found.append(run[max(part.start - before, 0) : max(part.stop - before, 0)])
        before += len(run)
    return [run for run in found if run]


def _call(
    causal: bool, pairs: Sequence[tuple[list[range], list[range]]], sizes: Sequence[int], device: torch.device
) -> Pairs:
    indices, starts, longest = [], [], []
    for segments, size in zip(zip(*pairs, strict=True), sizes, strict=True):
        runs = [run for segment in segments for run in segment]
        lengths = [sum(map(len, segment)) for segment in segments]
        all_in_order = sum(lengths) == size and all(a.stop == b.start for a, b in pairwise(runs))
        index = None if all_in_order else torch.cat([torch.arange(run.start, run.stop) for run in runs])
        indices.append(None if index is None else index.to(device))
        starts.append(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device))
        longest.append(max(lengths))
    return Pairs(causal, indices[0], indices[1], starts[0], starts[1], (longest[0], longest[1]))


def paired_forward(
    q: Tensor, k: Tensor, v: Tensor, calls: Sequence[Pairs], scale: float, dtype: torch.dtype, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """As `ops.attention.attention_forward`: q [B, Sq, H, d] … -> out [B, Sq, H, e] in `dtype`, lse [B, Sq, H]."""
    q_, k_, v_ = (x.flatten(0, 1) for x in (q, k, v))
    out = torch.zeros(*q_.shape[:2], v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full(q_.shape[:2], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for pairs in calls:
        operands = _of(q_, pairs.queries), _of(k_, pairs.keys), _of(v_, pairs.keys)
        part, part_lse = kernel.forward(*operands, pairs, scale)
        merged = merge(_of(out, pairs.queries), _of(lse, pairs.queries), part.to(dtype), part_lse)
        if pairs.queries is None:
            out, lse = merged
        else:
            out[pairs.queries], lse[pairs.queries] = merged
    return out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2])


def paired_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    calls: Sequence[Pairs],
    scale: float,
    dtype: torch.dtype,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `ops.attention.attention_backward`: gradients of q, k and v in `dtype`, the share of these keys."""
    gradients = [torch.zeros(x.shape, dtype=dtype, device=x.device).flatten(0, 1) for x in (q, k, v)]
    d_out, q_, k_, v_, out, lse = (x.flatten(0, 1) for x in (d_out, q, k, v, out, lse))
    for pairs in calls:
        rows = pairs.queries
        operands = _of(d_out, rows), _of(q_, rows), _of(k_, pairs.keys), _of(v_, pairs.keys)
        parts = kernel.backward(*operands, _of(out, rows), _of(lse, rows), pairs, scale)
        for whole, part, index in zip(gradients, parts, (rows, pairs.keys, pairs.keys), strict=True):
            if index is None:
                whole += part
            else:
                whole[index] += part.to(dtype)
    d_q, d_k, d_v = (gradient.view(x.shape) for gradient, x in zip(gradients, (q, k, v), strict=True))
    return d_q, d_k, d_v


def _of(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x[index]


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from that over each, [..., H, e], and its log-sum-exps [..., H].

    Changes `out` and `part`.
    """
    total = torch.logaddexp(lse, part_lse)
    level = total.masked_fill(total == -torch.inf, 0)  # no key seen yet: both shares are 0, and -inf - -inf is NaN
    out *= (lse - level).exp_().unsqueeze(-1)
    part *= (part_lse - level).exp_().unsqueeze(-1)
    return out.add_(part), total


class Flash:
    """torch's FlashAttention for 16-bit numbers, on a GPU of compute capability 8 or more.

    It wants one head size for all, so the shorter of keys and values are padded; zeros change neither scores nor sums.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *_padded(q, k, v), pairs.q_starts, pairs.k_starts, *pairs.longest, 0.0, pairs.causal, False, scale=scale
        )
        return out[..., : v.shape[2]], lse.T

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: Pairs, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        d_out, q_, k_, v_, out = _padded(d_out, q, k, v, out)
        d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
            d_out, q_, k_, v_, out, lse.T.contiguous(), pairs.q_starts, pairs.k_starts, *pairs.longest, 0.0,
            pairs.causal, *no_dropout, scale=scale,
        )  # fmt: skip
        return d_q[..., : q.shape[2]], d_k[..., : k.shape[2]], d_v[..., : v.shape[2]]


def _padded(*tensors: Tensor) -> Iterator[Tensor]:
    """All with the last dimension of the widest, in whole multiples of WIDTH."""
    width = -(-max(x.shape[-1] for x in tensors) // WIDTH) * WIDTH
    return (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x.contiguous() for x in tensors)
