"""`moe-engine bench step` on a small model: the plain model agrees, and the folder has all that a reader needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from ranks import run_ranks

from moe_engine.bench.record import read
from moe_engine.bench.step import peak_memory
from moe_engine.config.load import load
from moe_engine.config.schema import Config
from moe_engine.config.validate import resolve
from moe_engine.planner.flops import parameter_count

SMALL = [
    "model=tiny", "precision=fp32", "model.score_function=softmax", "train.micro_batch=2", "train.global_batch=4",
    "train.seq_len=32", "bench.cases=[ep2]", "bench.rounds=6", "bench.warmup=1", "bench.memory=false",
    "bench.routing=[natural,balanced,skewed:2]", "bench.precisions=[fp8]",
]  # fmt: skip


def test_a_small_step_is_checked_timed_and_recorded(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moe_engine", "bench", "step", *SMALL, f"out={tmp_path}/b", "profile=true"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert "x as fast as plain_fp32" in done.stdout and "x as fast as moe_engine fp8" in done.stdout

    results = read(tmp_path / "b")
    names = ("moe_engine", "moe_engine balanced", "moe_engine skewed:2", "moe_engine fp8", "plain_bf16", "plain_fp32")
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


def config_of(*words: str) -> Config:
    return resolve(load("train", ["model=tiny", "precision=fp32", "model.score_function=softmax", *words]))


def peaks(config: Config, candidate: str) -> list[int]:
    """Bytes at the highest point of each rank, in processes that begin as this one is now."""
    return run_ranks(config.parallel.dp or 1, peak_memory, torch.device("cpu"), config, candidate)


def test_memory_of_a_larger_model_is_larger_by_its_states() -> None:
    words = ["train.seq_len=32", "train.global_batch=4"]
    small, large = config_of(*words), config_of(*words, "model.vocab_size=50257")
    more = parameter_count(large.model).total - parameter_count(small.model).total
    states = 20 * more  # fp32: the parameter, its gradient, the master weight, two moments
    (before,), (after,) = peaks(small, "moe_engine"), peaks(large, "moe_engine")
    assert states <= after - before < 2.5 * states  # and for a moment what makes the initial values of a table


def test_memory_of_skewed_routing_is_larger_on_the_busy_rank() -> None:
    """All choices are of the first two of eight experts, on rank 0: it has the rows of both ranks, rank 1 has none."""
    words = ["parallel.dp=2", "parallel.ep=2", "train.global_batch=32", "train.micro_batch=16", "train.seq_len=256"]
    config = config_of(*words, "model.expert_hidden=256")
    even, skewed = peaks(config, "moe_engine balanced"), peaks(config, "moe_engine skewed:4")
    rows = 16 * 256 * config.model.top_k  # of a micro-batch
    kept = 4 * rows * 2 * config.model.expert_hidden  # what SwiGLU multiplies
    assert skewed[0] - even[0] > kept and even[1] - skewed[1] > kept
