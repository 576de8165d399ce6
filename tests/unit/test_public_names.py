"""What people import changes only where docs/public_names.txt says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import public_names

ROOT = Path(__file__).resolve().parents[2]


def test_public_names_and_signatures_are_those_announced() -> None:
    announced = (ROOT / "docs" / "public_names.txt").read_text()
    assert public_names.text() == announced, (
        "run tests/public_names.py > docs/public_names.txt and say it in CHANGELOG.md"
    )


def test_importing_the_layer_loads_nothing_of_the_engine_above_it() -> None:
    """What it adds to torch is its own few modules (of the planner sizes of windows): no Hydra, trainer, DTensor."""
    program = (
        "import torch, sys; before = set(sys.modules); from moe_engine import MoELayer, experts_forward\n"
        "print(sorted({'.'.join(name.split('.')[:2]) for name in set(sys.modules) - before}))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    added = set(eval(result.stdout))
    ours = {
        "moe_engine",
        *(f"moe_engine.{room}" for room in ("config", "distributed", "layout", "moe", "ops", "planner")),
    }
    assert not added & {"torch._dynamo", "torch._inductor"}  # half a second, and Triton
    assert {name for name in added if name.startswith("moe_engine")} == ours
    assert not {name.partition(".")[0] for name in added} & {
        "hydra",
        "omegaconf",
        "triton",
        "matplotlib",
        "transformers",
    }
    assert "torch.distributed.tensor" not in added
