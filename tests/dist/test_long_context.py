"""Long sequences over ranks: memory falls with the number of ranks, and what was read far away is found."""

from __future__ import annotations

import math

import pytest
import torch
from needle import VALUES, learn
from ranks import run_ranks

from moe_engine.bench.live_memory import LivePeak
from moe_engine.config.load import load
from moe_engine.config.schema import Config
from moe_engine.config.validate import resolve, validate
from moe_engine.model.batch import Batch
from moe_engine.trainer import Trainer


def long_context(cp: int, seq_len: int) -> Config:
    words = ["experiment=long_context_32k", f"parallel.cp={cp}", f"parallel.ep={cp}", f"train.seq_len={seq_len}"]
    config = load("train", words)
    validate(config, cp)
    return resolve(config, cp)


def row(seq_len: int) -> Batch:
    """Two packed documents, the border in the middle of a shard."""
    chance = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 257, (1, 1, seq_len + 1), generator=chance)
    place, border = torch.arange(seq_len)[None], seq_len // 16 * 5 + 3
    documents = (place >= border).int()
    return Batch(tokens[..., :-1], tokens[..., 1:], place - documents * border, documents)


def _peak(rank: int, config: Config) -> tuple[int, int]:
    """Of a step: the peak of what its tensors hold, and the longest pair of dimensions of one tensor."""
    trainer = Trainer(config, rank, torch.device("cpu"))
    cp = trainer.groups.cp
    batch = row(config.train.seq_len).share(cp.rank, cp.size)
    with LivePeak() as live:
        trainer.step([batch])
    return live.peak, live.longest_pair


def check_memory(seq_len: int, time_limit: float) -> None:
    peaks = {}
    for cp in (1, 2, 4):
        found = run_ranks(cp, _peak, long_context(cp, seq_len), time_limit=time_limit)
        peaks[cp] = max(peak for peak, _ in found)
        assert max(pair for _, pair in found) < seq_len // 4, "a tensor has two dimensions as long as a sequence"
    print({cp: f"{peak / 2**20:.1f} MiB" for cp, peak in peaks.items()})
    assert peaks[2] <= 0.6 * peaks[1] and peaks[4] <= 0.35 * peaks[1], peaks


def test_memory_of_a_rank_falls_with_the_number_of_ranks() -> None:
    check_memory(8192, time_limit=240.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_of_a_rank_at_32k() -> None:
    check_memory(32768, time_limit=500.0)


def test_a_needle_is_found_by_several_ranks() -> None:
    losses = learn(128, cp=2, steps=90, time_limit=240.0)
    assert sum(losses[-8:]) / 8 < 0.5 * math.log(VALUES), losses[::8]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_needle_in_2048_tokens_is_found_by_four_ranks() -> None:
    losses = learn(2048, cp=4, steps=90, time_limit=500.0)
    assert sum(losses[-8:]) / 8 < 0.5 * math.log(VALUES), losses[::8]
