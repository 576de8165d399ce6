"""`moe-engine plan` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_engine.__main__ import main
from moe_engine.cli.plan import PlanConfig
from moe_engine.config.load import load
from moe_engine.planner.request import precision_of

SMALL = ["cluster.gpus=16", "train.global_batch=64", "train.micro_batch=1", "train.seq_len=1024"]


def run(*words: str) -> int:
    return main(["plan", *words])


def test_plan_prints_memory_time_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("model=mini_v3", "parallel.pp=2", "parallel.ep=4", *SMALL) == 0
    text = capsys.readouterr().out
    for words in ("Memory, GB", "margin", "Kept for backward", "Time of a step", "bubble", "tokens/s/GPU", "MFU"):
        assert words in text


def test_nothing_said_plans_the_tiny_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    assert "32 x 256 tokens" in capsys.readouterr().out


def test_plan_writes_json_markdown_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("model=mini_v3", "parallel.pp=2", f"out={tmp_path / 'plan'}", "tokens=1e9", "plan.recompute=[norm]", *SMALL)
        == 0
    )
    data = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert data["layout"]["world"] == 16
    assert len(data["memory"]) == 2
    for rank in data["memory"]:
        assert sum(rank["bytes"].values()) == pytest.approx(rank["total"])
        assert sum(rank["activations"].values()) == pytest.approx(rank["bytes"]["activations"])
    assert sum(data["time"]["parts_s"].values()) == pytest.approx(data["time"]["step_s"])
    per_step = 64 * 1024
    assert data["tokens_per_s_per_gpu"] == pytest.approx(per_step / data["time"]["step_s"] / 16)
    assert data["days"] * 86400 == pytest.approx(1e9 / per_step * data["time"]["step_s"])
    assert (data["model"], data["recompute"], data["batch"]["micro_batch"]) == ("mini_v3", ["norm"], 1)
    text, printed = (tmp_path / "plan" / "plan.md").read_text(), capsys.readouterr().out
    assert f"efficiencies: {data['efficiency_source']}" in text and data["efficiency_source"] in printed
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    cells = {cell for row in rows for cell in row if cell.strip("-")}
    assert len(cells) > 60 and all(" ".join(cell.split()) in " ".join(printed.split()) for cell in cells)
    assert (tmp_path / "plan" / "plan.svg").read_text().startswith("<svg")


def test_topic_memory_70b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("topic=memory_70b", "cluster.gpus=64", f"out={tmp_path / 'states.md'}") == 0
    assert "| ZeRO-3 | 2.19 | 2.19 | 4.38 | 8.75 | 17.50 |" in (tmp_path / "states.md").read_text()
    text = capsys.readouterr().out
    plain, sharded = (next(line for line in text.splitlines() if line.startswith(name)) for name in ("plain", "ZeRO-3"))
    assert [word for word in plain.split() if word[0].isdigit()] == ["140.00", "140.00", "280.00", "560.00", "1,120.00"]
    assert sharded.split()[-1] == "17.50"


@pytest.mark.parametrize("cluster", ["a100", "h100", "h800", "h200", "b200", "gb200", "mi300x"])
def test_every_card_plans(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("model=mini_v3", f"cluster={cluster}", *SMALL) == 0
    assert "tokens/s/GPU" in capsys.readouterr().out


def test_a_dense_model_over_four_axes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallel.pp=2", "parallel.tp=2", "parallel.cp=2", "parallel.zero=3", "model.num_layers=8"]
    assert run("model.num_dense_layers=8", "model.mtp_depth=0", *words, *SMALL) == 0
    assert "pp 2 x dp 2 x cp 2 x tp 2" in capsys.readouterr().out


def test_moments_have_the_bytes_of_their_format_or_those_given() -> None:
    def moments(*words: str) -> float:
        config = load("plan", ["cluster.gpus=16", *words], PlanConfig)
        return precision_of(config.precision, config.plan).moments

    assert (moments(), moments("precision=fp64"), moments("precision.moments=bfloat16")) == (8, 16, 4)
    assert moments("precision.moments=bfloat16", "plan.moment_bytes=2") == 2
    assert moments("model=deepseek_v3", "cluster=h800_2048", "parallel=deepseek_v3") == 4


def test_all_mistakes_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallel.zero=5", "plan.recompute=[attention]", "plan.compute=int8", "model.dim=0", "precision.wgrad=a"]
    assert run(*words) == 2
    error = capsys.readouterr().err
    for word in words:
        assert f"{word}:" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.gpus=10", "parallel.pp=4"], "cluster.gpus=10: pp 4 x dp 2 x cp 1 x tp 1 are 8 ranks"),
        (["parallel.ep=3", "cluster.gpus=8"], "parallel.ep=3: with plan.etp=1 must divide the 8 ranks of a stage"),
        (["train.global_batch=9", "train.micro_batch=1", "cluster.gpus=8"], "use train.global_batch=16"),
        (["pipeline.stages=[embedding,head]", *SMALL], "pipeline.stages=[embedding,head]: a plan cuts by numbers"),
        (["pipeline.micro_batches=7", *SMALL], "leave it out, or use pipeline.micro_batches=4"),
        (["parallel.cp=16", *SMALL, "train.seq_len=100"], "parallel.cp=16: must divide train.seq_len=100; use"),
        (["parallel.pp=16", *SMALL], "parallel.pp=16: cuts the model into 16 stages, and it has 4 parts"),
        (["model.dim=0"], "model.dim=0: must be 1 or more, for example model.dim=1"),
        (["model.top_k=17"], "model.top_k=17: a token cannot use more experts than there are; use model.top_k=8"),
        (["model.attention=none"], "model.attention=none: no such choice; there are mla, gqa"),
        (["precision.compute=int8"], "precision.compute=int8: no such choice; there are bfloat16"),
        (["plan.block_us=-5"], "plan.block_us=-5.0: must be 0 or more; use plan.block_us=0"),
        (["plan.moment_bytes=-1"], "plan.moment_bytes=-1.0: must be 0 or more"),
        (["plan.shard=-1"], "plan.shard=-1: must be 0 or more"),
        (["plan.stage_layers=[-1,3]"], "plan.stage_layers=[-1, 3]: layers of each stage, 0 or more"),
        (["plan.stage_layers=[3]"], "plan.stage_layers=[3]: needs 1 numbers adding up to the 2 layers"),
        (["cluster.runtime_gb=80"], "cluster.runtime_gb=80.0: leaves nothing of cluster.memory_gb=80.0"),
        (["model.num_layers=1000000000"], "model.num_layers=1000000000: must be 10000 or less"),
        (["parallel.pp=1000003", "cluster.gpus=1000003", "train.global_batch=8"], "use 10000 or less"),
        (["train.global_batch=1000000000000"], "would take gigabytes; use train.global_batch=64000000"),
        (["train.global_batch=100000000000000000000"], "a whole number of 64 bits is expected"),
        (["pipeline=dualpipe", "parallel.pp=2", "train.global_batch=24"], "use train.global_batch=32"),
        (["train.steps=0"], "train.steps=0: must be 1 or more; use train.steps=1"),
        (["plan.etp=3", *SMALL], "plan.etp=3: must divide the 16 ranks of a stage; use plan.etp=2"),
        (["validate=/nowhere.csv"], "validate=/nowhere.csv: no such file; name a CSV file"),
        (["fit=LICENSE", "out=x.csv"], "fit=LICENSE: the column source is missing"),
        (["topic=memory_70b", "out=x.json"], "out=x.json: a worked example is written as markdown; use out=x.md"),
        (["topic=memory"], "topic=memory: no such topic; use topic=memory_70b"),
        (["out=plan.txt"], "out=plan.txt: written are .json, .md, .svg; use out=plan.json"),
    ],
)
def test_a_mistake_names_a_value_that_works(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert message in capsys.readouterr().err


def test_a_search_needs_no_layout_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """The batch need not suit the layout that stands in the configuration: another is looked for."""
    given = ["pipeline=dualpipe", "train.micro_batch=4", "train.seq_len=256", "train.global_batch=8"]
    assert run("search=true", "cluster.gpus=16", "cluster=h800", "model=mini_v3", *given) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "global_batch: 8" in out and "16 H800 for 8 sequences of 256 tokens a step" in out
    assert "train.global_batch=8 is less than a sequence for each of 16 cards" in out
