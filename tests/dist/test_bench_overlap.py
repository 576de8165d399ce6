"""The benchmark of overlap over a real wire between two namespaces, in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_engine.bench import namespaces, record
from moe_engine.bench.overlap import SCHEMA, OverlapSection, run
from moe_engine.bench.overlap_rank import ORDERS
from moe_engine.config.errors import ConfigError


@pytest.mark.slow
@pytest.mark.parametrize("case", ["timed200", "real200"])
def test_every_order_is_measured_and_gives_the_same_losses(case: str, tmp_path: Path) -> None:
    try:
        namespaces.require()
    except ConfigError as error:
        pytest.skip(str(error))
    bench = OverlapSection(cases=[case], micro_batches=3, tokens=64, dim=64, expert_hidden=64, stretch=1, rounds=1)
    assert run(SCHEMA(bench, out=str(tmp_path))) == 0
    results = {result.candidate: result for result in record.read(tmp_path)}
    assert list(results) == list(ORDERS)
    for name, result in results.items():
        assert result.verdict.passed and len(result.samples) == 1
        assert ("hidden_in_pairs" in result.figures) == (name != "plain")
        assert ("compute_s" in result.figures) == (case == "timed200")
    assert (tmp_path / f"{case}.svg").read_text().count("<svg") == 1
