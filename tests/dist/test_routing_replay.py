"""The choices of a step, recorded in one layout, are those of every step that replays them in another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_cases import Case, config_of
from layouts import rank_batches
from ranks import run_ranks
from safetensors.torch import load_file

from moe_engine.config.errors import ConfigError
from moe_engine.trainer import Trainer

RECORDED = Case(pp=2, dp=2, ep=2, schedule="dualpipe", padding=True, combine="exact")
LAYOUTS = [
    replace(RECORDED, pp=1, dp=1, ep=1, schedule="1f1b", micro_batch=8),
    replace(RECORDED, pp=2, dp=2, ep=2, schedule="overlapped_1f1b", placement=1),
    replace(RECORDED, pp=1, dp=1, ep=2, schedule="1f1b", cp=2, micro_batch=2),
]
SHARED = Case(cp=4, ep=4, model="v3_heads", exchange="ulysses", micro_batch=2)  # four ranks hold parts of each sequence


def _record(rank: int, folder: Path, case: Case = RECORDED) -> dict[str, Any]:
    trainer = Trainer(config_of(case), rank, torch.device("cpu"))
    trainer.step(rank_batches(trainer, case, 0))
    trainer.record_choices()
    result = trainer.step(rank_batches(trainer, case, 1))
    trainer.save_choices(folder)
    assert all(layer.choices is None for layer in trainer.moe_layers().values())
    return {"counts": result.expert_loads.counts}


def _replay(rank: int, case: Case, path: Path) -> dict[str, Any]:
    config = config_of(case)
    config.moe.routing = f"replay:{path}"
    trainer = Trainer(config, rank, torch.device("cpu"))
    results = [trainer.step(rank_batches(trainer, case, step)) for step in range(3)]
    return {"counts": [each.expert_loads.counts for each in results], "losses": [each.loss for each in results]}


def test_choices_recorded_in_one_layout_are_replayed_in_others(tmp_path: Path) -> None:
    recorded = run_ranks(RECORDED.world, _record, tmp_path)[0]["counts"]
    path = tmp_path / "step_2"
    found = [run_ranks(case.world, _replay, case, path)[0] for case in LAYOUTS]
    for each in found:
        # The padding of step 1 is the recorded one's; other steps have other padding, which is not counted.
        assert torch.equal(each["counts"][1], recorded)
        assert found[0]["losses"] == pytest.approx(each["losses"], rel=1e-12)


def test_choices_of_shared_sequences_are_recorded_as_one_rank_does(tmp_path: Path) -> None:
    """Every token's own ones at its place, whichever rank held it."""
    run_ranks(SHARED.world, _record, tmp_path / "shared", SHARED)
    run_ranks(1, _record, tmp_path / "alone", replace(SHARED, cp=1, ep=1))
    ranks = [load_file(tmp_path / f"shared/step_2/rank_{rank}.safetensors") for rank in range(SHARED.world)]
    alone = load_file(tmp_path / "alone/step_2/rank_0.safetensors")
    assert len(alone) == 4 and alone.keys() == ranks[0].keys()
    for key, ids in alone.items():
        assert torch.equal(torch.cat([rank[key] for rank in ranks]), ids)


def _refused(rank: int, case: Case, path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        _replay(rank, case, path)
    return str(caught.value)


def test_other_sizes_and_damage_are_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(RECORDED.world, _record, tmp_path)
    path, case = tmp_path / "step_2", Case(dp=2, ep=2)
    told = run_ranks(2, _refused, replace(case, rows=16), path)
    assert (
        told[0]
        == told[1]
        == (f"train.global_batch=16: {path} was recorded with train.global_batch=8; use train.global_batch=8")
    )
    (deeper,) = run_ranks(1, _refused, replace(case, dp=1, ep=1, layers=5), path)
    assert deeper == f"model.num_layers=5: {path} was recorded with model.num_layers=4; use model.num_layers=4"
    file = next(path.glob("rank_*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 0xFF
    file.write_bytes(bytes(data))
    assert all(str(file) in each for each in run_ranks(2, _refused, case, path))
    assert "no recorded step is there" in run_ranks(1, _refused, replace(case, dp=1, ep=1), tmp_path / "step_9")[0]
