"""The bigram model: its counts, its probabilities by the formula, its mean over the model's own targets."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.config.errors import ConfigError
from moe_engine.data import baseline
from moe_engine.data.baseline import BigramModel, count_pairs
from moe_engine.data.batches import PackedDataset
from moe_engine.data.tokens import TokenStream, TokenWriter
from moe_engine.ops.loss import IGNORE

V = 5
DOCUMENTS = st.lists(st.lists(st.integers(0, V - 1), max_size=12), max_size=8)


def write(folder: Path, documents: list[list[int]]) -> TokenStream:
    with TokenWriter(folder / "data") as writer:
        for document in documents:
            writer.add_document(document)
    return TokenStream(folder / "data")


def pairs_by_hand(documents: list[list[int]], mask_documents: bool) -> Counter[tuple[int, int]]:
    runs = documents if mask_documents else [[token for document in documents for token in document]]
    return Counter(pair for run in runs for pair in zip(run, run[1:], strict=False))


def probability_by_hand(pairs: Counter[tuple[int, int]], a: int, b: int) -> float:
    """Interpolated Kneser-Ney with a discount of 0.75, read off the formula with loops."""
    before_b = len({x for x, y in pairs if y == b})
    backoff = (before_b + 1) / (len(pairs) + V)
    total = sum(count for (x, _), count in pairs.items() if x == a)
    if total == 0:
        return backoff
    followers = len({y for x, y in pairs if x == a})
    return max(pairs[a, b] - 0.75, 0) / total + 0.75 * followers / total * backoff


@settings(max_examples=50, deadline=None)
@given(documents=DOCUMENTS, mask=st.booleans(), chunk=st.integers(1, 10))
def test_counts_and_probabilities_equal_a_calculation_by_hand(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], mask: bool, chunk: int
) -> None:
    stream = write(tmp_path_factory.mktemp("bigram"), documents)
    pairs = pairs_by_hand(documents, mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baseline, "_CHUNK", chunk)  # borders of chunks anywhere
        counts = count_pairs(stream, V, mask_documents=mask)
    assert {(a, b): int(counts[a, b]) for a, b in np.argwhere(counts)} == dict(pairs)
    table = BigramModel.fit(stream, V, mask_documents=mask).log_probabilities
    for a in range(V):
        for b in range(V):
            assert math.isclose(math.exp(table[a, b]), probability_by_hand(pairs, a, b), rel_tol=1e-12)
    np.testing.assert_allclose(np.exp(table).sum(axis=1), 1.0, rtol=1e-12)


@pytest.mark.parametrize("mask", [True, False])
def test_the_mean_is_over_the_valid_targets_of_the_rows(tmp_path: Path, mask: bool) -> None:
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, V - 1, rng.integers(1, 9)).tolist() + [V - 1] for _ in range(30)]
    stream = write(tmp_path, documents)
    model = BigramModel.fit(stream, V, mask_documents=mask)
    dataset = PackedDataset(stream, seq_len=4, mtp_depth=1, mask_documents=mask)
    batches = [dataset.batch([0, 1, 2]), dataset.batch([5])]
    losses = []
    for row in (0, 1, 2, 5):
        flat = [(token, number) for number, document in enumerate(documents) for token in document]
        for t in range(row * 4, row * 4 + 4):
            (a, of_a), (b, of_b) = flat[t], flat[t + 1]
            if of_a == of_b or not mask:
                losses.append(-math.log(probability_by_hand(pairs_by_hand(documents, mask), a, b)))
    valid = sum(int((batch.labels[0] != IGNORE).sum()) for batch in batches)
    assert len(losses) == valid and (valid == 16) == (not mask)
    assert math.isclose(model.nats_per_target(batches), sum(losses) / len(losses), rel_tol=1e-12)


def test_text_that_repeats_is_predicted_and_new_text_is_never_impossible(tmp_path: Path) -> None:
    stream = write(tmp_path, [[0, 1, 2] * 100])
    model = BigramModel.fit(stream, V)
    assert np.isfinite(model.log_probabilities).all()
    known = PackedDataset(stream, seq_len=30)
    assert model.nats_per_target([known.batch([0])]) < 0.01
    (tmp_path / "new").mkdir()
    unknown = PackedDataset(write(tmp_path / "new", [[4, 3, 4, 0] * 20]), seq_len=30)
    assert model.nats_per_target([unknown.batch([0])]) > math.log(V)


def test_batches_without_a_target_have_no_mean(tmp_path: Path) -> None:
    stream = write(tmp_path, [[1]] * 20)
    model = BigramModel.fit(stream, V)
    with pytest.raises(ValueError, match="no valid target"):
        model.nats_per_target([PackedDataset(stream, seq_len=4).batch([0])])


def test_tokens_outside_the_vocabulary_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.bin: found tokens from 1 to 7, expected 0 to 4 .*vocab_size=5"):
        count_pairs(write(tmp_path, [[1, 7, 2]]), V)


def test_a_vocabulary_too_large_for_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model.vocab_size=129280: .*at most 4096"):
        BigramModel.fit(write(tmp_path, [[1, 2]]), 129280)
