"""Dry runs without other ranks: tensors without data, the assumed routing, sizes of whole clusters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_engine.__main__ import main
from moe_engine.dryrun.tensors import META, TensorsWithoutData
from moe_engine.planner.architecture import Architecture
from moe_engine.planner.choices import choice_over_ranks, even_choice
from moe_engine.planner.routing import row_counts


def model(num_experts: int, top_k: int, num_groups: int = 1, top_groups: int = 1) -> Architecture:
    return Architecture(
        100, 8, 2, 0, 8, 2, 2, 4, 4, num_experts=num_experts, top_k=top_k, num_groups=num_groups, top_groups=top_groups
    )


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "ep", "load", "groups", "top_groups"),
    [
        (4096, 8, 256, 64, 1.0, 8, 4),
        (4096, 8, 256, 64, 1.5, 8, 4),
        (512, 8, 256, 8, 1.0, 1, 1),
        (64, 3, 8, 2, 1.0, 1, 1),
        (64, 3, 8, 4, 1.0, 4, 2),
        (64, 3, 8, 8, 1.0, 1, 1),
        (100, 2, 8, 4, 1.7, 1, 1),
    ],
)
def test_assumed_choices_send_the_stated_rows(
    tokens: int, top_k: int, experts: int, ep: int, load: float, groups: int, top_groups: int
) -> None:
    rows = row_counts(model(experts, top_k, groups, top_groups), tokens, ep, load)
    for busiest in (0, ep - 1):
        ids = torch.from_numpy(choice_over_ranks(tokens, top_k, experts, rows, busiest))
        assert ids.shape == (tokens, top_k)
        assert bool((ids[:, 1:] > ids[:, :-1]).all())
        ranks = ids // (experts // ep)
        first = torch.ones_like(ranks, dtype=torch.bool)
        first[:, 1:] = ranks[:, 1:] != ranks[:, :-1]
        assert torch.bincount(ranks[first], minlength=ep).tolist() == rows.to_rank(busiest)
        assert rows.received == ep * rows.to_rank(busiest)[busiest]
        if tokens >= 512:
            assert float((ranks == busiest).sum()) * ep / (tokens * top_k) == pytest.approx(load, rel=0.05)


def test_an_even_choice_gives_every_expert_as_many_tokens() -> None:
    assert np.bincount(even_choice(64, 3, 8).ravel()).tolist() == [24] * 8


def test_numbers_have_no_data_and_integers_do() -> None:
    with TensorsWithoutData() as mode:
        before = mode.live.now
        ids = torch.arange(8, device="meta")
        x = torch.randn(8, 1000, device="meta", requires_grad=True)
        picked = x.index_select(0, ids.flip(0))
        assert (picked.device.type, ids.device.type) == ("meta", "cpu")
        assert ids.tolist() == list(range(8))
        assert (ids.float() * 2).device.type == "meta"
        assert int((x > 0).sum()) == 0  # what they would decide
        assert float(picked.detach().sum()) == 0.0
        picked.square().sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        assert mode.live.now - before == 3 * 8 * 1000 * 4 + 8 * 8
        del picked
        assert mode.live.now - before == 2 * 8 * 1000 * 4 + 8 * 8
    assert mode.live.peak > mode.live.now


def test_a_repeated_operation_makes_tensors_of_their_own() -> None:
    with TensorsWithoutData() as mode:
        x = torch.randn(8, 1000, device="meta")
        before = mode.live.now
        first, second = x.exp(), x.exp()
        assert mode.live.now - before == 2 * 8 * 1000 * 4
        assert (second.shape, second.dtype, x.double().exp().dtype) == (x.shape, x.dtype, torch.float64)
        assert x.t().exp().stride() == x.t().stride()
        del first
        assert mode.live.now - before == 8 * 1000 * 4
        assert torch.view_as_complex(x.view(8, 500, 2)).device.type == "meta"


def test_a_dry_run_prints_what_a_rank_of_a_cluster_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["model=mini_v3", "cluster.gpus=1024", "parallel.pp=4", "parallel.ep=8", "pipeline=dualpipe"]
    words += ["train.global_batch=2048", "train.micro_batch=1", "train.seq_len=64", f"out={tmp_path / 'dry.json'}"]
    words += ["plan.keeping=megatron"]
    assert main(["plan", "dry_run=true", "rank=777", *words]) == 0
    text = capsys.readouterr().out
    for part in ("Rank 777 of 1024", "kept for backward", "all_to_all", "reduce_scatter_sum", "What is faked"):
        assert part in text
    assert "plan.keeping=megatron is for the planner; a dry run has no use for it" in text
    assert (tmp_path / "dry.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dry_run=true", "rank=8"], "rank=8: ranks are 0 to 7; use rank=0"),
        (["dry_run=true", "plan.recompute=[moe]"], "plan.recompute=[moe]: the engine recomputes"),
        (["dry_run=true", "parallel.tp=2"], "parallel.tp=2"),
        (
            ["dry_run=true", "parallel.pp=4", "parallel.dp=16"],
            "cluster.gpus=8: pp 4 x dp 16 x cp 1 x tp 1 are 64 ranks; use cluster.gpus=64, or leave parallel.dp out",
        ),
        (
            ["dry_run=true", "search=true"],
            "search=true: a dry run is of one layout; use search=false, or dry_run=false",
        ),
        (["dry_run=true", "moe.routing=balanced"], "moe.routing=balanced: a dry run chooses experts by plan.load"),
        (["dry_run=true", "plan.load=0.5"], "plan.load=0.5: must be 1 or more; use plan.load=1"),
        (["moe.wire=fp8"], "moe.wire=fp8: is for a dry run; use dry_run=true, or leave it out"),
        (["cp.exchange=ulysses"], "cp.exchange=ulysses: is for a dry run; use dry_run=true, or leave it out"),
        (["rank=3"], "rank=3: is which rank of a dry run; use dry_run=true, or rank=0"),
    ],
)
def test_what_the_engine_cannot_run_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "model=mini_v3", "cluster.gpus=8", *words]) == 2
    assert message in capsys.readouterr().err


def test_numbers_without_values_are_sorted_as_equal_ones() -> None:
    with TensorsWithoutData():
        numbers = torch.empty(2, 5, device=META)
        assert numbers.argsort(dim=1, descending=True, stable=True).tolist() == [[0, 1, 2, 3, 4]] * 2
        assert numbers.sort(dim=0, stable=True).indices.tolist() == [[0] * 5, [1] * 5]
