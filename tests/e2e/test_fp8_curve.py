"""fp8 training follows bf16: the quickstart's model for a short while (`docs/design/fp8_training.md` has 300 steps)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import run_command

STEPS = 60


def moving_average(folder: Path, precision: str) -> list[float]:
    """Of the losses of a run, 0.9 of what it was and 0.1 of each step's."""
    words = [
        "experiment=quickstart", "parallel=single", f"precision={precision}", f"train.steps={STEPS}", "optim.lr=3e-4",
        "train.global_batch=2", "train.eval_sequences=8", "train.sample_tokens=0",
        f"run.dir={folder}/runs", f"run.name={precision}", f"data.cache_dir={folder}/cache",
    ]  # fmt: skip
    code, output = run_command(folder, "train", *words)
    assert code == 0, output
    lines = (folder / "runs" / precision / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    averages = losses[:1]
    for loss in losses[1:]:
        averages.append(0.9 * averages[-1] + 0.1 * loss)
    return averages


@pytest.mark.slow
def test_fp8_follows_bf16(tmp_path: Path) -> None:
    bf16, fp8 = moving_average(tmp_path, "bf16"), moving_average(tmp_path, "fp8")
    assert len(bf16) == len(fp8) == STEPS and bf16 != fp8
    assert bf16[-1] < 0.7 * bf16[0]
    assert abs(fp8[-1] - bf16[-1]) < 0.0025 * bf16[-1]
