"""Conversions stream: memory does not grow with the model, and a rank reads what its ranges need."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import GPT_OSS, V3, random_folder

from moe_engine.checkpoint.huggingface.reader import HuggingFaceWeights
from moe_engine.config.schema import ModelConfig

# Private memory of the process, without the pages of mapped files, which the system takes back when it needs them.
MEASURED = """
import json, sys, threading
from pathlib import Path
from moe_engine.checkpoint.huggingface.writer import write_huggingface
from moe_engine.checkpoint.weights import open_weights, write_checkpoint

def private():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def peak(work):
    samples, done = [private()], threading.Event()
    def sample():
        while not done.wait(0.0005):
            samples.append(private())
    thread = threading.Thread(target=sample)
    thread.start()
    work()
    done.set()
    thread.join()
    return max(samples) - samples[0]

folder = Path(sys.argv[1])
def checkpoint(name):
    weights = open_weights(folder / "source")
    return peak(lambda: write_checkpoint(weights, folder / name, None, 20_000_000))

checkpoint("first")  # the first time the process itself grows: modules, the allocator's arenas
there = checkpoint("checkpoint")
weights = open_weights(folder / "checkpoint")
print(json.dumps([there, peak(lambda: write_huggingface(weights, folder / "back", None, 20_000_000))]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "like",
    [pytest.param(V3, id="a tensor for each expert"), pytest.param(GPT_OSS, id="one for all", marks=pytest.mark.slow)],
)
def test_a_few_tensors_are_in_memory(like: ModelConfig, tmp_path: Path) -> None:
    model = replace(like, dim=256, expert_hidden=256, num_experts=40, mtp_depth=0)
    source = random_folder(tmp_path / "source", model, files=4)
    total = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    largest = 2 * 256 * 256 * 4  # bytes of an expert's gate and up projection
    done = subprocess.run([sys.executable, "-c", MEASURED, tmp_path], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    there, back = json.loads(done.stdout)
    assert total > 100 * largest
    assert max(there, back) < 12 * largest, (there, back)


def test_range_reads_the_rows_that_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = HuggingFaceWeights(random_folder(tmp_path / "source"))
    reads: list[Any] = []
    read = weights.files.read
    monkeypatch.setattr(weights.files, "read", lambda *words: reads.append(words) or read(*words))
    found = weights.read("layers.0.mlp.gate_up.weight", 40 * 32 + 5, 55 * 32 - 1)  # 48 rows of gate, then up
    layer = "model.layers.0.mlp"
    assert reads == [(f"{layer}.gate_proj.weight", 40, 48, None), (f"{layer}.up_proj.weight", 0, 7, None)]
    assert found.shape == (15 * 32 - 6,) and found.dtype == torch.float32
