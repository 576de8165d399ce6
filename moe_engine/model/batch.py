"""A micro-batch as the model sees it: tokens, targets, positions and document borders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_engine.layout import shard_chunks
from moe_engine.ops.loss import IGNORE


@dataclass(frozen=True)
class Shard:
    """What a rank knows of whole rows of which it holds one shard's tokens (context parallelism).

    rank, size  which of how many shards; the places that it holds are `layout.shard_chunks`
    documents   [B, S] int32, the document of every token of the whole row; -1 for padding
    valid       [B] int64, tokens of the whole row that are no padding
    """

    rank: int
    size: int
    documents: Tensor
    valid: Tensor

    @property
    def seq_len(self) -> int:
        """S, of the whole rows."""
        return self.documents.shape[1]

    def places(self, rank: int | None = None) -> Tensor:
        """The places that a shard holds, in its order: [S / size] int64; those of this rank if none is named."""
        chunks = shard_chunks(self.seq_len, self.size, self.rank if rank is None else rank)
        return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks]).to(self.valid.device)

    def each(self, change: Callable[[Tensor], Tensor]) -> Shard:
        """The same with both tensors changed."""
        return replace(self, documents=change(self.documents), valid=change(self.valid))


@dataclass(frozen=True)
class Batch:
    """B rows of S tokens; tensors are int64 unless said. D is the number of MTP depths.

    tokens        [1+D, B, S]  tokens[k] are the inputs of depth k: token t+k at place t
    labels        [1+D, B, S]  labels[k] are its targets: token t+1+k, or IGNORE where that is no valid target
    positions     [B, S]       position inside the token's document (for rotary embeddings)
    document_ids  [B, S]       int32, which document of its row a token belongs to
    token_mask    [B, S]       bool, False for padding; None: no padding
    shard         where these are some tokens of longer rows; S then is how many
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    document_ids: Tensor
    token_mask: Tensor | None = None
    shard: Shard | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S)."""
        return self.tokens.shape[1], self.tokens.shape[2]

    def slice_rows(self, start: int, stop: int) -> Batch:
        """Rows start … stop-1 as a batch of their own."""
        rows = slice(start, stop)
        mask = None if self.token_mask is None else self.token_mask[rows]
        shard = self.shard and self.shard.each(lambda tensor: tensor[rows])
        return Batch(
            self.tokens[:, rows], self.labels[:, rows], self.positions[rows], self.document_ids[rows], mask, shard
        )

    def to(self, device: torch.device) -> Batch:
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        mask = None if self.token_mask is None else move(self.token_mask)
        shard = self.shard and self.shard.each(move)
        return Batch(move(self.tokens), move(self.labels), move(self.positions), move(self.document_ids), mask, shard)

    def share(self, rank: int, size: int) -> Batch:
        """The shard of these whole rows that one of `size` ranks holds; all of them for size 1.

        Raises ValueError where a row cannot be cut in 2 * size equal chunks.
        """
        if size == 1:
            return self
        ids, mask = self.document_ids, self.token_mask
        if mask is None:
            shard = Shard(rank, size, ids, torch.full((self.shape[0],), self.shape[1], device=ids.device))
        else:
            shard = Shard(rank, size, ids.where(mask, -1), mask.sum(dim=1))
        own = shard.places()
        mask = None if mask is None else mask[:, own]
        return Batch(
            self.tokens[..., own], self.labels[..., own], self.positions[:, own], self.document_ids[:, own], mask, shard
        )


@dataclass(frozen=True)
class ItemCounts:
    """Valid items by loss term: what each term is divided by, once summed over the whole global batch.

    tokens: main targets; mtp: targets of each MTP depth; sequences: rows with at least one token that is no padding;
    routed: tokens that are no padding.
    """

    tokens: int
    mtp: tuple[int, ...]
    sequences: int
    routed: int

    def as_tensor(self) -> Tensor:
        return torch.tensor([self.tokens, self.sequences, self.routed, *self.mtp])

    @classmethod
    def from_tensor(cls, counts: Tensor) -> ItemCounts:
        tokens, sequences, routed, *mtp = counts.tolist()
        return cls(tokens, tuple(mtp), sequences, routed)


def count_items(batches: Iterable[Batch]) -> ItemCounts:
    """The valid items of some micro-batches."""
    total: Tensor | int = 0
    for batch in batches:
        targets = (batch.labels != IGNORE).sum(dim=(1, 2))  # [1+D]
        mask = batch.token_mask
        rows = batch.shape[0] if mask is None else mask.any(dim=1).sum().item()
        if batch.shard is not None:  # a row is counted by the rank of its first shard
            rows = int((batch.shard.valid > 0).sum()) if batch.shard.rank == 0 else 0
        routed = batch.shape[0] * batch.shape[1] if mask is None else mask.sum().item()
        total = total + torch.tensor([targets[0], rows, routed, *targets[1:]])
    if isinstance(total, int):
        raise ValueError("no micro-batches to count")
    return ItemCounts.from_tensor(total)
