"""Symmetric memory: what the planner says is what the windows of a job ask for, byte by byte."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.config.errors import ConfigError
from moe_engine.config.load import load
from moe_engine.config.schema import moe_layer_config
from moe_engine.config.validate import resolve
from moe_engine.distributed.collectives import Communicator
from moe_engine.dryrun.collectives import by_purpose
from moe_engine.dryrun.run import dry_run
from moe_engine.moe.dispatch import open_windows
from moe_engine.ops.row_bytes import row_bytes
from moe_engine.planner.collectives import step_bytes
from moe_engine.planner.job import cut_of, windows_of
from moe_engine.planner.memory import rank_memory

MINI = "model=mini_v3 parallel.dp=4 parallel.ep=4 train.global_batch=4 train.micro_batch=1 train.seq_len=512"


class Asked:
    """A runtime that counts the bytes it is asked for."""

    def __init__(self) -> None:
        self.bytes = 0

    def tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        self.bytes += math.prod(shape) * dtype.itemsize
        return torch.empty(shape, dtype=dtype, device="meta")

    def launch(self, *_: Any) -> None:
        raise AssertionError("nothing is sent")


@pytest.mark.parametrize(
    "words",
    [
        "",
        "moe.recv_capacity=1000",
        "moe.combine=exact",
        "precision=fp32 moe.wire=fp8",
        "moe.wire=fp8 model.dim=4 model.top_k=8 model.num_experts=32 model.expert_hidden=8",  # slots longer than rows
        "parallel.cp=2 parallel.dp=2 train.global_batch=2",
    ],
)
def test_windows_ask_for_what_the_planner_says(words: str) -> None:
    pytest.importorskip("triton")
    config = load("train", [*MINI.split(), "moe.dispatch=nvshmem", "train.eval_sequences=0", *words.split()])
    config = resolve(config)
    ep, runtime = config.parallel.ep, Asked()
    windows = open_windows(
        moe_layer_config(config.model, config.moe),
        config.train.micro_batch * config.train.seq_len // config.parallel.cp,
        Communicator("ep", range(ep), 0),
        runtime,
        torch.device("cpu"),
        capacity=config.moe.recv_capacity,
        dtype=getattr(torch, config.precision.compute),
    )
    sizes = windows_of(config)
    assert sizes is not None and sizes.most_rows == windows.most_rows and sizes.most_choices == windows.most_choices
    planned = sizes.by_use
    assert sum(planned.values()) == runtime.bytes
    assert planned["symmetric rows"] >= 4 * windows.most_rows * row_bytes(config.model.dim)


def test_worst_case_of_deepseek_v3_and_no_windows_without_need() -> None:
    """4096 tokens, 8 ranks, 8 of 256 experts: any rank may get every token of all, in bf16; twice, in two halves."""
    words = "model=deepseek_v3 parallel.pp=1 parallel.dp=8 parallel.ep=8 train.global_batch=8 train.micro_batch=1"
    config = load("train", [*words.split(), "train.seq_len=4096", "moe.dispatch=nvshmem", "precision=bf16"])
    sizes = windows_of(resolve(config))
    assert sizes is not None
    planned = sizes.by_use
    assert planned["symmetric rows"] == 4 * 8 * 4096 * 2 * 7168 + 2 * (2 * 8 * 16 + 8 * 8)
    (rank,) = rank_memory(cut_of(resolve(config)))
    assert rank.buffers["symmetric memory"] == sum(planned.values())
    for other in ("moe.dispatch=all_to_all", "parallel.ep=1"):
        config = load("train", [*words.split(), "train.seq_len=4096", "moe.dispatch=nvshmem", "precision=bf16", other])
        assert windows_of(resolve(config)) is None


def test_a_dry_run_names_the_room_that_is_too_small() -> None:
    """There are as many rows as there is room for, by its own code and by arithmetic."""
    pytest.importorskip("triton")
    words = [*MINI.split(), "moe.dispatch=nvshmem", "train.eval_sequences=0", "precision=bf16", "model.num_layers=2"]
    config = resolve(load("train", words))
    found, (planned,) = dry_run(config, 1), rank_memory(cut_of(config))
    assert planned.buffers["symmetric memory"] == found.symmetric > 0
    assert planned.activation_bytes == pytest.approx(found.kept, rel=0.02)
    assert step_bytes(cut_of(config), 0) == by_purpose(found.collectives)
    small = resolve(load("train", [*words, "moe.recv_capacity=300"]))
    with pytest.raises(
        ConfigError, match=r"moe.recv_capacity=300: a rank was to take 2048 .* use moe.recv_capacity=2048"
    ):
        dry_run(small, 1)
