"""launch/slurm.sbatch on a real Slurm: the ranks that srun starts find each other and train what local ranks train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import slurm
from run_folder import without_times

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "corpus"
WORDS = [
    "experiment=quickstart", "train.steps=3", "train.seq_len=64", "train.eval_sequences=8", "train.sample_tokens=0",
    "data.validation_fraction=0.3", f"data.text_paths=[{CORPUS}]", "run.name=run",
]  # fmt: skip
ASKED = ["--ntasks-per-node=4", "--cpus-per-task=1", "--wait"]  # --wait: sbatch ends with the job, with its exit code

pytestmark = pytest.mark.slow


def checkout(folder: Path) -> Path:
    """A folder with launch/ and the command, which is this interpreter's."""
    folder.mkdir()
    (folder / "launch").symlink_to(ROOT / "launch")
    command = folder / ".venv" / "bin" / "moe-engine"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m moe_engine "$@"\n')
    command.chmod(0o755)
    return folder


def submit(environment: dict[str, str], folder: Path, *words: str) -> tuple[int, str]:
    """The exit code of the job and what its tasks printed."""
    command = ["sbatch", *ASKED, "--output=job.log", "launch/slurm.sbatch", *words]
    done = subprocess.run(command, cwd=folder, env=environment, timeout=240, capture_output=True, text=True)
    log = folder / "job.log"
    return done.returncode, log.read_text() if log.exists() else done.stderr


def test_a_job_trains_what_local_ranks_train(tmp_path: Path) -> None:
    if slurm.missing():
        pytest.skip(slurm.missing())
    here = checkout(tmp_path / "checkout")
    words = [*WORDS, f"data.cache_dir={tmp_path}/cache"]
    local = [sys.executable, "-m", "moe_engine", "train", *words, f"run.dir={tmp_path}/local"]
    subprocess.run(local, check=True, timeout=240, stdout=subprocess.DEVNULL)
    with slurm.cluster(tmp_path / "slurm", cpus=4) as environment:
        code, log = submit(environment, here, *words, f"run.dir={tmp_path}/job")
        assert code == 0, log
        assert "4 ranks: pp 2 x dp 2, ep 2" in log and log.count("validation loss") == 1
        expected, found = (without_times(tmp_path / name / "run") for name in ("local", "job"))
        assert len(expected) == 3 and found == expected

        # A mistake is told once, by the first rank, and ends the job with the same exit code as anywhere.
        before = sorted(os.listdir(tmp_path))
        code, log = submit(environment, here, *words, "parallel.dp=4", "optim.lr=fast", f"run.dir={tmp_path}/wrong")
        assert code == 2, log
        assert log.count("optim.lr=fast: a number is expected, for example optim.lr=0.003") == 1
        assert "Traceback" not in log and sorted(os.listdir(tmp_path)) == before


def test_a_sweep_runs_as_jobs(tmp_path: Path) -> None:
    """`--multirun` by the submitit launcher: each run is a job of two tasks, which are its two ranks."""
    if slurm.missing():
        pytest.skip(slurm.missing())
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = [
        "model=tiny",
        "parallel.dp=2",
        "parallel.ep=2",
        "train.steps=2",
        "train.seq_len=32",
        "train.eval_sequences=8",
    ]
    words += [*WORDS[4:7], "optim.lr=1e-3,3e-3", "run.name=rates"]
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.tasks_per_node=2", "hydra.launcher.cpus_per_task=1"]
    with slurm.cluster(tmp_path / "slurm", cpus=4) as environment:
        done = subprocess.run(
            [sys.executable, "-m", "moe_engine", "train", "--multirun", *words, *launcher],
            cwd=tmp_path,
            env=environment,
            timeout=240,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "runs" / "rates" / "sweep.json").read_text())
    assert [row["options"] for row in rows] == [["optim.lr=0.001"], ["optim.lr=0.003"]]
    assert all(row["complete"] and row["steps"] == 2 for row in rows)
    logs = "\n".join(path.read_text() for path in (tmp_path / "runs" / "rates" / "jobs").rglob("*_0_log.out"))
    assert logs.count("2 ranks: pp 1 x dp 2, ep 2") == 2
