"""Training from somebody else's weights: the same start in every layout, each rank with its own part."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from hf_folders import random_folder, random_tensors
from layout_cases import Case, config_of
from layouts import differences, one_process, run
from torch import Tensor

from moe_engine.checkpoint.weights import open_weights, write_checkpoint
from moe_engine.trainer import Trainer

LAYOUTS = [
    Case(pp=2, dp=2, ep=2, tied=True, steps=3),
    pytest.param(Case(pp=2, dp=2, schedule="zbv", steps=3), marks=pytest.mark.slow),
    pytest.param(Case(dp=4, ep=4, steps=3), marks=pytest.mark.slow),
]


def start_from(path: Path, trainer: Trainer) -> None:
    """Load into a trainer whose moments and masters hold nothing of use."""
    for shard in trainer.optimizer.named_shards():
        shard.states["master"].fill_(float("nan"))
    assert trainer.load_weights(path) == []
    assert trainer.steps_done == 0 and trainer.optimizer.state_steps == 0


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_every_layout_starts_from_the_same_weights(case: Case, tmp_path: Path) -> None:
    source = random_folder(tmp_path / "source", config_of(case).model, files=2, std=0.1)
    whole = run(one_process(case), fault=partial(start_from, source))
    parts = run(case, fault=partial(start_from, source))
    assert whole.margin > 1e-6
    assert max(differences(whole, parts).values()) < 1e-10


def remember(path: Path, trainer: Trainer) -> None:
    """Load, and save what a rank then holds."""
    start_from(path, trainer)
    trainer.save(path.parent / "saved")


def test_ranks_together_hold_the_folder(tmp_path: Path) -> None:
    """From the folder over four ranks into a checkpoint: every number is that of the folder."""
    case = Case(pp=2, dp=2, ep=2, precision="fp32", steps=1)
    model = config_of(case).model
    source = random_folder(tmp_path / "source", model, std=0.1)
    run(case, fault=partial(remember, source))
    weights, tensors = open_weights(tmp_path / "saved" / "step_0"), random_tensors(model, std=0.1)

    def same(name: str, *keys: str) -> bool:
        right: Tensor = torch.cat([tensors[key] for key in keys])
        return torch.equal(weights.read(name), right.reshape(-1))

    assert same("embedding.weight", "model.embed_tokens.weight")
    assert same("layers.2.moe.router.expert_bias", "model.layers.2.mlp.gate.e_score_correction_bias")
    assert same("mtp.0.block.attention.q_up.weight", "model.layers.4.self_attn.q_b_proj.weight")
    for e in range(model.num_experts):
        expert = f"model.layers.3.mlp.experts.{e}"
        assert same(f"layers.3.moe.experts.{e}.gate_up", f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight")
        assert same(f"layers.3.moe.experts.{e}.down", f"{expert}.down_proj.weight")
    assert weights.model == model


def test_checkpoint_is_as_good_a_start_as_the_folder(tmp_path: Path) -> None:
    case = Case(pp=2, dp=2, ep=2, steps=2)
    source = random_folder(tmp_path / "source", config_of(case).model, std=0.1)
    write_checkpoint(open_weights(source), tmp_path / "checkpoint", None, 50_000)
    records = [run(case, fault=partial(start_from, path)) for path in (source, tmp_path / "checkpoint")]
    assert not any(differences(*records).values())


def damaged(path: Path, trainer: Trainer) -> None:
    if trainer.groups.rank == 3:
        path = path.with_name("nowhere")
    trainer.load_weights(path)


def test_rank_that_cannot_read_fails_all(tmp_path: Path) -> None:
    case = Case(pp=2, dp=2, ep=2, steps=1)
    source = random_folder(tmp_path / "source", config_of(case).model)
    with pytest.raises(AssertionError, match="nowhere: no such folder") as error:
        run(case, fault=partial(damaged, source))
    assert str(error.value).count("ConfigError") >= 4
