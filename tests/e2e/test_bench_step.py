"""`moe-engine bench step` on a small model: the plain model agrees, and the folder has all that a reader needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from moe_engine.bench.record import read
from moe_engine.bench.step import peak_memory
from moe_engine.config.load import load
from moe_engine.config.validate import resolve

SMALL = [
    "model=tiny", "precision=fp32", "model.score_function=softmax", "train.micro_batch=2", "train.global_batch=4",
    "train.seq_len=32", "bench.cases=[ep2]", "bench.rounds=6", "bench.warmup=1", "bench.memory=false",
    "bench.routing=[natural,balanced,skewed:2]",
]  # fmt: skip


def test_a_small_step_is_checked_timed_and_recorded(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moe_engine", "bench", "step", *SMALL, f"out={tmp_path}/b", "profile=true"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert "x as fast as plain_fp32" in done.stdout

    results = read(tmp_path / "b")
    names = ("moe_engine", "moe_engine balanced", "moe_engine skewed:2", "plain_bf16", "plain_fp32")
    assert [(r.case, r.candidate) for r in results] == [("ep2", name) for name in names]
    for each in results:
        assert each.verdict.passed and len(each.samples) == 6 and each.figures["mfu"] > 0
        assert each.config["parallel"]["ep"] == 2
        if each.candidate == "moe_engine":
            assert each.verdict.measures["loss_off"] < 1e-5
            assert each.verdict.measures["grad_norm_off"] < 1e-4
    natural, balanced, skewed = (each.figures for each in results[:3])
    assert [each["routing"] for each in (natural, balanced, skewed)] == ["natural", "balanced", "skewed:2"]
    assert balanced["expert_load"] == 1.0 < natural["expert_load"]
    assert 1.9 < skewed["expert_load"] < 2.1 and skewed["rank_load"] > 1.1 > balanced["rank_load"]
    machine = json.loads((tmp_path / "b" / "machine.json").read_text())
    assert machine["ceilings"]["matrix_flops"]["1"]["float32"] > 1e8 and machine["ceilings"]["send_bytes"] > 1e6
    report = (tmp_path / "b" / "report.md").read_text()
    for part in ("convention nvidia", "| attn |", "| optimizer |", "GFLOP/s in matrix products"):
        assert part in report


def test_memory_is_told_for_each_routing() -> None:
    """Of a process with one candidate alone: here the high-water mark of this one, which only rises."""
    config = resolve(load("train", ["model=tiny", "train.seq_len=32", "train.global_batch=4"]))
    peaks = [peak_memory(0, torch.device("cpu"), config, name) for name in ("moe_engine", "moe_engine skewed:2")]
    assert 50 * 2**20 < peaks[0] <= peaks[1] < 16 * 2**30
