"""The main command as a person runs it: the quickstart in short, a kill and a resume, golden losses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from forked import run_command
from run_folder import metrics, without_times
from safetensors import safe_open

TESTS = Path(__file__).parents[1]
CORPUS = TESTS / "corpus"
GOLDEN = TESTS / "golden" / "losses.json"
SMALL = [
    "model=mini_v3", "model.dim=64", "model.dense_hidden=96", "model.expert_hidden=32", "model.num_layers=2",
    "train.seq_len=64", "train.global_batch=8", "train.micro_batch=2", "train.eval_sequences=8",
    "train.sample_tokens=8", "optim.warmup_steps=2", "data.validation_fraction=0.3",
]  # fmt: skip


def options(folder: Path, *words: str) -> list[str]:
    return [*words, f"run.dir={folder}/runs", f"data.cache_dir={folder}/cache", f"data.text_paths=[{CORPUS}]"]


def command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "moe_engine", "train", *options(folder, *words)]


def moe_engine(folder: Path, *words: str) -> str:
    code, output = run_command(folder, "train", *options(folder, *words))
    assert code == 0, output
    return output


def check_run_folder(run: Path, steps: int) -> None:
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(0 < line["loss"] < 7 and line["mtp_loss"] > 0 and line["aux_loss"] > 0 for line in lines)
    assert all(line["grad_norm"] > 0 and not line["skipped"] and line["mfu"] > 0 for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["tokens_seen"] == sum(line["tokens"] for line in lines)
    assert (run / "config.yaml").read_text().startswith("model:")
    assert json.loads((run / "environment.json").read_text())["torch"] == torch.__version__
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tb").glob("events.*"))
    assert (run / "checkpoints" / f"step_{steps}" / "index.json").exists()


def check_trace(run: Path) -> None:
    """Measured figures of every rank in every line, and the files of the third step."""
    for line in metrics(run):
        assert line["pipeline_s"] > 0  # may be longer than rank 0's step: another rank may have begun before it
        assert len(line["bubble_per_rank"]) == len(line["exposed_communication_s_per_rank"]) == 4
        assert all(0 < bubble < 1 for bubble in line["bubble_per_rank"])
        assert all(exposed > 0 for exposed in line["exposed_communication_s_per_rank"])
    assert "1f1b, step 3: measured" in (run / "trace.svg").read_text()
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    actions = [found for found in events if found["ph"] == "X" and found["name"][:2] in ("F0", "F1", "B0", "B1")]
    assert len(actions) == 4 * 4 + 2 * 4  # measured on four ranks, simulated for two stages


def check_balance(run: Path) -> None:
    """Figures of every MoE layer in each line, those of the step after which experts moved, and the heat map."""
    lines = metrics(run)
    for line in lines:
        layers = line["expert_load_by_layer"]
        assert list(layers) == ["layers.1.moe", "layers.2.moe", "layers.3.moe", "mtp.0.block.moe"]
        assert line["expert_load_max_over_mean"] == max(each["max_over_mean"] for each in layers.values()) > 1
        assert line["expert_load_max_over_mean"] >= line["rank_load_max_over_mean"] >= 1
        assert 0 < line["expert_load_entropy"] == min(each["entropy"] for each in layers.values()) < 1
    assert lines[1]["rank_load_before"] > lines[1]["rank_load_after"] >= 1 and lines[1]["experts_moved"] > 0
    assert "experts_moved" not in lines[0] and "experts_moved" not in lines[2]
    assert (run / "expert_load.png").read_bytes().startswith(b"\x89PNG")
    with safe_open(str(run / "expert_load.safetensors"), framework="pt") as file:
        assert file.get_slice("tokens").get_shape() == [len(lines), 4, 16]


def test_quickstart_in_short_starts_its_own_four_ranks(tmp_path: Path) -> None:
    words = ["train.steps=3", "train.eval_sequences=8", "train.sample_tokens=8", "data.validation_fraction=0.3"]
    words += ["moe.placement.every=2", "moe.placement.least_gain=0"]
    words = command(tmp_path, "experiment=quickstart", "trace=true", *words)
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    out = done.stdout
    check_run_folder(tmp_path / "runs" / "quickstart", 3)
    check_trace(tmp_path / "runs" / "quickstart")
    check_balance(tmp_path / "runs" / "quickstart")
    assert re.search(r"step 2: \d+ experts moved in .* 1\.\d\d before, 1\.\d\d after", " ".join(out.split()))
    assert "4 ranks: pp 2 x dp 2, ep 2" in out
    assert "MFU: model FLOPs over it, causal half of attention, nothing recomputed" in " ".join(out.split())
    assert "step 3/3" in out and "nats per byte" in out and "bigram" in out and "sample:" in out
    assert out.count("validation loss") == 1, "one rank reports, the others are quiet"
    summary = json.loads((tmp_path / "runs" / "quickstart" / "summary.json").read_text())
    assert 0 < summary["validation_loss"] < 7 and 0 < summary["bigram_loss"] < 7


@pytest.mark.slow
def test_quickstart_under_torchrun(tmp_path: Path) -> None:
    words = ["experiment=quickstart", "train.steps=2", "train.sample_tokens=0", "train.eval_sequences=8"]
    words += ["data.validation_fraction=0.3"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m"]
    done = subprocess.run(
        launcher + command(tmp_path, *words)[2:], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_run_folder(tmp_path / "runs" / "quickstart", 2)


# A sitecustomize: the rank that reports stands still after so many lines, so that none ends before it is killed.
STANDS_STILL = """
import time
from moe_engine.metrics import RunFolder

write = RunFolder.write

def write_and_stand_still(self, metrics):
    write(self, metrics)
    while metrics.step >= {lines}:
        time.sleep(1)

RunFolder.write = write_and_stand_still
"""


def kill_after(folder: Path, lines: int, *words: str) -> None:
    """Start the command and kill it, all ranks, when `lines` steps are in metrics.jsonl."""
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(STANDS_STILL.format(lines=lines))
    environment = os.environ | {"PYTHONPATH": str(folder / "hook")}
    process = subprocess.Popen(
        command(folder, *words), cwd=folder, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    file = folder / "runs" / "default" / "metrics.jsonl"
    end = time.monotonic() + 240
    while not (file.exists() and file.read_text().count("\n") >= lines):
        assert process.poll() is None and time.monotonic() < end, "the run ended before it could be killed"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param([], id="one rank"),
        pytest.param(["parallel.pp=2", "parallel.dp=2", "parallel.ep=2"], id="four ranks", marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_run_has_the_metrics_of_an_uninterrupted_one(layout: list[str], tmp_path: Path) -> None:
    words = [*SMALL, *layout, "train.steps=12", "train.checkpoint_every=3"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    moe_engine(whole, *words)
    kill_after(killed, 5, *words)
    assert "the data are not" not in moe_engine(killed, *words, "run.resume=true")
    expected, found = (without_times(folder / "runs" / "default") for folder in (whole, killed))
    assert found == expected
    summaries = [json.loads((f / "runs" / "default" / "summary.json").read_text()) for f in (whole, killed)]
    for summary in summaries:
        assert summary.pop("peak_memory_gib_per_rank")[0] > 0
    assert summaries[0] == summaries[1]


def machine_key() -> str:
    version = ".".join(torch.__version__.split("+")[0].split("."))
    return f"{torch.backends.cpu.get_cpu_capability()} torch {version}"


def test_golden_losses(tmp_path: Path) -> None:
    """The committed losses of a small fp32 run: the same bits on the same kind of machine, close on any other.

    After a change that is meant to change numbers: `python tests/e2e/test_train.py` writes them anew.
    """
    found = golden_run(tmp_path)
    golden = json.loads(GOLDEN.read_text())
    if machine_key() in golden:
        assert found == golden[machine_key()]
    for values in golden.values():
        assert found == pytest.approx(values, rel=1e-4)


def golden_run(folder: Path) -> list[float]:
    moe_engine(folder, *SMALL, "precision=fp32", "train.steps=10")
    return [line["loss"] for line in metrics(folder / "runs" / "default")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_long_context_experiment_on_four_ranks(tmp_path: Path) -> None:
    """Sequences of 32,768 tokens, the README's own command; each rank's whole process in 1.5 GiB."""
    words = ["experiment=long_context_32k", f"run.dir={tmp_path}/runs", f"data.cache_dir={tmp_path}/cache"]
    code, output = run_command(tmp_path, "train", *words, time_limit=500.0)
    assert code == 0, output
    run = tmp_path / "runs/long_context_32k"
    lines = metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[2]["loss"] < lines[0]["loss"] < 7
    assert all(line["tokens"] > 0.9 * 32768 for line in lines)
    peaks = json.loads((run / "summary.json").read_text())["peak_memory_gib_per_rank"]
    assert len(peaks) == 4 and max(peaks) < 1.5


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        known[machine_key()] = golden_run(Path(temporary))
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(known, indent=1) + "\n")
