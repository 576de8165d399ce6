"""A micro-batch as the model sees it: tokens, targets, positions and document borders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.ops.loss import IGNORE


@dataclass(frozen=True)
class Batch:
    """B rows of S tokens; tensors are int64 unless said. D is the number of MTP depths.

    tokens        [1+D, B, S]  tokens[k] are the inputs of depth k: token t+k at place t
    labels        [1+D, B, S]  labels[k] are its targets: token t+1+k, or IGNORE where that is no valid target
    positions     [B, S]       position inside the token's document (for rotary embeddings)
    document_ids  [B, S]       int32, which document of its row a token belongs to
    token_mask    [B, S]       bool, False for padding; None: no padding
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    document_ids: Tensor
    token_mask: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S)."""
        return self.tokens.shape[1], self.tokens.shape[2]

    def slice_rows(self, start: int, stop: int) -> Batch:
        """Rows start … stop-1 as a batch of their own."""
        rows = slice(start, stop)
        mask = None if self.token_mask is None else self.token_mask[rows]
        return Batch(self.tokens[:, rows], self.labels[:, rows], self.positions[rows], self.document_ids[rows], mask)

    def to(self, device: torch.device) -> Batch:
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        mask = None if self.token_mask is None else move(self.token_mask)
        return Batch(move(self.tokens), move(self.labels), move(self.positions), move(self.document_ids), mask)

    def cu_seqlens(self) -> Tensor:
        """Cumulative document lengths over the flattened B*S tokens, int32 [documents + 1]."""
        ids = self.document_ids
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        borders = starts.flatten().nonzero().flatten()
        return torch.cat([borders, borders.new_tensor([ids.numel()])]).to(torch.int32)


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
        routed = batch.shape[0] * batch.shape[1] if mask is None else mask.sum().item()
        total = total + torch.tensor([targets[0], rows, routed, *targets[1:]])
    if isinstance(total, int):
        raise ValueError("no micro-batches to count")
    return ItemCounts.from_tensor(total)
