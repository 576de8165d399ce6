"""`moe-engine bench comm`: every candidate is right, and the bytes are those of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_engine.bench import record
from moe_engine.bench.comm import CommBenchConfig, CommSection, run
from moe_engine.bench.comm_rank import Job, choices
from moe_engine.config.errors import ConfigError


def test_a_record_has_every_way_and_its_bytes(tmp_path: Path) -> None:
    bench = CommSection(ranks=2, ranks_per_node=1, tokens=[40], routings=["balanced"], dim=128, num_experts=8, top_k=2)
    bench.rounds = 2
    assert run(CommBenchConfig(bench, str(tmp_path))) == 0
    results = {(result.case, result.candidate): result for result in record.read(tmp_path)}
    assert len(results) == 9 + 4
    by_kernels = {key for key in results if "nvshmem" in key[1]}
    assert all(results[key].verdict.text.startswith("not run: GPUs") and not results[key].samples for key in by_kernels)
    others = [result for key, result in results.items() if key not in by_kernels]
    assert all(len(result.samples) == 2 and result.verdict.passed for result in others)
    job = Job([], [], [], 2, 1, 128, 8, 2, 1)
    ranks = [choices(job, "balanced", 40, rank) // 4 for rank in range(2)]
    rows = [sum(len(set(row)) for row in own.tolist()) for own in ranks]
    dispatch = {name: result.figures["mib"] * 2**20 for (case, name), result in results.items()
                if "dispatch" in case and result.samples}  # fmt: skip
    assert dispatch["undeduplicated"] == pytest.approx(40 * 2 * 128 * 2)
    assert dispatch["all-to-all_bf16"] == pytest.approx(max(rows) * (128 * 2 + 2 * 8))
    assert (
        dispatch["all-to-all_fp8"] == dispatch["all-to-all_fp8-decoded"] == pytest.approx(max(rows) * (128 + 4 + 2 * 8))
    )


def test_natural_choices_are_distinct_experts_of_each_token() -> None:
    ids = choices(Job([], [], [], 4, 2, 8, 64, 8, 1), "natural", 100, 0)
    assert ids.shape == (100, 8) and bool((ids[:, 1:] > ids[:, :-1]).all())
    assert not torch.equal(ids, choices(Job([], [], [], 4, 2, 8, 64, 8, 1), "natural", 100, 1))


def test_wrong_options_are_told_together() -> None:
    bench = CommSection(ranks=1, tokens=[], candidates=["fp4"], rounds=0)
    with pytest.raises(ConfigError) as found:
        run(CommBenchConfig(bench, ""))
    lines = str(found.value).splitlines()
    assert [line.partition("=")[0] for line in lines] == [
        "bench.rounds", "bench.ranks", "bench.tokens", "bench.candidates"
    ]  # fmt: skip
    for changed, message in (
        ({"num_experts": 30}, "bench.num_experts=30: bench.ranks=4 must divide it; use bench.num_experts=32"),
        ({"ranks_per_node": 3}, "bench.ranks_per_node=3: must divide bench.ranks=4; use bench.ranks_per_node=1"),
        ({"routings": []}, r"bench.routings=\[\]: nothing to measure; use bench.routings=\[natural\]"),
        ({"candidates": ["undeduplicated"] * 2}, r"bench.candidates=.*: one is named twice; use .*=\[undeduplicated\]"),
        ({"routings": ["skewed:99"]}, "bench.routings=skewed:99: an expert can have at most"),
        ({"routings": ["replay:x"]}, "bench.routings=replay:x: a recording has a model's sizes"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(CommBenchConfig(CommSection(**changed), ""))
