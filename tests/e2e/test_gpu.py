"""The same commands and the same layer on CUDA devices: `make gpu`, on a machine that has some."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from measures import calc_diff

from moe_engine import MoEConfig, MoELayer
from moe_engine.model.batch import Shard
from moe_engine.model.context_parallel import SharedRows
from moe_engine.model.core_attention import core_attention, flash_serves, share_backward, share_forward
from moe_engine.ops.visible import whole_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CORPUS = Path(__file__).parents[1] / "corpus"
WORDS = [
    "experiment=quickstart", "train.steps=5", "train.eval_sequences=8", "train.sample_tokens=8",
    "data.validation_fraction=0.3", f"data.text_paths=[{CORPUS}]",
]  # fmt: skip


def train(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The metrics of a short quickstart; its ranks use the devices that there are."""
    command = [sys.executable, "-m", "moe_engine", "train", *WORDS, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (folder / "runs").iterdir()
    assert json.loads((run / "environment.json").read_text())["gpu"] == torch.cuda.get_device_name()
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def check(lines: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in lines] == list(range(1, 6))
    assert lines[-1]["loss"] < lines[0]["loss"] < 7
    assert all(line["grad_norm"] > 0 and not line["skipped"] for line in lines)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_quickstart_on_one_gpu(precision: str, tmp_path: Path) -> None:
    check(train(tmp_path, "parallel=single", f"precision={precision}"))


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four CUDA devices")
def test_the_quickstart_on_four_gpus_over_nccl(tmp_path: Path) -> None:
    four, one = tmp_path / "four", tmp_path / "one"
    four.mkdir()
    one.mkdir()
    lines = train(four, "precision=fp32")
    check(lines)
    alone = train(one, "precision=fp32", "parallel=single")
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in alone], rel=1e-4)


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    ranks = 2 * torch.cuda.device_count()
    layout = ["parallel=single", f"parallel.dp={ranks}", f"train.global_batch={2 * ranks}", "train.eval_sequences=0"]
    command = [sys.executable, "-m", "moe_engine", "train", *WORDS, *layout]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 2, done.stderr
    assert "each rank needs a GPU of its own" in done.stderr and "Traceback" not in done.stderr


def test_the_layer_gives_on_a_gpu_what_it_gives_on_a_cpu() -> None:
    config = MoEConfig(dim=64, expert_hidden=32, num_experts=8, top_k=2, num_shared_experts=1)
    x = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0))  # [B, S, D]
    results = []
    for device in ("cpu", "cuda"):
        layer = MoELayer(config).to(device)
        own = x.to(device).requires_grad_()
        y = layer(own)
        y.square().sum().backward()
        results.append([y.cpu(), own.grad.cpu(), *(p.grad.cpu() for p in layer.parameters() if p.grad is not None)])
    for cpu, gpu in zip(*results, strict=True):
        distance = (cpu - gpu).norm() / cpu.norm().clamp_min(1e-12)
        assert distance < 1e-4


@pytest.mark.parametrize(("heads", "kv_heads", "qk", "value"), [(8, 8, 192, 128), (8, 2, 128, 128), (4, 4, 64, 64)])
@pytest.mark.parametrize("packed", [False, True])
def test_core_attention_is_that_of_a_cpu(heads: int, kv_heads: int, qk: int, value: int, packed: bool) -> None:
    """Output and gradients; the libraries' kernels against the blocked one, the same bf16 tensors."""
    B, S = 2, 512
    chance = torch.Generator().manual_seed(0)
    sizes = (heads, qk), (kv_heads, qk), (kv_heads, value), (heads, value)
    *tensors, d_out = (torch.randn(B, S, *size, generator=chance).bfloat16() for size in sizes)
    documents = (torch.arange(S) >= torch.tensor([[200], [333]])).int() if packed else None
    results = []
    for device in ("cpu", "cuda"):
        leaves = [x.to(device).requires_grad_() for x in tensors]
        visible = whole_rows(S, None if documents is None else documents.to(device), torch.device(device))
        out = core_attention(*leaves, visible, qk**-0.5)
        gradients = torch.autograd.grad(out, leaves, d_out.to(device))
        results.append([x.cpu() for x in (out, *gradients)])
    for ours, right in zip(*reversed(results), strict=True):
        assert ours.shape == right.shape and calc_diff(ours, right) < 1e-4


@pytest.mark.parametrize(("heads", "kv_heads", "qk", "value"), [(8, 8, 192, 128), (8, 2, 128, 128), (4, 4, 20, 12)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("source", [0, 1, 2])
def test_shares_of_other_shards_are_those_of_a_cpu(
    heads: int, kv_heads: int, qk: int, value: int, packed: bool, source: int
) -> None:
    """The second of three shards: output, log-sum-exp and gradients, the latter from those of a result of more keys."""
    B, S = 2, 384
    chance = torch.Generator().manual_seed(0)
    sizes = (heads, qk), (kv_heads, qk), (kv_heads, value), (heads, value)
    q, k, v, d_out = (torch.randn(B, S // 3, *size, generator=chance).bfloat16() for size in sizes)
    documents = (torch.arange(S) >= torch.tensor([[200 * packed], [333 * packed]])).int()
    results = []
    for device in ("cpu", "cuda"):
        rows = SharedRows(Shard(1, 3, documents.to(device), torch.full((B,), S, device=device)))
        tensors, gradient = [x.to(device) for x in (q, k, v)], d_out.to(device)
        assert flash_serves(tensors[0], tensors[2]) == (device == "cuda")
        seen = rows.seen(source)
        out, lse = share_forward(*tensors, seen, qk**-0.5, torch.float32)
        whole = (out / 2).bfloat16(), lse.where(lse.isfinite(), 0.0) + 0.7  # as with as many keys of value 0
        parts = share_backward(gradient, *tensors, *whole, seen, qk**-0.5, torch.float32)
        results.append([x.cpu() for x in (out, lse, *parts)])
    for ours, right in zip(*reversed(results), strict=True):
        assert torch.equal(ours.isfinite(), right.isfinite())
        assert ours.shape == right.shape and calc_diff(ours.nan_to_num(neginf=0), right.nan_to_num(neginf=0)) < 1e-4
