"""The examples run as they stand, and what they train learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LINES = {"plain_model": 30, "expert_parallel": 40}  # of code that people are to read at once
FALLS = {"plain_model": 0.7, "expert_parallel": 0.6, "tiny_mixtral": 0.7, "lora_experts": 0.95}


@pytest.mark.parametrize("name", FALLS)
def test_an_example_runs_and_its_loss_falls(name: str, tmp_path: Path) -> None:
    launch = (
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"] if name == "expert_parallel" else []
    )
    done = subprocess.run(
        [sys.executable, *launch, EXAMPLES / f"{name}.py"], cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)", done.stdout, re.MULTILINE)]
    assert len(losses) == 2 and losses[1] < FALLS[name] * losses[0], done.stdout
    if name == "lora_experts":
        assert "base unchanged: True" in done.stdout
    assert not list(tmp_path.iterdir())


def test_examples_are_short() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(FALLS)
    for name, most in LINES.items():
        code = (EXAMPLES / f"{name}.py").read_text().partition('"""\n')[2].splitlines()
        assert len([line for line in code if line.strip()]) <= most, name
