"""The benchmark of context parallelism on two small ranks: each candidate is right, and sends what the formula says."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_engine.bench import record
from moe_engine.bench.cp import SCHEMA, ContextSection, run


@pytest.mark.slow
def test_every_exchange_and_payload_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = ContextSection(cp=2, links=["local"], seq_len=256, dim=32, heads=4, rounds=2)
    assert run(SCHEMA(section, str(tmp_path))) == 0
    results = record.read(tmp_path)
    assert len(results) == 6 and all(len(result.samples) == 2 for result in results)
    for result in results:
        assert result.verdict.measures["difference"] < 1e-5
        assert (
            result.figures["sent_mib"] == pytest.approx(result.figures["formula_mib"])
            and result.figures["peak_mib"] > 0
        )
    sent = {result.candidate: result.figures["sent_mib"] for result in results}
    assert sent["ring_kv"] / sent["ring_latent"] == pytest.approx(4 * (48 + 32) / (64 + 16))
    shown = capsys.readouterr().out
    assert all(f"* {exchange}: " in shown for exchange in ("ring", "all_gather", "ulysses"))
