"""The benchmark of context parallelism: what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_engine.bench.cp import SCHEMA, ContextSection, run
from moe_engine.config.errors import ConfigError


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (ContextSection(links=["200"]), r"bench.links=\[200\]: .* use bench.links=\[local,wire200\]"),
        (ContextSection(links=[]), r"bench.links=\[\]: "),
        (ContextSection(exchanges=["rings"]), r"bench.exchanges=\[rings\]: .* use bench.exchanges=\[ring\]"),
        (ContextSection(payloads=[]), r"bench.payloads=\[\]: there are kv, latent"),
        (ContextSection(cp=1), "bench.cp=1: .* use bench.cp=2"),
        (ContextSection(seq_len=100), "bench.seq_len=100: must be a multiple of 8; use bench.seq_len=2048"),
        (ContextSection(heads=6), "bench.heads=6: ulysses needs a multiple of 4; use bench.heads=8"),
        (
            ContextSection(links=["local", "wire9"], cp=3, seq_len=6, heads=3),
            "bench.seq_len=6: must be a multiple of 12",
        ),
        (
            ContextSection(links=["local", "wire9"], cp=3, seq_len=12, heads=3),
            "bench.heads=3: ulysses .* multiple of 6",
        ),
        (ContextSection(exchanges=["ring", "ring"]), r"bench.exchanges=\[ring,ring\]: .* use bench.exchanges=\[ring\]"),
        (ContextSection(rope=3), "bench.rope=3: .* use bench.rope=16"),
        (ContextSection(rounds=0), "bench.rounds=0: must be 1 or more"),
        (ContextSection(precision="fp8"), "bench.precision=fp8: no such choice; there are fp32 and bf16"),
    ],
)
def test_options_that_cannot_be_are_refused(section: ContextSection, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(SCHEMA(section, str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
