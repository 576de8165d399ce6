"""The command line without starting ranks: words, help, exit codes, and what is refused before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from moe_engine import __version__
from moe_engine.__main__ import COMMANDS, main


@pytest.fixture(autouse=True)
def no_ranks_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests may itself be a rank of something."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") or name.startswith("SLURM_"):
            monkeypatch.delenv(name)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines on stderr of a command line that ends with exit code 2 and prints nothing else."""
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.out == "" and "Traceback" not in output.err
    return output.err.splitlines()


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"moe-engine {__version__}\n"
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {command} " in text for command in COMMANDS)
    assert main([]) == 2  # the same text, but nothing was done
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: moe-engine {command} ")
    assert f"\nexamples:\n  moe-engine {command} " in text
    assert max(len(line) for line in text.splitlines()) <= 120
    assert main([command, "train.steps=3", "-h"]) == 0
    assert capsys.readouterr().out == text


def test_help_examples_of_train_are_valid(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["train", "--help"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    examples = [line[1:] for line in lines if line[:2] == ["moe-engine", "train"]]
    assert len(examples) >= 3
    for words in examples:
        words = [word.replace("[docs]", f"[{tmp_path}]") for word in words]
        assert main([*words, "run.check=true"]) == 0


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "trian") == [
        f"trian: no such command; did you mean train? There are {', '.join(COMMANDS)}; see moe-engine --help"
    ]
    assert refused(capsys, "experiment=quickstart")[0].startswith("experiment=quickstart: no such command; there are")


def test_check_prints_the_resolved_configuration_and_layout_and_stops(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "experiment=quickstart", "run.check=true"]) == 0
    text = capsys.readouterr().out
    config = yaml.safe_load(text)
    assert config["parallel"]["dp"] == 2
    batch = config["train"]["global_batch"] // (2 * config["train"]["micro_batch"])
    assert config["pipeline"]["micro_batches"] == batch
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert comments[0].startswith("# layout: 4 ranks = pp 2 x dp 2 x cp 1 x tp 1; experts over ep 2")
    stages = [line for line in comments if line.startswith("# stage ")]
    assert stages[0].startswith("# stage 0 on ranks 0-1: embedding, layers 0")
    assert stages[1].startswith("# stage 1 on ranks 2-3: embedding, layers ") and stages[1].endswith("head, MTP 0")
    assert list(tmp_path.iterdir()) == []


def test_all_that_is_wrong_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["parallel.tp=2", "train.global_batch=0", "pipeline.schedule=1f1c", "data.text_paths=[nowhere]"]
    lines = refused(capsys, "train", *words)
    assert [line.partition(":")[0] for line in lines] == [
        "train.global_batch=0",
        "parallel.tp=2",
        "pipeline.schedule=1f1c",
        "data.text_paths=[nowhere]",
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_schedule_must_run_at_these_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["parallel.pp=2", "model.num_layers=8", "train.global_batch=4", "train.micro_batch=4"]
    assert refused(capsys, "train", "pipeline.schedule=dualpipe", *sizes) == [
        "train.global_batch=4: gives 1 micro-batches; dualpipe halves them between two directions and needs an even "
        "number, at least 2 * parallel.pp = 4; use train.global_batch=16"
    ]
    assert main(["train", "pipeline.schedule=dualpipe", *sizes, "train.global_batch=16", "run.check=true"]) == 0
    capsys.readouterr()
    folded = ["parallel.pp=2", "pipeline.schedule=dualpipev", "model.num_layers=3"]
    assert refused(capsys, "train", *folded) == [
        "parallel.pp=2: with pipeline.schedule=dualpipev the model is cut into 4 stages, and it has blocks for 3; "
        "use model.num_layers=4 or more, or a smaller parallel.pp"
    ]


def test_schedule_prints_the_timetable_and_its_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    words = ["pipeline=1f1b", "parallel.pp=2", "pipeline.micro_batches=3", "cost.f=1", "cost.b=2", f"out={picture}"]
    assert main(["schedule", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1f1b: 2 ranks, 2 stages, 3 micro-batches"
    assert lines[1].startswith("rank 0 |F0 F1 ") and lines[2].startswith("rank 1 |...F0 B0 ")
    # Each rank works 3 * (1 + 2) and waits for the other to start and to end: 1 + 2.
    assert lines[3] == "makespan 12 (idle time of a rank by the published formula: 3)"
    assert [line.split() for line in lines[5:7]] == [["0", "3", "25.00%", "2", "0"], ["1", "3", "25.00%", "1", "0"]]
    assert picture.read_text().startswith("<svg ")
    trace = tmp_path / "trace.json"
    assert main(["schedule", *words[:-1], f"out={trace}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"drawn into {trace}"
    actions = [found["name"] for found in json.loads(trace.read_text())["traceEvents"] if found["ph"] == "X"]
    assert len(actions) == 12 and {"F0@0", "B2@1"} <= set(actions)


def test_schedule_compares_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["schedule", "pipeline=all", "parallel.pp=8", "pipeline.micro_batches=20"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:-1] if not line.startswith("not at this size")}
    assert rows["1f1b"][:3] == ["1", "81", "25.93%"] and rows["dualpipe"][:3] == ["2", "66", "9.09%"]
    assert [line.split(":")[1].strip() for line in lines if line.startswith("not at")] == ["interleaved_1f1b"]
    assert lines[-1].startswith("take zbv: the shortest step, 21.6% shorter than 1f1b, with 1 copy of the parameters")
    assert main([*words, "cost.fb=2.4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("take dualpipe: the shortest step")


def test_schedule_compares_memory_for_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["schedule", "pipeline=all", "parallel.pp=8", "pipeline.micro_batches=40", "model=deepseek_v3"]
    words += ["parallel.dp=128", "parallel.ep=64"]
    memory: dict[str, dict[str, float]] = {}
    for recompute in ("none", "selective", "full"):
        assert main([*words, f"recompute={recompute}"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[1].endswith("memory GiB")
        memory[recompute] = {line.split()[0]: float(line.split()[-1]) for line in lines[2:10]}
        assert lines[10].startswith("memory: deepseek_v3 at dp 128, ep 64, micro-batches of 1 x 4096 tokens")
    for name in memory["none"].keys() - {"zb_h1", "zbv"}:
        assert memory["none"][name] > memory["selective"][name] > memory["full"][name] > 10
    for name in ("zb_h1", "zbv"):  # weight gradients that wait for W need their inputs, made anew or not
        sizes = [memory[recompute][name] for recompute in memory]
        assert max(sizes) < 1.05 * min(sizes)
    assert memory["none"]["gpipe"] > 4 * memory["none"]["1f1b"]
    limit = (memory["none"]["1f1b"] + min(memory["none"][name] for name in memory["none"] if name != "1f1b")) / 2
    assert main([*words, f"memory_gib={limit}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("take 1f1b: the shortest step that fits in ")
    assert main([*words, "memory_gib=10"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("take none: 10 GiB is too little, ")


def test_schedule_refuses_a_comparison_with_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refused(capsys, "schedule", "pipeline=all", f"out={tmp_path}/x.svg")[0].endswith("or give no out")
    words = ["pipeline=all", "parallel.pp=0", "pipeline.virtual_stages=0"]
    assert [line.partition(":")[0] for line in refused(capsys, "schedule", *words)] == [
        "parallel.pp=0",
        "pipeline.virtual_stages=0",
    ]
    assert refused(capsys, "train", "pipeline=all")[0].startswith("pipeline=all: no such pipeline; there are 1f1b, ")


def test_schedule_refuses_what_it_cannot_time_or_draw(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pipeline.schedule=gpip", "cost.f=0", "cost.b=0", "cost.w=0", "out=nowhere/x.png"]
    assert [line.partition(":")[0] for line in refused(capsys, "schedule", *words)] == [
        "pipeline.schedule=gpip",
        "cost.f=0 cost.b=0",
        "out=nowhere/x.png",
        "out=nowhere/x.png",
    ]
    assert refused(capsys, "schedule", "cost.w=3")[0].startswith("cost.w=3")
    assert refused(capsys, "schedule", "cost.f=slow")[0] == "cost.f=slow: a number is expected, for example cost.f=1.0"
    assert refused(capsys, "schedule", "train.steps=3")[0].startswith("train.steps=3: no such option")


@pytest.mark.parametrize(
    "words", [["schedule"], ["train", "--help"], ["train", "experiment=quickstart", "run.check=true"]]
)
def test_looking_loads_no_torch(words: list[str]) -> None:
    program = f"import sys; from moe_engine.__main__ import main; main({words!r}); assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_output_into_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m moe_engine train run.check=true | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.stdout == "model:\n" and result.stderr == ""
