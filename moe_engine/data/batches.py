"""Packed rows as tensors: what a step's micro-batches are made of.

The documents of a stream lie end to end, and row i is S tokens from place i·S on, with the 1 + D tokens after
them as targets and as inputs of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2). So every token
is the main input of exactly one row, but for fewer than S + 1 + D at the very end. The borders of documents travel
along: positions restart there, attention is masked by `document_ids`, and a target in another document is not valid
(section 4.1 packs in the same way). Which rows a step gets depends on the seed and the step only: the global batch is
cut by data-parallel rank and then in micro-batches, in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from moe_engine.config.errors import ConfigError
from moe_engine.data.order import RowIndices, ordered_rows
from moe_engine.data.tokens import TokenStream
from moe_engine.layout import shard_chunks
from moe_engine.model.batch import Batch, Shard
from moe_engine.ops.loss import IGNORE


class PackedDataset:
    """Rows of `seq_len` tokens out of a stream of documents, in an order that needs no state.

    stream          the documents; an end-of-document token is theirs to have
    seq_len         S
    mtp_depth       D
    mask_documents  True: a target counts only if it lies in the document of its row's token t, whatever the depth.
                    False: the row is one document, every target counts
    seed            of the order of the rows
    name            what the stream is called in messages

    Raises `ConfigError` when the stream is shorter than one row.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        seq_len: int,
        mtp_depth: int = 0,
        mask_documents: bool = True,
        seed: int = 0,
        name: str = "train",
    ) -> None:
        if seq_len < 1 or mtp_depth < 0:
            raise ConfigError(
                f"train.seq_len={seq_len}, model.mtp_depth={mtp_depth}: need seq_len >= 1 and mtp_depth >= 0, "
                "for example 256 and 1"
            )
        self.stream, self.name = stream, name
        self.seq_len, self.mtp_depth, self.mask_documents, self.seed = seq_len, mtp_depth, mask_documents, seed
        longest = stream.num_tokens - 1 - mtp_depth
        if longest < seq_len:
            remedy = f"use train.seq_len={longest} or less, or more text" if longest > 0 else "give more text"
            raise ConfigError(
                f"train.seq_len={seq_len}: the {name} text has {stream.num_tokens} tokens, fewer than one row of "
                f"seq_len + 1 + model.mtp_depth = {seq_len + 1 + mtp_depth}; {remedy} in data.text_paths"
            )
        self.num_rows = longest // seq_len

    def rows(self, step: int, global_batch: int, *, start: int = 0, stop: int | None = None) -> RowIndices:
        """The rows of a step, of all ranks together, [global_batch]; or only places start … stop - 1 of them.

        A step may run over the end of an epoch; the next epoch's order then goes on in it.
        """
        stop = global_batch if stop is None else stop
        return ordered_rows(step * global_batch + start, stop - start, num_rows=self.num_rows, seed=self.seed)

    def fixed_rows(self, count: int) -> RowIndices:
        """The first `count` rows in plain order, [count], as validation wants them.

        Raises `ConfigError` if there are fewer.
        """
        if count > self.num_rows:
            raise ConfigError(
                f"train.eval_sequences={count}: the {self.name} text has only {self.num_rows} rows of "
                f"{self.seq_len} tokens; use train.eval_sequences<={self.num_rows}, more text, "
                "or a larger data.validation_fraction"
            )
        return np.arange(count, dtype=np.int64)

    def batch(self, row_indices: Sequence[int] | RowIndices, shard: int = 0, shards: int = 1) -> Batch:
        """The given rows as a batch, B = len(row_indices), or one shard of their tokens (context parallelism).

        Of the stream only the shard's tokens are read, with what follows each of its two chunks as targets. Raises
        `IndexError` for a row that is not there, `ValueError` where a row has no 2 · shards equal chunks.
        """
        rows = np.asarray(row_indices, dtype=np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.num_rows):
            raise IndexError(f"rows {rows.min()} … {rows.max()} of {self.num_rows}")
        chunks = (range(self.seq_len),) if shards == 1 else shard_chunks(self.seq_len, shards, shard)
        depths = range(1 + self.mtp_depth)
        starts = rows * self.seq_len
        documents, document_starts = self._documents(starts)
        windows = [(chunk, self._window(starts, chunk)) for chunk in chunks]
        tokens = [np.stack([window[:, k : k + len(chunk)] for k in depths]) for chunk, window in windows]
        labels = [np.stack([window[:, k + 1 : k + 1 + len(chunk)] for k in depths]) for chunk, window in windows]
        own = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
        targets = np.concatenate(labels, axis=2)
        for k in depths:
            targets[k][documents[:, own + k + 1] != documents[:, own]] = IGNORE
        return Batch(
            torch.from_numpy(np.concatenate(tokens, axis=2)),
            torch.from_numpy(targets),
            torch.from_numpy(own - document_starts[:, own]),
            torch.from_numpy(documents[:, own].astype(np.int32)),
            shard=None if shards == 1 else self._shard(shard, shards, documents),
        )

    def _window(self, starts: RowIndices, chunk: range) -> npt.NDArray[np.int64]:
        """The tokens of a chunk of each row and those that follow, [B, chunk + 1 + D]."""
        width = len(chunk) + 1 + self.mtp_depth
        tokens = np.empty((len(starts), width), dtype=np.int64)
        for b, start in enumerate(starts + chunk.start):
            tokens[b] = self.stream.tokens[start : start + width]
        return tokens

    def _documents(self, starts: RowIndices) -> tuple[RowIndices, RowIndices]:
        """Of the rows with their look-ahead, [B, S + 1 + D] each: which document, and the place where it begins."""
        width = self.seq_len + 1 + self.mtp_depth
        begins = np.zeros((len(starts), width), dtype=np.int64)  # 1 where a document starts inside the row
        offsets = self.stream.document_offsets
        first = np.searchsorted(offsets, starts, side="right")
        last = np.searchsorted(offsets, starts + width, side="left")
        for b, start in enumerate(starts if self.mask_documents else ()):
            begins[b, offsets[first[b] : last[b]] - start] = 1
        document_starts = np.maximum.accumulate(np.where(begins, np.arange(width), 0), axis=1)
        return np.cumsum(begins, axis=1), document_starts

    def _shard(self, shard: int, shards: int, documents: RowIndices) -> Shard:
        """What a rank keeps of whole rows: borders of documents are no tokens, and known without reading any."""
        valid = torch.full((len(documents),), self.seq_len)
        return Shard(shard, shards, torch.from_numpy(documents[:, : self.seq_len].astype(np.int32)), valid)


def micro_batches(
    dataset: PackedDataset,
    step: int,
    *,
    global_batch: int,
    micro_batch: int,
    dp_rank: int,
    dp_size: int,
    shard: int = 0,
    shards: int = 1,
) -> list[Batch]:
    """The micro-batches of one data-parallel rank for one step, in order; of their rows one of `shards` shards.

    Rank r takes rows r · global_batch / dp_size … of the step's rows, and cuts them in pieces of `micro_batch`.
    Raises `ConfigError` when the pieces are not whole.
    """
    if min(global_batch, micro_batch) < 1 or global_batch % (micro_batch * dp_size):
        unit = max(micro_batch, 1) * dp_size
        raise ConfigError(
            f"train.global_batch={global_batch}: must be a multiple of train.micro_batch={micro_batch} times "
            f"parallel.dp={dp_size}, for example {max(global_batch // unit, 1) * unit}"
        )
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank={dp_rank}: must be one of the {dp_size} data-parallel ranks")
    share = global_batch // dp_size
    rows = dataset.rows(step, global_batch, start=dp_rank * share, stop=(dp_rank + 1) * share)
    whole = dataset.batch(rows, shard, shards)
    return [whole.slice_rows(start, start + micro_batch) for start in range(0, share, micro_batch)]
