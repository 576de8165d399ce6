"""Weights to start from and checkpoints to go on from: what does not fit is refused before any rank starts."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hf_folders import V3, random_folder

from moe_engine.__main__ import main
from moe_engine.checkpoint.weights import open_weights, write_checkpoint
from moe_engine.config.schema import ModelConfig

WORDS = [f"model.{name}={str(value).lower()}" for name, value in asdict(V3).items()]


def train(tmp_path: Path, *words: str) -> int:
    return main(["train", "run.check=true", f"run.dir={tmp_path}", *WORDS, *words])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return random_folder(tmp_path / "source")


def checkpoint(tmp_path: Path, source: Path, dtype: torch.dtype | None = None) -> Path:
    """A checkpoint of the run `default` in `tmp_path`, with weights alone."""
    path = tmp_path / "default" / "checkpoints" / "step_7"
    write_checkpoint(open_weights(source), path, dtype, 10**9)
    return path


def test_start_is_written_in_two_ways(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word in (f"init_from={source}", f"train.init_from={source}"):
        assert train(tmp_path, word) == 0
        assert f"init_from: {source}" in capsys.readouterr().out


def test_folder_checkpoint_and_run_are_all_a_start(tmp_path: Path, source: Path) -> None:
    path = checkpoint(tmp_path, source)
    for start in (source, path, path.parent, path.parent.parent):
        assert train(tmp_path, f"init_from={start}") == 0


def test_start_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, f"init_from={tmp_path / 'nowhere'}") == 2
    assert f"train.init_from={tmp_path / 'nowhere'}: no such folder; give a Hugging Face" in capsys.readouterr().err


CHANGES = {
    "model.dim=48": "use model.dim=32",
    "model.top_k=3": "use model.top_k=2",
    "model.route_scale=1.0": "use model.route_scale=2.5",
    "model.vocab_size=300": "use model.vocab_size=260",
    "model.norm_eps=1e-6": "use model.norm_eps=1e-05",
    "model.rope_theta=500000": "use model.rope_theta=10000.0",
    "model.mtp_depth=0": "use model.mtp_depth=1",
    "model.tied_head=true": "use model.tied_head=false",
    "model.q_lora_rank=0": "use model.q_lora_rank=24",
}


@pytest.mark.parametrize("how", ["run.resume=true", "init_from"])
def test_another_model_is_refused_by_name(
    how: str, tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path, source)
    words = [f"init_from={source}" if how == "init_from" else how]
    assert train(tmp_path, *words) == 0
    assert train(tmp_path, *words, "model.init_std=0.5", "model.name=other", "model.max_positions=8192") == 0
    capsys.readouterr()
    assert train(tmp_path, *words, *CHANGES) == 2
    lines = capsys.readouterr().err.splitlines()
    for change, rule in CHANGES.items():
        name = change.partition("=")[0]
        assert [line for line in lines if line.startswith(f"{name}=") and line.endswith(rule)], (change, lines)
    assert len(lines) == len(CHANGES)


def test_options_without_effect_on_the_model_may_differ(tmp_path: Path, source: Path) -> None:
    assert train(tmp_path, f"init_from={source}", "model.num_kv_heads=1", "model.rope_factor=40") == 0


def test_other_master_weights_cannot_be_resumed_but_started_from(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(tmp_path, source, torch.bfloat16)
    assert train(tmp_path, "run.resume=true") == 2
    assert f"precision.master=float32: {path} has bfloat16" in capsys.readouterr().err
    assert train(tmp_path, f"init_from={path}") == 0


def test_resume_without_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "run.resume=true") == 2
    assert "run.resume=true: no complete checkpoint in" in capsys.readouterr().err


def test_resume_does_not_read_the_start(tmp_path: Path, source: Path) -> None:
    """A run's own config.yaml names the weights that it started from, which may be gone."""
    checkpoint(tmp_path, source)
    assert train(tmp_path, "run.resume=true", "init_from=gone") == 0


def test_folder_of_another_size_is_refused_with_all_differences(tmp_path: Path) -> None:
    other: ModelConfig = replace(V3, dim=64, num_experts=16)
    assert train(tmp_path, f"init_from={random_folder(tmp_path / 'other', other)}") == 2
