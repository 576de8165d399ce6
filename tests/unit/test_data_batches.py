"""Packed rows: a hand-written example, a brute-force reading of the definition, and the cut over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.config.errors import ConfigError
from moe_engine.data.batches import PackedDataset, micro_batches
from moe_engine.data.tokens import TokenStream, TokenWriter
from moe_engine.model.batch import Batch, count_items
from moe_engine.ops.loss import IGNORE

END = 99
HAND_WRITTEN = [[10, 11, 12, END], [20, 21, END], [30, 31, 32, 33, END]]
X = IGNORE

Write = Callable[[list[list[int]]], TokenStream]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    def stream(documents: list[list[int]]) -> TokenStream:
        prefix: Path = tmp_path_factory.mktemp("stream") / "data"
        with TokenWriter(prefix) as writer:
            for document in documents:
                writer.add_document(document)
        return TokenStream(prefix)

    return stream


def counting(write: Write, num_tokens: int) -> TokenStream:
    """One document whose tokens are their own places: tokens[0][b, 0] tells the row."""
    return write([list(range(num_tokens))])


def rows_of(batches: list[Batch], seq_len: int) -> list[int]:
    return [int(first) // seq_len for batch in batches for first in batch.tokens[0][:, 0]]


def test_packed_documents_by_hand(write: Write) -> None:
    dataset = PackedDataset(write(HAND_WRITTEN), seq_len=6, mtp_depth=2)
    assert dataset.num_rows == 1
    batch = dataset.batch([0])
    assert batch.tokens[:, 0].tolist() == [
        [10, 11, 12, END, 20, 21],
        [11, 12, END, 20, 21, END],
        [12, END, 20, 21, END, 30],
    ]
    assert batch.labels[:, 0].tolist() == [
        [11, 12, END, X, 21, END],
        [12, END, X, X, END, X],
        [END, X, X, X, X, X],
    ]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 1, 1]]
    assert batch.token_mask is None
    assert (batch.tokens.dtype, batch.labels.dtype, batch.positions.dtype) == (torch.int64,) * 3
    assert batch.document_ids.dtype == torch.int32


def test_rows_start_anew_inside_a_document(write: Write) -> None:
    batch = PackedDataset(write(HAND_WRITTEN), seq_len=3, mtp_depth=1).batch([2, 1, 0])
    assert batch.tokens[0].tolist() == [[END, 30, 31], [END, 20, 21], [10, 11, 12]]
    assert batch.labels[0].tolist() == [[X, 31, 32], [X, 21, END], [11, 12, END]]
    assert batch.labels[1].tolist() == [[X, 32, 33], [X, END, X], [12, END, X]]
    assert batch.positions.tolist() == [[0, 0, 1], [0, 0, 1], [0, 1, 2]]
    assert batch.document_ids.tolist() == [[0, 1, 1], [0, 1, 1], [0, 0, 0]]


def test_without_masking_a_row_is_one_document(write: Write) -> None:
    batch = PackedDataset(write(HAND_WRITTEN), seq_len=5, mtp_depth=1, mask_documents=False).batch([0, 1])
    assert batch.labels[0].tolist() == [[11, 12, END, 20, 21], [END, 30, 31, 32, 33]]
    assert batch.labels[1].tolist() == [[12, END, 20, 21, END], [30, 31, 32, 33, END]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch.document_ids.tolist() == [[0] * 5] * 2
    assert count_items([batch]).tokens == 10 and count_items([batch]).mtp == (10,)


def read_by_definition(documents: list[list[int]], row: int, seq_len: int, depth: int) -> list[list[tuple[int, ...]]]:
    """One place at a time: (token, label) of every depth, and (position, document id)."""
    flat = [(token, number) for number, document in enumerate(documents) for token in document]
    start = row * seq_len
    present = sorted({flat[start + t][1] for t in range(seq_len)})
    result = []
    for t in range(start, start + seq_len):
        pairs: list[tuple[int, ...]] = []
        for k in range(depth + 1):
            target, owner = flat[t + k + 1]
            pairs.append((flat[t + k][0], target if owner == flat[t][1] else IGNORE))
        same = [place for place in range(start, t + 1) if flat[place][1] == flat[t][1]]
        result.append([*pairs, (t - same[0], present.index(flat[t][1]))])
    return result


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    seq_len=st.integers(1, 8),
    depth=st.integers(0, 3),
    data=st.data(),
)
def test_any_packing_is_what_the_definition_says(
    write: Write, lengths: list[int], seq_len: int, depth: int, data: st.DataObject
) -> None:
    tokens = iter(range(200))
    documents = [[next(tokens) for _ in range(length)] for length in lengths]  # empty documents too
    num_rows = (sum(lengths) - 1 - depth) // seq_len
    if num_rows < 1:
        with pytest.raises(ConfigError, match="fewer than one row"):
            PackedDataset(write(documents), seq_len=seq_len, mtp_depth=depth)
        return
    dataset = PackedDataset(write(documents), seq_len=seq_len, mtp_depth=depth)
    assert dataset.num_rows == num_rows
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=4))
    batch = dataset.batch(rows)
    for b, row in enumerate(rows):
        for t, expected in enumerate(read_by_definition(documents, row, seq_len, depth)):
            pairs = [(int(batch.tokens[k, b, t]), int(batch.labels[k, b, t])) for k in range(depth + 1)]
            assert [*pairs, (int(batch.positions[b, t]), int(batch.document_ids[b, t]))] == expected


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_every_token_is_the_input_of_one_row_but_the_last_few(write: Write, depth: int) -> None:
    dataset = PackedDataset(counting(write, 103), seq_len=8, mtp_depth=depth)
    inputs = dataset.batch(dataset.fixed_rows(dataset.num_rows)).tokens[0].flatten().tolist()
    assert inputs == list(range(len(inputs)))
    assert 103 - (8 + 1 + depth) < len(inputs) <= 103 - 1 - depth


def test_documents_longer_than_a_row_and_large_streams(write: Write) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 256, rng.integers(1, 3000)).tolist() + [256] for _ in range(60)]
    stream = write(documents)
    dataset = PackedDataset(stream, seq_len=256, mtp_depth=1)
    batch = dataset.batch(dataset.fixed_rows(dataset.num_rows))
    assert batch.document_ids.shape == (dataset.num_rows, 256)
    starts = [0, *np.cumsum([len(document) for document in documents])[:-1].tolist()]
    inside = [start for start in starts if start < dataset.num_rows * 256]
    begins = batch.document_ids.diff(dim=1, prepend=torch.full((dataset.num_rows, 1), -1)) != 0
    assert begins.flatten().nonzero().flatten().tolist() == sorted({*inside, *range(0, dataset.num_rows * 256, 256)})
    ends = batch.tokens[0] == 256
    assert (batch.labels[0][ends] == IGNORE).all()  # nothing follows an end in its own document
    assert (batch.labels[0] == IGNORE).sum() == ends.sum()


# --- order over steps and ranks ---


@settings(max_examples=25, deadline=None)
@given(
    micro_batch=st.integers(1, 3),
    dp_size=st.integers(1, 4),
    pieces=st.integers(1, 3),
    step=st.integers(0, 50),
    seed=st.integers(0, 1000),
    num_rows=st.integers(1, 40),
)
def test_ranks_and_micro_batches_cut_the_same_rows_in_the_same_order(
    write: Write, micro_batch: int, dp_size: int, pieces: int, step: int, seed: int, num_rows: int
) -> None:
    dataset = PackedDataset(counting(write, num_rows * 4 + 2), seq_len=4, mtp_depth=1, seed=seed)
    global_batch = micro_batch * dp_size * pieces
    cut = [
        micro_batches(dataset, step, global_batch=global_batch, micro_batch=micro_batch, dp_rank=rank, dp_size=dp_size)
        for rank in range(dp_size)
    ]
    assert [len(batches) for batches in cut] == [pieces] * dp_size
    assert all(batch.shape == (micro_batch, 4) for batches in cut for batch in batches)
    whole = micro_batches(dataset, step, global_batch=global_batch, micro_batch=global_batch, dp_rank=0, dp_size=1)
    assert rows_of([batch for batches in cut for batch in batches], 4) == rows_of(whole, 4)
    assert rows_of(whole, 4) == dataset.rows(step, global_batch).tolist()


def test_every_row_comes_once_an_epoch_and_epochs_roll_over_inside_a_step(write: Write) -> None:
    dataset = PackedDataset(counting(write, 10 * 4 + 1), seq_len=4, seed=5)
    assert dataset.num_rows == 10
    stream = [
        row
        for step in range(15)
        for rank in range(2)
        for row in rows_of(micro_batches(dataset, step, global_batch=6, micro_batch=1, dp_rank=rank, dp_size=2), 4)
    ]
    epochs = [stream[start : start + 10] for start in range(0, 90, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 9


def test_other_batch_sizes_read_the_same_endless_order(write: Write) -> None:
    dataset = PackedDataset(counting(write, 11 * 4 + 1), seq_len=4, seed=5)
    by_four = np.concatenate([dataset.rows(step, 4) for step in range(6)])
    by_eight = np.concatenate([dataset.rows(step, 8) for step in range(3)])
    assert by_four.tolist() == by_eight.tolist()


def test_the_seed_changes_the_order_and_nothing_else(write: Write) -> None:
    stream = counting(write, 30 * 4 + 1)
    first, second = (PackedDataset(stream, seq_len=4, seed=seed) for seed in (0, 1))
    assert first.rows(0, 30).tolist() != second.rows(0, 30).tolist()
    assert torch.equal(first.batch([3, 7]).tokens, second.batch([3, 7]).tokens)
    again = PackedDataset(stream, seq_len=4, seed=0)
    assert first.rows(7, 13).tolist() == again.rows(7, 13).tolist()


def test_fixed_rows_are_the_first_in_plain_order(write: Write) -> None:
    dataset = PackedDataset(counting(write, 10 * 4 + 1), seq_len=4, name="validation")
    assert dataset.fixed_rows(3).tolist() == [0, 1, 2]
    assert rows_of([dataset.batch(dataset.fixed_rows(10))], 4) == list(range(10))
    with pytest.raises(ConfigError, match="train.eval_sequences=11: the validation text has only 10 rows.*<=10"):
        dataset.fixed_rows(11)


# --- refusals ---


def test_text_shorter_than_a_row_names_lengths_that_work(write: Write) -> None:
    stream = counting(write, 100)
    with pytest.raises(
        ConfigError, match="train.seq_len=256: the train text has 100 tokens.*= 258; .*seq_len=98 or less"
    ):
        PackedDataset(stream, seq_len=256, mtp_depth=1)
    assert PackedDataset(stream, seq_len=98, mtp_depth=1).num_rows == 1
    with pytest.raises(ConfigError, match="validation text has 0 tokens.*give more text"):
        PackedDataset(write([]), seq_len=4, name="validation")


@pytest.mark.parametrize(("seq_len", "depth"), [(0, 0), (4, -1)])
def test_sizes_that_make_no_row_are_refused(write: Write, seq_len: int, depth: int) -> None:
    with pytest.raises(ConfigError, match=f"train.seq_len={seq_len}, model.mtp_depth={depth}"):
        PackedDataset(counting(write, 50), seq_len=seq_len, mtp_depth=depth)


@pytest.mark.parametrize(("global_batch", "works"), [(10, 8), (3, 4), (0, 4)])
def test_a_batch_that_does_not_divide_names_one_that_does(write: Write, global_batch: int, works: int) -> None:
    dataset = PackedDataset(counting(write, 50), seq_len=4)
    with pytest.raises(ConfigError, match=f"train.global_batch={global_batch}: .*for example {works}"):
        micro_batches(dataset, 0, global_batch=global_batch, micro_batch=2, dp_rank=0, dp_size=2)
    assert micro_batches(dataset, 0, global_batch=works, micro_batch=2, dp_rank=0, dp_size=2)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_layout_is_refused(write: Write, rank: int) -> None:
    dataset = PackedDataset(counting(write, 50), seq_len=4)
    with pytest.raises(ValueError, match=f"dp_rank={rank}"):
        micro_batches(dataset, 0, global_batch=4, micro_batch=2, dp_rank=rank, dp_size=2)


@pytest.mark.parametrize("rows", [[-1], [0, 12]])
def test_a_row_that_is_not_there_is_refused(write: Write, rows: list[int]) -> None:
    dataset = PackedDataset(counting(write, 49), seq_len=4)
    assert dataset.num_rows == 12
    with pytest.raises(IndexError, match="of 12"):
        dataset.batch(rows)


# --- counting what is valid ---


def test_items_are_counted_by_depth_over_ragged_rows(write: Write) -> None:
    dataset = PackedDataset(write(HAND_WRITTEN), seq_len=3, mtp_depth=2)
    assert dataset.num_rows == 3
    batches = [dataset.batch([0]), dataset.batch([1]), dataset.batch([2])]
    counts = count_items(batches)
    assert (counts.tokens, counts.mtp, counts.sequences) == (3 + 2 + 2, (2 + 1 + 2, 1 + 0 + 2), 3)
    assert count_items([dataset.batch([0, 1, 2])]) == counts


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=8, max_size=30), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.booleans()
)
def test_shards_of_rows_are_what_is_cut_from_whole_ones(
    write: Write, lengths: list[int], shards: int, chunk: int, mask: bool
) -> None:
    """Tokens, MTP targets over the shards' borders, positions and documents; put together they are the row."""
    seq_len, depth = 2 * shards * chunk, 2
    if sum(lengths) < seq_len + 1 + depth:
        lengths = [*lengths, seq_len + depth]
    stream = write([list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)])
    dataset = PackedDataset(stream, seq_len=seq_len, mtp_depth=depth, mask_documents=mask)
    rows = list(range(min(dataset.num_rows, 3)))
    whole, put_together = dataset.batch(rows), torch.full((3, len(rows), seq_len), -1)
    for shard in range(shards):
        read, cut = dataset.batch(rows, shard, shards), whole.share(shard, shards)
        for name in ("tokens", "labels", "positions", "document_ids"):
            assert torch.equal(getattr(read, name), getattr(cut, name)), name
        if shards > 1:
            assert read.shard is not None and cut.shard is not None
            assert torch.equal(read.shard.documents, cut.shard.documents)
            assert torch.equal(read.shard.valid, cut.shard.valid)
            put_together[..., read.shard.places()] = read.tokens
    assert shards == 1 or torch.equal(put_together, whole.tokens)
    counted = [count_items([whole.share(shard, shards)]).as_tensor() for shard in range(shards)]
    assert torch.equal(torch.stack(counted).sum(dim=0), count_items([whole]).as_tensor())


def test_a_shard_reads_only_its_tokens(write: Write) -> None:
    dataset = PackedDataset(counting(write, 70), seq_len=64, mtp_depth=1)
    whole, read = dataset.stream.tokens, set[int]()

    class Watched:
        def __getitem__(self, places: slice) -> object:
            read.update(range(places.start, places.stop))
            return whole[places]

    dataset.stream.tokens = Watched()  # type: ignore[assignment]
    dataset.batch([0], shard=1, shards=4)
    assert read == {*range(8, 18), *range(48, 58)}  # two chunks of 8, each with the two tokens after it
