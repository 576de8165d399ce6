"""Attention over sequences that several ranks share: who sends what, and what is done with what arrives.

Each rank holds two chunks of every sequence, an early and a late one (`layout.shard_chunks`), and needs to meet its
queries with the keys and values of all. Three exchanges:

    ring        blocks of keys and values go from rank to rank; one is used while the next is on its way. Backward sends
                them round once more, and with them the sum of their gradients, which arrives where the block came from
    all_gather  every rank gets all blocks at once, and uses its own meanwhile; gradients are summed where they belong
    ulysses     every rank gets all tokens of some heads (Jacobs et al., arXiv 2309.14509)

and two payloads: `kv`, keys and values; `latent`, what MLA makes them from, a normalised latent and one rotary key for
all heads, 71 times fewer numbers in DeepSeek-V3. Who receives latents multiplies them up, in forward and in backward.

A query's share of the result from one block comes with its log-sum-exp, so shares are merged exactly (Liu et al., arXiv
2310.01889). Forward keeps queries, own keys and values (or latents), the output and its log-sum-exp; of the sequence's
length everything else is a block that is gone when it was used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from moe_engine.config.schema import ContextParallelConfig
from moe_engine.distributed.collectives import Communicator, Pending
from moe_engine.layout import shard_chunks
from moe_engine.model.batch import Shard
from moe_engine.model.core_attention import (
    core_attention,
    share_backward,
    share_forward,
    sink_attention,
    sink_gradient,
    with_sinks,
)
from moe_engine.model.paired_attention import PairedVisible, Pairs, find_pairs, merge, paired_rows
from moe_engine.model.payload import KeysValues, Latents, Open
from moe_engine.ops.autocast import without_autocast
from moe_engine.ops.visible import Visible
from moe_engine.ops.wgrad_queue import WgradQueue, leaf, weight_gradient


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share sequences, in the order of their shards, and how they exchange (section `cp`)."""

    ranks: Communicator
    exchange: str
    payload: str

    @classmethod
    def of(cls, config: ContextParallelConfig, ranks: Communicator) -> ContextParallel:
        return cls(ranks, config.exchange, config.payload)


class SharedRows:
    """What the queries of a rank see of each shard's keys, for one micro-batch; found once for all layers."""

    def __init__(self, shard: Shard, causal: bool = True, window: int = 0) -> None:
        self.shard, self.causal, self.window = shard, causal, window
        self._one = bool((shard.documents == shard.documents[:, :1]).all())  # document a row: no borders to look at
        self._seen: dict[tuple[bool, int], PairedVisible] = {}

    def seen(self, source: int, whole: bool = False) -> PairedVisible:
        """The keys of shard `source` by this shard's queries, or by those of the whole rows in their order."""
        if (whole, source) not in self._seen:
            keys, documents = self.shard.places(source), self.shard.documents
            queries = torch.arange(self.shard.seq_len, device=keys.device) if whole else self.shard.places()
            of_queries, of_keys = (None if self._one else documents[:, places] for places in (queries, keys))
            find = partial(self._pairs, source, whole)
            seen = PairedVisible(queries, keys, of_queries, of_keys, self.causal, self.window, find)
            self._seen[whole, source] = seen
        return self._seen[whole, source]

    def _pairs(self, source: int, whole: bool) -> list[Pairs]:
        """What `seen` describes, as calls of a kernel for pairs of segments."""
        shard = self.shard
        S, device = shard.seq_len, shard.documents.device
        queries = [range(S)] if whole else shard_chunks(S, shard.size, shard.rank)
        return find_pairs(queries, shard_chunks(S, shard.size, source), self._documents, self.causal, device)

    @cached_property
    def _documents(self) -> Tensor:
        """[B, S] on the CPU: copied there once, as what waits for a GPU's work should be rare."""
        documents = self.shard.documents
        return torch.zeros(documents.shape, dtype=documents.dtype) if self._one else documents.cpu()

    @cached_property
    def all_seen(self) -> PairedVisible:
        """The keys of whole rows by their queries."""
        documents = self.shard.documents
        places = torch.arange(self.shard.seq_len, device=documents.device)
        rows = Visible(places, places, None if self._one else documents, None, self.causal, self.window)
        return paired_rows(rows, len(documents))

    @cached_property
    def order(self) -> Tensor:
        """Where in the shards, one behind the other, the token of each place is: [S] int64."""
        return torch.cat([self.shard.places(rank) for rank in range(self.shard.size)]).argsort()

    @cached_property
    def inverse_order(self) -> Tensor:
        return self.order.argsort()


@dataclass(frozen=True)
class _Way:
    """How the blocks of one attention reach this rank's queries."""

    ranks: Communicator
    ring: bool
    seen: Callable[[int], PairedVisible]  # by whose block it is
    open: Open
    scale: float
    queue: WgradQueue | None
    label: str

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Whose block and the block: first the own one, then those of the ranks before. The next is on its way."""
        here, size = self.ranks.rank, self.ranks.size
        if self.ring:
            for i in range(size):
                on_its_way = self.ranks.shift(own, f"{self.label} ring") if i + 1 < size else None
                yield (here - i) % size, own
                own = on_its_way.wait() if on_its_way else own
            return
        gathered = self.ranks.all_gather_start(own, f"{self.label} gather")
        yield here, own
        others = gathered.wait().unflatten(0, (size, -1))
        for i in range(1, size):
            yield (here - i) % size, others[(here - i) % size]


class _SharedAttention(torch.autograd.Function):
    """Queries meet the blocks of all ranks. first, second: the two tensors of the payload; weight: what opens it."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, q: Tensor, first: Tensor, second: Tensor, weight: Tensor | None, sinks: Tensor | None, way: _Way
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty(0), torch.empty(0)
        for i, (source, block) in enumerate(way.blocks(_packed(first, second))):
            k, v, _ = way.open(block, False)
            part, part_lse = share_forward(q, k, v, way.seen(source), way.scale, wide)
            out, lse = merge(out, lse, part, part_lse) if i else (part, part_lse)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, first, second, sinks, out, lse)
        ctx.way, ctx.parameter = way, None if weight is None else leaf(weight)
        return out

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,), (q, first, second, sinks, out, lse), way = grads, ctx.saved_tensors, ctx.way
        d_q = torch.zeros_like(q, dtype=lse.dtype)
        d_weight: Tensor | None = None
        gradients = _RingOfGradients(way) if way.ring else _GatheredGradients(way)
        for source, block in way.blocks(_packed(first, second)):
            k, v, back = way.open(block, True)
            seen = way.seen(source)
            d_q_part, d_k, d_v = share_backward(d_out, q, k, v, out, lse, seen, way.scale, lse.dtype)
            d_q += d_q_part
            d_block, d_weight_part = back(d_k, d_v)
            gradients.add(source, d_block)
            if d_weight_part is not None:
                d_weight = d_weight_part if d_weight is None else d_weight + d_weight_part
        d_own = gradients.own()
        d_first, d_second = d_own.split((first[0, 0].numel(), second[0, 0].numel()), dim=2)
        if d_weight is not None:
            ready = d_weight
            d_weight = weight_gradient(way.queue, ctx.parameter, lambda: ready)
        d_sinks = None if sinks is None else sink_gradient(d_out, out, lse, sinks)
        return d_q.to(q.dtype), _like(d_first, first), _like(d_second, second), d_weight, d_sinks, None


class _RingOfGradients:
    """The gradient of a block goes on with it from rank to rank, each adding its share, and arrives at its owner."""

    def __init__(self, way: _Way) -> None:
        self.way = way
        self._coming: Pending | None = None

    def add(self, source: int, d_block: Tensor) -> None:
        """The share of this rank's queries in the gradient of the block it holds now."""
        if self._coming is not None:
            d_block = self._coming.wait() + d_block
        self._coming = self.way.ranks.shift(d_block, f"{self.way.label} ring backward")

    def own(self) -> Tensor:
        assert self._coming is not None
        return self._coming.wait()


class _GatheredGradients:
    """The gradients of all blocks are kept until the last, then summed in the order of ranks at their owners."""

    def __init__(self, way: _Way) -> None:
        self.way, self._blocks = way, [torch.empty(0)] * way.ranks.size

    def add(self, source: int, d_block: Tensor) -> None:
        self._blocks[source] = d_block

    def own(self) -> Tensor:
        shape = self._blocks[0].shape
        whole = torch.stack(self._blocks).flatten()
        return self.way.ranks.reduce_scatter_sum(whole, f"{self.way.label} gather backward").view(shape)


def _packed(first: Tensor, second: Tensor) -> Tensor:
    """Both tensors of a payload as one block [B, n, numbers of a token]."""
    return torch.cat((first.flatten(2), second.flatten(2)), dim=2)


def _like(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.reshape(x.shape).to(x.dtype)


def shared_attention(
    q: Tensor,
    payload: KeysValues | Latents,
    cp: ContextParallel,
    rows: SharedRows,
    scale: float,
    queue: WgradQueue | None = None,
    label: str = "",
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v of this shard's queries over the keys of whole rows: q [B, n, H, d] -> [B, n, H, e].

    The payload is that of this shard's tokens, sinks [H] are as in `sink_attention`. All ranks of `cp` call this
    together. `label`: for the collective log.
    """
    if cp.exchange == "ulysses":
        return _by_heads(q, payload, cp, rows, scale, queue, label, sinks)
    way = _Way(cp.ranks, cp.exchange == "ring", rows.seen, payload.opener(queue), scale, queue, label)
    out: Tensor = _SharedAttention.apply(q, *payload.tensors(), sinks, way)
    return out


def _by_heads(
    q: Tensor,
    payload: KeysValues | Latents,
    cp: ContextParallel,
    rows: SharedRows,
    scale: float,
    queue: WgradQueue | None,
    label: str,
    sinks: Tensor | None,
) -> Tensor:
    """Ulysses: whole rows of some heads on each rank."""
    size, H = cp.ranks.size, q.shape[2]
    own = H // size
    if sinks is not None:
        sinks = sinks[cp.ranks.rank * own : (cp.ranks.rank + 1) * own]
    to_ranks = [_heads_for_ranks(q, [range(rank * own, (rank + 1) * own) for rank in range(size)])]
    if isinstance(payload, KeysValues):
        served = H // payload.k.shape[2]  # query heads of each key-value head
        needed = [range(rank * own // served, ((rank + 1) * own - 1) // served + 1) for rank in range(size)]
        to_ranks += [_heads_for_ranks(payload.k, needed), _heads_for_ranks(payload.v, needed)]
    arrived = [_whole_rows(x, rows) for x in _exchanged(to_ranks, cp.ranks, f"{label} heads")]
    if isinstance(payload, KeysValues):
        q_, k_, v_ = arrived
        if sinks is None:
            y = core_attention(q_, k_, v_, rows.all_seen, scale)
        else:
            y = sink_attention(q_, k_, v_, sinks, rows.all_seen, scale)
    else:
        part = payload._replace(first=cp.ranks.rank * own, heads=own)

        def seen(source: int) -> PairedVisible:
            return rows.seen(source, whole=True)

        way = _Way(cp.ranks, False, seen, part.opener(queue), scale, queue, label)
        y = _SharedAttention.apply(arrived[0], *part.tensors(), sinks, way)
    back = y[:, rows.inverse_order].unflatten(1, (size, -1)).transpose(0, 1)  # [cp, B, n, H / cp, e]
    (whole,) = _exchanged([back], cp.ranks, f"{label} tokens")
    return whole.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _heads_for_ranks(x: Tensor, heads: list[range]) -> Tensor:
    """x [B, n, heads, d] -> [cp, B, n, heads of a rank, d]; a head that several ranks need goes to each."""
    chosen = torch.tensor([list(part) for part in heads], device=x.device)  # [cp, heads of a rank]
    return x[:, :, chosen].permute(2, 0, 1, 3, 4)


def _whole_rows(x: Tensor, rows: SharedRows) -> Tensor:
    """x [cp, B, n, heads, d], by the shard that it came from -> [B, S, heads, d] in the order of the row."""
    return x.transpose(0, 1).flatten(1, 2)[:, rows.order]


def _exchanged(parts: list[Tensor], ranks: Communicator, label: str) -> list[Tensor]:
    """Slice i of each part [cp, …] goes to rank i, in one message; what came from rank i is slice i of the results."""
    shapes = [part.shape for part in parts]
    message = torch.cat([part.flatten(1) for part in parts], dim=1)
    arrived: Tensor = _AllToAll.apply(message, ranks, label)
    sizes = [shape[1:].numel() for shape in shapes]
    return [x.reshape(shape) for x, shape in zip(arrived.split(sizes, dim=1), shapes, strict=True)]


class _AllToAll(torch.autograd.Function):
    """Row i of x [cp, n] goes to rank i; so do the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator, label: str) -> Tensor:
        ctx.ranks, ctx.label = ranks, label
        splits = [1] * ranks.size
        return ranks.all_to_all(x, splits, splits, label).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        splits = [1] * ctx.ranks.size
        return ctx.ranks.all_to_all(grads[0], splits, splits, f"{ctx.label} backward").wait(), None, None
