"""The benchmark of overlap without a wire: what its figures mean, its picture, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from moe_engine.bench.overlap import SCHEMA, OverlapSection, run
from moe_engine.bench.overlap_picture import bars, draw
from moe_engine.bench.overlap_times import exchange_times, total
from moe_engine.config.errors import ConfigError

# One pair, [F1&B0], of a step of two micro-batches: its exchanges inside, those of F0 and B1 outside.
EVENTS = [
    ("F0@0 dispatch 0", 0.0, 1.0), ("F0@0 dispatch 0 wait", 0.0, 1.0),
    ("B0@0 combine 0 start", 10.0, 10.1), ("B0@0 combine 0", 10.0, 12.0), ("F1@0 attn 0", 10.1, 11.5),
    ("B0@0 combine 0 wait", 11.5, 12.0), ("F1@0 dispatch 0", 11.6, 14.0), ("F1@0 dispatch 0 wait", 13.9, 14.0),
    ("B0@0 dispatch 0 start", 13.0, 13.4), ("B0@0 dispatch 0", 13.4, 15.0), ("B0@0 dispatch 0 wait", 15.0, 15.0),
    ("B1@0 combine 0", 20.0, 23.0), ("B1@0 combine 0 wait", 20.0, 23.0),
]  # fmt: skip


def test_exchanges_inside_and_outside_of_pairs_are_told_apart() -> None:
    """The other rank comes later: 0.3 to its combine(B) of the pair, 3.1 to the end of its attn(F)."""
    peer = [(label, start + (0.3 if "combine 0" in label else 0.0), end) for label, start, end in EVENTS]
    peer = [(label, start, 13.2 if label == "F1@0 attn 0" else end) for label, start, end in peer]
    times = exchange_times(EVENTS, peer, micro_batches=2, blocks=1)
    assert dict(times.flight) == {
        "combine(B)": [pytest.approx(1.7)], "dispatch(F)": [pytest.approx(2.4)], "dispatch(B)": [pytest.approx(1.6)],
    }  # fmt: skip
    # Of the enqueueing of dispatch(B), 0.2 are after the counts of the pair's dispatch(F) were sent.
    assert dict(times.still) == {
        "combine(B)": [pytest.approx(0.6)], "dispatch(F)": [pytest.approx(0.1)], "dispatch(B)": [pytest.approx(0.2)],
    }  # fmt: skip
    assert times.flight_outside == times.still_outside == pytest.approx(1.0 + 2.7)
    assert times.late == pytest.approx(0.2 + 0.3)
    assert total([times, times], "flight") == pytest.approx(1.7 + 2.4 + 1.6)


def test_the_picture_shows_one_pair(tmp_path: Path) -> None:
    assert bars(EVENTS, micro_batch=1) == [
        (0, "combine", "combine 0", 10.0, 12.0),
        (3, "attn", "attn 0", 10.1, 11.5),
        (0, "wait", "", 11.5, 12.0),
        (1, "dispatch", "dispatch 0", 11.6, 14.0),
        (1, "wait", "", 13.9, 14.0),
        (0, "dispatch", "dispatch 0", 13.4, 15.0),
    ]
    path = tmp_path / "pair.svg"
    draw({"overlapped": EVENTS, "plain": []}, path, "title")
    assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_all_that_is_wrong_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bench = OverlapSection(cases=["timed0", "slow"], micro_batches=1, tokens=6, precision="fp16", stretch=0)
    with pytest.raises(ConfigError) as error:
        run(SCHEMA(bench, out=str(tmp_path / "file")))
    assert [line.partition("=")[0] for line in str(error.value).splitlines()] == [
        "bench.micro_batches", "bench.cases", "bench.cases", "bench.precision", "bench.tokens", "bench.stretch", "out",
    ]  # fmt: skip
