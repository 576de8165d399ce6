"""Figures of expert load, their history over a run, and the picture."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from moe_engine import expert_load
from moe_engine.expert_load import LoadHistory, load_figures
from moe_engine.moe.placement import ExpertPlacement

LAYERS = ["layers.1.moe", "layers.2.moe", "mtp.0.block.moe"]


def test_figures_of_a_layer() -> None:
    figures = load_figures([6, 2, 0, 0], ExpertPlacement(4, 2))
    assert figures.max_over_mean == 3.0 and figures.rank_max_over_mean == 2.0 and figures.dead_experts == 2
    assert figures.entropy == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4))
    assert load_figures([6, 2, 0, 0], ExpertPlacement(4, 2, (0, 1, 1, 0))).rank_max_over_mean == 1.5


def test_figures_of_even_and_of_no_load() -> None:
    for counts in ([5, 5, 5, 5], [0, 0, 0, 0]):
        figures = load_figures(counts, ExpertPlacement(4, 2))
        assert (figures.max_over_mean, figures.rank_max_over_mean) == (1.0, 1.0)
        assert figures.entropy == pytest.approx(1.0)
    assert load_figures([0, 9, 0], ExpertPlacement(3)).entropy == 0.0
    assert load_figures([7], ExpertPlacement(1)).entropy == 1.0


def counts_of(step: int) -> torch.Tensor:
    return torch.arange(12).view(3, 4) + step


def test_history_joins_steps_and_loses_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_load, "COLUMNS", 8)
    history = LoadHistory(tmp_path / "loads.safetensors", LAYERS, 4)
    for step in range(37):
        history.add(step, counts_of(step))
    assert history.steps_a_column == 8 and len(history.columns) == 5
    assert torch.equal(history.columns.sum(dim=0), sum(counts_of(step) for step in range(37)))
    assert torch.equal(history.columns[1], sum(counts_of(step) for step in range(8, 16)))


def test_history_goes_on_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_load, "COLUMNS", 8)
    whole = LoadHistory(tmp_path / "whole.safetensors", LAYERS, 4)
    killed = LoadHistory(tmp_path / "loads.safetensors", LAYERS, 4)
    for step in range(20):
        whole.add(step, counts_of(step))
    for step in range(14):  # columns of two steps; the checkpoint is of step 12
        killed.add(step, counts_of(step))
    killed.save()
    again = LoadHistory(tmp_path / "loads.safetensors", LAYERS, 4)
    again.begin(12)
    assert len(again.columns) == 6
    for step in range(12, 20):
        again.add(step, counts_of(step))
    assert torch.equal(whole.columns, again.columns) and whole.steps_a_column == again.steps_a_column


def test_history_of_another_model_is_not_taken_up(tmp_path: Path) -> None:
    history = LoadHistory(tmp_path / "loads.safetensors", LAYERS, 4)
    history.add(0, counts_of(0))
    history.save()
    other = LoadHistory(tmp_path / "loads.safetensors", LAYERS[:2], 4)
    other.begin(1)
    assert len(other.columns) == 0 and other.first_step == 1


def test_the_picture_shows_each_layer(tmp_path: Path) -> None:
    history = LoadHistory(tmp_path / "loads.safetensors", LAYERS, 4)
    for step in range(6):
        history.add(step, counts_of(step))
    history.draw(tmp_path / "even.png")
    history.add(6, torch.tensor([[100, 0, 0, 0]] * 3))
    history.draw(tmp_path / "skewed.png")
    even, skewed = ((tmp_path / name).read_bytes() for name in ("even.png", "skewed.png"))
    assert even.startswith(b"\x89PNG") and even != skewed
    over_mean = history.over_mean()
    assert over_mean.shape == (3, 4, 7) and over_mean[0, 0, 6] == 4.0
    assert torch.allclose(over_mean.mean(dim=1), torch.ones(3, 7, dtype=torch.float64))


def test_nothing_is_drawn_without_experts_or_steps(tmp_path: Path) -> None:
    LoadHistory(tmp_path / "loads.safetensors", LAYERS, 4).draw(tmp_path / "none.png")
    LoadHistory(tmp_path / "loads.safetensors", [], 4).draw(tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
