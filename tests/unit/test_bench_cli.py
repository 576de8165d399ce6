"""`moe-engine bench`: what it offers, what it refuses, and the exit codes of a comparison. Nothing is timed."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from moe_engine.__main__ import main
from moe_engine.bench import routing
from moe_engine.bench.record import Result, Verdict, write
from moe_engine.bench.step import _verdict
from moe_engine.cli.bench import BENCHMARKS
from moe_engine.config.load import load
from moe_engine.config.schema import Config


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["bench", *words]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "Traceback" not in output.err
    return output.err.splitlines()


def test_help_lists_the_benchmarks_and_each_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    for name, entry in BENCHMARKS.items():
        assert f"  {name} " in text and entry.summary in text
        assert main(["bench", name, "--help"]) == 0
        own = capsys.readouterr().out
        assert own.startswith(f"usage: moe-engine bench {name} ") and f"\n  moe-engine bench {name} " in own


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "step"])
def test_a_benchmark_without_options_has_the_defaults_that_it_explains(name: str) -> None:
    schema = importlib.import_module(BENCHMARKS[name].module).SCHEMA
    assert load(BENCHMARKS[name].root, [], schema) == schema()


def test_words_that_are_no_benchmark_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "which benchmark?" in refused(capsys)[0]
    assert "did you mean step?" in refused(capsys, "setp")[0]
    assert "the benchmark comes first" in refused(capsys, "experiment=peer_33m", "step")[0]


def test_all_mistakes_in_the_options_of_a_step_are_told_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    lines = refused(
        capsys, "step", "bench.cases=[threads0,ep3]", "bench.rounds=0", "bench.warmup=-1", f"out={tmp_path}/file",
        "model.mtp_depth=1", "model.num_experts=8",
    )  # fmt: skip
    text = "\n".join(lines)
    for part in ("bench.cases=[threads0]", "bench.rounds=0", "bench.warmup=-1", "is a file", "model.mtp_depth=1"):
        assert part in text
    assert "parallel.ep=3" in text  # 8 experts do not divide over 3 ranks
    assert "did you mean bench.rounds?" in refused(capsys, "step", "bench.round=3")[0]
    assert "nothing to measure" in refused(capsys, "step", "bench.cases=[]")[0]


def test_mistakes_in_the_routing_of_a_step_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = refused(capsys, "step", "bench.routing=[balanced,skewed:99,balanced]", "moe.routing=skewed:2")
    shown = "bench.routing=[balanced,skewed:99,balanced]"
    assert told == [
        f"{shown}: natural is measured beside every other; use bench.routing=[natural,balanced]",
        f"{shown}: one is named twice; use bench.routing=[balanced,skewed:99]",
        "moe.routing=skewed:2: use bench.routing=[natural,skewed:2]",
        f"{shown}: an expert can have at most num_experts / top_k = 4 times the mean load, that of every token; "
        "use bench.routing=skewed:4 or less",
    ]
    missing = refused(capsys, "step", f"bench.routing=[natural,replay:{tmp_path}/none]")
    assert missing == [
        f"moe.routing=replay:{tmp_path}/none: no recorded step is there; record one with moe.record_routing=1 and give "
        "runs/<name>/routing/step_1"
    ]


def test_forced_loads_are_checked() -> None:
    config = Config()  # 4 x 256 tokens, 4 of 16 experts each: 256 for each expert and micro-batch
    measured = [routing.verdict(config, "skewed:2", (5.0, 1.0), {"expert_load": load}) for load in (2.0, 2.005, 2.1)]
    assert [each.passed for each in measured] == [True, True, False]
    assert "2.100 times the mean (asked: 2, at most 0.008 off)" in measured[2].text
    assert not routing.verdict(config, "balanced", (float("inf"), 1.0), {"expert_load": 1.0}).passed


def results(folder: Path, factor: float) -> str:
    samples = [factor * (1 + 0.001 * i) for i in range(10)]
    write(folder, [Result("step", "threads1", "moe_engine", folder.name, samples, Verdict(True, ""))], {}, "", "")
    return str(folder)


def test_a_regression_is_exit_code_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a, b = results(tmp_path / "a", 1.0), results(tmp_path / "b", 1.1)
    assert main(["bench", f"compare=[{a},{b}]", "bound=1.05"]) == 1
    assert "REGRESSION" in capsys.readouterr().out
    assert main(["bench", f"compare=[{a},{b}]", "bound=1.2"]) == 0
    assert "slower, within the bound" in capsys.readouterr().out
    assert main(["bench", f"compare=[{b},{a}]"]) == 0
    assert "faster" in capsys.readouterr().out


def test_comparisons_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a = results(tmp_path / "a", 1.0)
    lines = refused(capsys, f"compare=[{a}]", "bound=0.5")
    assert "two results are compared" in lines[0] and "1 or more, for example bound=1.05" in lines[1]
    assert "no results there" in refused(capsys, f"compare=[{a},{tmp_path}/none]")[0]
    assert "no such option" in refused(capsys, f"compare=[{a},{a}]", "limit=2")[0]


def test_a_candidate_is_wrong_when_its_first_step_is() -> None:
    firsts = {"plain_fp32": (7.6, 1.0), "moe_engine": (7.601, 1.01), "off": (7.7, 1.0), "bad": (float("nan"), 1.0)}
    passed = {name: _verdict(name, firsts).passed for name in firsts}
    assert passed == {"plain_fp32": True, "moe_engine": True, "off": False, "bad": False}
    assert "first loss 7.7000 is off by 1.3e-02" in _verdict("off", firsts).text
    assert not _verdict("moe_engine", {"moe_engine": (float("nan"), 1.0)}).passed


def test_without_peers_another_recipe_is_compared_with_the_engines_own() -> None:
    firsts = {"moe_engine": (7.6, 1.0), "moe_engine fp8": (7.61, 1.01), "moe_engine fp32": (7.7, 1.0)}
    assert [_verdict(name, firsts).passed for name in firsts] == [True, True, False]
    assert "checked against moe_engine" in _verdict("moe_engine fp8", firsts).text


@pytest.mark.parametrize("recipes", ["bf16", "fp8,fp8", "fp7"])
def test_recipes_beside_the_own_are_checked(recipes: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "step", f"bench.precisions=[{recipes}]")
    assert told == [
        f"bench.precisions=[{recipes}]: must be recipes beside precision=bf16, each once; use bench.precisions=[fp8]"
    ]
