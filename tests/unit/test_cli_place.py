"""`moe-engine place`: the loads of a run in, slots of experts out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_engine.__main__ import main
from moe_engine.expert_load import LoadHistory

# The loads of EPLB's README, as two layers of a run.
LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
SLOTS = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
LAYERS = ["layers.1.moe", "layers.2.moe"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["place", *words]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "Traceback" not in output.err
    return output.err.splitlines()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose first steps had other loads than its last ten."""
    history = LoadHistory(tmp_path / "expert_load.safetensors", LAYERS, 12)
    for step in range(20):
        history.add(step, torch.tensor(LOADS) if step >= 10 else torch.ones(2, 12, dtype=torch.int64))
    history.save()
    return tmp_path


def test_published_loads_give_the_published_slots(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run / "placement.json"
    words = [f"loads={run}", "copies=16", "gpus=8", "nodes=2", "groups=4", "steps=10", f"out={out}"]
    assert main(["place", *words]) == 0
    text = capsys.readouterr().out
    assert "8 GPUs on 2 nodes" in text and "1.208" in text and "1.242" in text and "5 (2)" in text
    written = json.loads(out.read_text())
    assert written["slots"] == dict(zip(LAYERS, SLOTS, strict=True))
    assert (written["experts"], written["copies"], written["gpus"]) == (12, 16, 8)


def test_without_copies_every_expert_has_one_slot(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", f"loads={run / 'expert_load.safetensors'}", "gpus=4", "steps=10"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[0] for line in lines] == LAYERS
    assert all(float(placed) <= float(contiguous) for _, contiguous, placed in lines)
    assert float(lines[0][1]) == pytest.approx(330 * 4 / 1033, abs=1e-3)


def test_mistakes_are_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys) == ["loads=: a run folder is needed, for example loads=runs/quickstart"]
    assert refused(capsys, f"loads={run}/none", "gpus=0", "steps=-1") == [
        f"loads={run}/none: no expert_load.safetensors there; give the folder of a finished run, runs/<name>",
        "gpus=0: must be 1 or more, for example gpus=1",
        "steps=-1: must be 0 or more, for example steps=0",
    ]
    assert refused(capsys, f"loads={run}", "copies=13", "gpus=8") == [
        "copies=13: must be 12 or more and a multiple of the 8 GPUs; use copies=16"
    ]
    (run / "broken.safetensors").write_bytes(b"x" * 20)
    assert "cannot be read" in refused(capsys, f"loads={run / 'broken.safetensors'}")[0]
