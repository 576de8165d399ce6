"""Records of measurements: written, read back, refused when they are not what they should be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_engine.bench.record import Result, Verdict, read, summarize, table, turns, write
from moe_engine.config.errors import ConfigError


def result(samples: list[float] | None = None, passed: bool = True) -> Result:
    samples = [2.0, 1.0, 4.0, 3.0] if samples is None else samples
    verdict = Verdict(passed, "against the truth", {"off": 1e-6})
    return Result("step", "threads1", "ours", "s1", samples, verdict, {"tokens_per_s": 1234.5}, {"model": {"dim": 8}})


def test_summary_has_median_best_and_the_width_of_the_middle_half() -> None:
    summary = summarize([2.0, 1.0, 4.0, 3.0])
    assert (summary.count, summary.median, summary.best) == (4, 2.5, 1.0)
    assert summary.spread == pytest.approx(1.5 / 2.5)
    assert summarize([2.0]).spread == 0
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_candidates_take_turns_so_that_an_even_drift_cancels() -> None:
    order = list(turns(["a", "b"], 4))
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    places = {name: [i for i, each in enumerate(order) if each == name] for name in "ab"}
    assert sum(places["a"]) == sum(places["b"])
    assert sorted(turns(["a", "b", "c"], 2)) == ["a", "a", "b", "b", "c", "c"]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    results = [result(), replace(result([]), candidate="wrong", verdict=Verdict(False, "off by 2"))]
    write(tmp_path / "b", results, {"cpu": "x"}, "model: {}\n", "# report\n", plot=True)
    assert read(tmp_path / "b") == results == read(tmp_path / "b" / "results.jsonl")
    assert json.loads((tmp_path / "b" / "machine.json").read_text()) == {"cpu": "x"}
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "config.yaml", "machine.json", "plot.svg", "report.md", "results.jsonl",
    ]  # fmt: skip
    write(tmp_path / "b", results[:1], {}, "", "")
    assert read(tmp_path / "b") == results[:1]


@pytest.mark.parametrize(
    "change",
    [
        {"samples": [1.0, -1.0]}, {"samples": "fast"}, {"samples": [1.0, True]}, {"samples": [float("nan")]},
        {"format": 2}, {"candidate": 3}, {"verdict": None}, {"verdict": {"passed": 1, "text": "", "measures": {}}},
        {"surprise": 1},
    ],
)  # fmt: skip
def test_a_damaged_line_is_refused_by_number(tmp_path: Path, change: dict[str, object]) -> None:
    write(tmp_path, [result(), result()], {}, "", "")
    good, line = (tmp_path / "results.jsonl").read_text().splitlines()
    (tmp_path / "results.jsonl").write_text(good + "\n" + json.dumps(json.loads(line) | change) + "\n")
    with pytest.raises(ConfigError, match=r"results\.jsonl:2: not a result in format 1"):
        read(tmp_path)


def test_files_that_are_no_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no results there"):
        read(tmp_path / "nowhere")
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no results in it"):
        read(tmp_path)
    (tmp_path / "results.jsonl").write_text('{"half": ')
    with pytest.raises(ConfigError, match="results.jsonl:1"):
        read(tmp_path)


def test_table_shows_figures_and_who_was_not_timed() -> None:
    text = table([result(), result([], passed=False)], {"tokens_per_s": ",.0f", "mfu": ".1%"})
    first, second = text.splitlines()[2:]
    assert first == "| threads1 | ours | 4 | 2.5 | 1 | 60.0% | 1,234 |  |"
    assert "wrong result" in second
