"""`train --multirun`: every combination is checked before the first run; each has its folder, and a line in a table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_engine.__main__ import main

CORPUS = Path(__file__).parents[1] / "corpus"
SMALL = [
    "model=tiny", "train.steps=2", "train.seq_len=32", "train.global_batch=4", "train.micro_batch=2",
    "train.eval_sequences=4", "train.sample_tokens=0", "data.validation_fraction=0.3", f"data.text_paths=[{CORPUS}]",
]  # fmt: skip


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["train", *SMALL, *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err.splitlines()


def test_mistakes_of_all_runs_are_told_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [line.partition(":")[0] for line in refused(capsys, "-m", "optim.lr=0,-1", "train.seed=0,1")] == [
        "optim.lr=0.0",
        "optim.lr=-1.0",
    ]
    assert refused(capsys, "-m") == [
        "--multirun: no option has several values; write them with commas, optim.lr=1e-3,3e-3 say"
    ]
    assert refused(capsys, "-m", "run.name=a,b")[0].startswith("run.name: a sweep numbers its runs itself")
    for nothing in ("optim.lr=interval(0,1)", "train.seed=range(0)", "model=glob(*)"):
        assert refused(capsys, "-m", nothing)[0].startswith(f"{nothing}: gives no list of values; write them with")
    assert refused(capsys, "train.seed=1,2") == [
        "train.seed=1,2: has several values; for a run with each of them add --multirun"
    ]
    (message,) = refused(capsys, "-m", "train.seed=1,2", "hydra/launcher=nope")
    assert message.startswith("hydra/launcher=nope: ") and "use hydra/launcher=basic" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "launcher", [[], ["hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2", "hydra.launcher.gpus_per_node=8"]]
)
def test_a_sweep_is_composed_and_listed(
    launcher: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for Slurm, by the launcher of the extra `slurm`."""
    if launcher:
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    monkeypatch.chdir(tmp_path)
    words = ["--multirun", "optim.lr=1e-3,3e-3", "train.seed=range(2)", "pipeline=1f1b,gpipe", "run.check=true"]
    assert main(["train", *SMALL, *words, *launcher]) == 0
    lines = capsys.readouterr().out.splitlines()
    runs = [line for line in lines if line.startswith("run ")]
    assert len(runs) == 8
    assert runs[0] == "run 0: optim.lr=0.001 train.seed=0 pipeline=1f1b"
    assert runs[7] == "run 7: optim.lr=0.003 train.seed=1 pipeline=gpipe"
    assert len([line for line in lines if line.startswith("  layout: 1 ranks = pp 1 x dp 1 ")]) == 8


@pytest.mark.slow
def test_runs_of_a_sweep_are_ordinary_runs_in_folders_of_their_own(tmp_path: Path) -> None:
    start = [sys.executable, "-m", "moe_engine", "train"]
    words = [*start, *SMALL, "--multirun", "optim.lr=1e-3,3e-3", "run.name=rates"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = subprocess.run([*start, *SMALL, "optim.lr=3e-3"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert alone.returncode == 0, alone.stderr
    rows = json.loads((tmp_path / "runs" / "rates" / "sweep.json").read_text())
    assert [row["options"] for row in rows] == [["optim.lr=0.001"], ["optim.lr=0.003"]]
    assert all(row["complete"] and row["steps"] == 2 for row in rows)
    single = json.loads((tmp_path / "runs" / "default" / "metrics.jsonl").read_text().splitlines()[-1])
    assert rows[1]["loss"] == single["loss"] != rows[0]["loss"]
    table = done.stdout[done.stdout.rindex("runs/rates") :]
    assert "optim.lr" in table and "0.001" in table and "0.003" in table and f"{single['loss']:,.4g}" in table
    again = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert again.returncode == 2 and "run.name=0: runs/rates/0 holds a run" in again.stderr
