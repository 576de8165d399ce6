"""The search finds what planning every layout finds, in the same order every time, and its answer can be trained."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from moe_engine.__main__ import main
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import load
from moe_engine.config.schema import Config
from moe_engine.config.validate import validate
from moe_engine.layout import Layout
from moe_engine.planner import search as searching
from moe_engine.planner.answer import answer, room
from moe_engine.planner.architecture import Architecture
from moe_engine.planner.hardware import ClusterConfig, Efficiency
from moe_engine.planner.request import Request
from moe_engine.planner.search import Found, Result, search, why
from moe_engine.planner.strategy import Strategy

MODEL = Architecture(
    32000, 2048, 16, frozenset({0}), 8192, 16, 16, 128, 128, num_experts=32, top_k=4, expert_hidden=1024,
    shared_hidden=1024,
)  # fmt: skip
CLUSTER = ClusterConfig(gpus=16)
REQUEST = Request(MODEL, Strategy(Layout(dp=16), micro_batches=8, seq_len=2048), CLUSTER, 1.0, "engine")


def everything() -> list[Found]:
    """Every candidate planned in full, the best variant of each layout, fastest first."""
    kept: dict[object, Found] = {}
    for _, strategy in searching._candidates(REQUEST, Efficiency()):
        try:
            found = Found(answer(Request(MODEL, strategy, CLUSTER, 1.0, "engine"), Efficiency()))
        except ConfigError:
            continue
        if found.answer.peak_bytes <= room(CLUSTER) and found.seconds < kept.get(found.key, found).seconds + 1e-15:
            kept[found.key] = found
    return sorted(kept.values(), key=lambda found: found.seconds)


@pytest.fixture(scope="module")
def result() -> Result:
    return search(REQUEST, Efficiency())


@pytest.mark.slow
def test_the_bound_misses_nothing(result: Result) -> None:
    assert result.planned < result.candidates / 2
    assert [found.seconds for found in result.best] == [found.seconds for found in everything()[: searching.KEPT]]


def test_the_result_is_the_same_again(result: Result) -> None:
    assert [found.key for found in result.best] == [found.key for found in search(REQUEST, Efficiency()).best]


def test_every_loser_has_a_reason(result: Result) -> None:
    reasons = [why(found, result.best[0]) for found in result.best]
    assert reasons[0] == "the fastest"
    assert all(reason.startswith("+") and ":" in reason for reason in reasons[1:])


@pytest.mark.parametrize(
    ("gpus", "memory_gb", "batch", "message"),
    [
        (2, 8.0, 8, r"cluster.gpus=2: no layout of \d+ fits on H100 with 4 GB for tensors; use cluster.gpus=4, or"),
        (2, 4.01, 8, r"the least that a card needs, on up to 8192 of them, is 0\.\d+ GB; use a card with more memory"),
        (7, 80.0, 32, r"train.global_batch=32: no layout of 7 cards shares it out .*; use train.global_batch=35"),
    ],
)
def test_nothing_fits_and_what_would(gpus: int, memory_gb: float, batch: int, message: str) -> None:
    dense = Architecture(32000, 2048, 8, 8, 8192, 2, 2, 128, 128)
    cluster = ClusterConfig(gpus=gpus, memory_gb=memory_gb)
    request = Request(dense, Strategy(micro_batches=batch, seq_len=2048), cluster, 1.0, "engine")
    with pytest.raises(ConfigError, match=message) as refusal:
        search(request, Efficiency())
    for named in re.findall(r"use cluster.gpus=(\d+)", str(refusal.value)):
        assert search(replace(request, cluster=replace(cluster, gpus=int(named))), Efficiency()).best


def test_the_first_is_values_that_train_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "best.yaml"
    words = ["model=mini_v3", "cluster.gpus=8", "train.global_batch=32", "train.seq_len=1024", "search=true"]
    assert main(["plan", *words, f"out={out}"]) == 0
    assert "the fastest" in capsys.readouterr().out
    config = load("train", ["model=mini_v3", str(out)])
    assert isinstance(config, Config)
    validate(config, world=8)
    assert (config.train.global_batch, config.train.seq_len) == (32, 1024)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=tiny", "cluster.gpus=96", "train.global_batch=96"], "eval_sequences: 96"),
        # with tensor parallelism first, which the engine does not have
        (
            ["model=mixtral_8x7b", "model.num_layers=4", "cluster=a100_40gb", "cluster.gpus=4", "train.global_batch=4"],
            "does not run the first (parallel.tp=2",
        ),
    ],
)
def test_what_is_printed_can_be_trained(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "search=true", *words]) == 0
    out = capsys.readouterr().out
    assert said in out
    (tmp_path / "best.yaml").write_text(out.partition("`moe-engine train`:\n")[2])
    ranks = next(word for word in words if word.startswith("cluster.gpus=")).removeprefix("cluster.gpus=")
    of_model = [word for word in words if word.startswith("model")]
    assert main(["train", *of_model, str(tmp_path / "best.yaml"), f"run.ranks={ranks}", "run.check=true"]) == 0


def published(words: list[str]) -> searching.Result:
    """The search that `moe-engine plan` would do with these words."""
    from moe_engine.cli.plan import PlanConfig, asked_of, efficiency_for

    config = load("plan", words, PlanConfig)
    asked = asked_of(config)
    return search(asked, efficiency_for(config, asked.model, asked.strategy)[0])


@pytest.mark.slow
def test_deepseek_v3_as_deepseek_trained_it() -> None:
    result = published(["model=deepseek_v3", "cluster=h800_2048", "parallel=deepseek_v3"])
    theirs = [
        found for found in result.best if found.key == (Layout(pp=16, dp=128, cp=1, tp=1, ep=64), 1, "dualpipe", 1)
    ]
    assert theirs, [found.key for found in result.best]
    assert theirs[0].seconds < 1.05 * result.best[0].seconds


@pytest.mark.slow
def test_llama3_405b_as_meta_trained_it() -> None:
    result = published(["model=llama3_405b", "cluster=h100", "cluster.gpus=16384", "parallel=llama3_405b"])
    layouts = [found.answer.request.strategy.layout for found in result.best]
    assert Layout(pp=16, dp=128, cp=1, tp=8, ep=1) in layouts


@pytest.mark.slow
def test_a_dense_70b_keeps_tensor_parallel_inside_a_node() -> None:
    words = ["model=llama3_70b", "cluster=h100", "cluster.gpus=512", "train.global_batch=1024", "train.micro_batch=1"]
    result = published([*words, "train.seq_len=4096"])
    assert all(found.answer.request.strategy.layout.tp <= 8 for found in result.best)
    across = searching.tensor_parallel_across_nodes(result, Efficiency())
    assert across is not None and "tp 8: step" in across and "tp 16: step" in across
