"""The run folder: what is written, what a resumed run keeps, and the rate that MFU is measured against."""

from __future__ import annotations

import json
import math
import shutil
import struct
import subprocess
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from run_folder import TIME_FIELDS
from torch import Tensor

from moe_engine import metrics
from moe_engine.distributed.collectives import Communicator
from moe_engine.expert_load import LoadFigures, LoadHistory
from moe_engine.metrics import RunFolder, StepMetrics, draw_losses, environment, measure_matrix_rate, shown


def line(step: int, loss: float = 2.5) -> StepMetrics:
    return StepMetrics(
        step=step, loss=loss, mtp_loss=3.0, aux_loss=1e-4, z_loss=0.0, total_loss=3.4, tokens=100,
        tokens_seen=100 * (step + 1),
        lr=1e-3, grad_norm=0.7, skipped=False, expert_load_max_over_mean=1.25,
        rank_load_max_over_mean=1.1, expert_load_entropy=0.98, dead_experts=1,
        expert_load_by_layer={"layers.1.moe": LoadFigures(1.25, 1.1, 0.98, 1)}, step_time_s=0.5, tokens_per_s=200.0,
        tokens_per_s_per_rank=50.0, model_tflops=0.03, mfu=0.125,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run folder without TensorBoard, which is slow to import."""
    folder = RunFolder(tmp_path / "runs" / "one")
    monkeypatch.setattr(folder, "_tensorboard", NoTensorBoard())
    return folder


class NoTensorBoard:
    def __init__(self) -> None:
        self.added: dict[str, float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.added[name] = value

    def close(self) -> None: ...


def test_a_step_is_one_json_object_with_every_figure(folder: RunFolder) -> None:
    folder.begin("a: 1\n", 0)
    for step in range(3):
        folder.write(line(step))
    texts = folder.metrics_path.read_text().splitlines()
    # What only a traced step has is not there without a trace.
    told = [{name: value for name, value in asdict(line(step)).items() if value is not None} for step in range(3)]
    assert [json.loads(text) for text in texts] == told == folder.history()
    assert set(TIME_FIELDS) < {each.name for each in fields(StepMetrics)}
    assert (folder.path / "config.yaml").read_text() == "a: 1\n"


def test_tensorboard_gets_every_number_by_a_path_of_names(folder: RunFolder) -> None:
    folder.begin("", 0)
    folder.write(replace(line(3), bubble_per_rank=[0.1, 0.3]))
    added = folder._tensorboard.added
    assert added["loss"] == 2.5 and added["bubble_per_rank"] == 0.2 and "step" not in added
    layer = {name: value for name, value in added.items() if name.startswith("expert_load_by_layer/")}
    assert layer == {
        "expert_load_by_layer/layers.1.moe/max_over_mean": 1.25,
        "expert_load_by_layer/layers.1.moe/rank_max_over_mean": 1.1,
        "expert_load_by_layer/layers.1.moe/entropy": 0.98,
        "expert_load_by_layer/layers.1.moe/dead_experts": 1,
    }


def test_a_resumed_run_keeps_earlier_steps_and_drops_later_ones(folder: RunFolder) -> None:
    folder.begin("a: 1\n", 0)
    for step in range(1, 6):
        folder.write(line(step))
    again = RunFolder(folder.path)
    again.begin("a: 2\n", 3)
    assert [each["step"] for each in again.history()] == [1, 2, 3]
    assert (folder.path / "config.yaml").read_text() == "a: 2\n"
    folder.write(line(4, loss=1.0))
    assert [each["loss"] for each in again.history()] == [2.5, 2.5, 2.5, 1.0]
    again.begin("a: 3\n", 0)
    assert again.history() == [] and again.metrics_path.read_text() == ""


def test_lines_of_a_version_that_counted_from_0_count_from_1(folder: RunFolder) -> None:
    folder.begin("", 0)
    for step in range(3):
        folder.write(line(step, loss=float(step)))
    folder.begin("", 2)
    assert [(each["step"], each["loss"]) for each in folder.history()] == [(1, 0.0), (2, 1.0)]


def test_a_line_cut_short_by_a_kill_is_dropped_at_every_byte(folder: RunFolder) -> None:
    folder.begin("", 0)
    folder.write(line(1))
    whole = folder.metrics_path.read_bytes()
    folder.write(line(2))
    both = folder.metrics_path.read_bytes()
    for cut in range(len(whole), len(both) - 1):  # the object without its line break is whole
        folder.metrics_path.write_bytes(both[:cut])
        assert [each["step"] for each in folder.history()] == [1], cut
    folder.metrics_path.write_bytes(both[: len(both) - 9])
    folder.begin("", 5)
    folder.write(line(2))
    assert [each["step"] for each in folder.history()] == [1, 2]


def test_losses_that_are_not_finite_survive_the_file_and_the_picture(folder: RunFolder) -> None:
    folder.begin("", 0)
    folder.write(line(0))
    folder.write(replace(line(1, loss=math.nan), grad_norm=math.inf, skipped=True))
    folder.write(line(2))
    assert math.isnan(folder.history()[1]["loss"]) and folder.history()[1]["grad_norm"] == math.inf
    draw_losses(folder.history(), {}, folder.path / "loss.png")
    assert (folder.path / "loss.png").stat().st_size > 1000


def no_loads(folder: RunFolder) -> LoadHistory:
    return LoadHistory(folder.path / "expert_load.safetensors", [], 4)


def test_finish_draws_the_picture_and_writes_the_summary(folder: RunFolder) -> None:
    folder.begin("", 0)
    for step in range(4):
        folder.write(line(step, 3.0 - 0.1 * step))
    folder.finish({"validation_loss": 2.0, "bigram_loss": 2.4}, no_loads(folder))
    assert json.loads((folder.path / "summary.json").read_text())["bigram_loss"] == 2.4
    picture = (folder.path / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 400 and height > 200
    draw_losses(folder.history(), {}, folder.path / "plain.png")
    assert (folder.path / "plain.png").read_bytes() != picture, "the baselines are lines in the picture"


def test_an_empty_run_can_be_finished(folder: RunFolder) -> None:
    folder.begin("", 0)
    folder.finish({}, no_loads(folder))
    assert (folder.path / "loss.png").exists()


def test_environment_names_versions_and_machine(folder: RunFolder) -> None:
    folder.begin("", 0)
    written = json.loads((folder.path / "environment.json").read_text())
    assert written == environment()
    assert written["torch"] == torch.__version__ and written["python"].startswith("3.") and written["cpus"] >= 1
    assert written["cpu_capability"] and written["platform"]
    assert written["commit"] is None or len(written["commit"]) == 40


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_code_and_not_of_a_repository_around_it(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    ours, installed = tmp_path / "metrics.py", tmp_path / "venv" / "metrics.py"
    installed.parent.mkdir()
    ours.touch()
    installed.touch()
    assert metrics._commit(ours) is None
    git("init", "--quiet")
    git("add", ours.name)
    assert metrics._commit(ours) is None  # nothing is committed yet
    git("commit", "--quiet", "--message", "first")
    assert metrics._commit(ours) == git("rev-parse", "HEAD").strip()
    assert metrics._commit(installed) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrix_rate_is_that_of_this_machine(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What products of known seconds give, and never less for bf16 than for fp32."""
    now, product = [0.0], torch.mm

    def timed(a: Tensor, b: Tensor) -> Tensor:
        now[0] += {torch.float32: 2**-9, torch.bfloat16: 2**-7}[a.dtype]
        return product(a, b)

    monkeypatch.setattr(torch, "mm", timed)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    rate = measure_matrix_rate(Communicator.alone(), dtype, torch.device("cpu"))
    assert rate == 2 * 512**3 * 2**9 and now[0] >= metrics.PROBE_SECONDS


def test_the_shown_line_has_what_a_person_watches() -> None:
    text = shown(replace(line(0), tokens_per_s=12345.6))
    assert text == "loss 2.5000  12,346 tokens/s  MFU 12.5%  expert load max/mean 1.25, of ranks 1.10"
    more = shown(replace(line(0), dropped_share=0.125, skipped=True, grad_norm=math.inf))
    assert more.endswith("of ranks 1.10  choices dropped 12.5%  skipped: gradient norm inf")
