"""Choices that do not come from the router: loads as asked, distinct experts, groups kept, and modes read strictly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_engine.config.errors import ConfigError
from moe_engine.config.routing import RoutingMode, routing_mode, routing_problem
from moe_engine.config.schema import MoEConfig
from moe_engine.moe.choices import VARIANTS, ForcedChoices, Recorder, SkewedLoads
from moe_engine.moe.dispatch import combine_wait
from moe_engine.moe.layer import MoELayer

SIZES: list[dict[str, Any]] = [
    {"num_experts": 256, "top_k": 8, "num_groups": 8, "top_groups": 4},
    {"num_experts": 16, "top_k": 4},
    {"num_experts": 8, "top_k": 3, "num_groups": 4, "top_groups": 2},  # a token takes two of one group, one of another
    {"num_experts": 257, "top_k": 8},
    {"num_experts": 4, "top_k": 4},
    {"num_experts": 16, "top_k": 1, "num_groups": 4, "top_groups": 2},
]


def config(**sizes: Any) -> MoEConfig:
    return MoEConfig(dim=8, expert_hidden=4, **sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])  # of the way from even to all tokens on one expert
def test_loads_are_as_asked_and_choices_legal(sizes: dict[str, Any], share: float) -> None:
    E, K, T = sizes["num_experts"], sizes["top_k"], 2048
    skew = 1 + share * (E / K - 1)
    ids = SkewedLoads(config(**sizes), skew).draw(T, seed=3)
    assert ids.shape == (T, K) and ids.dtype == torch.int64
    assert bool((ids[:, 1:] > ids[:, :-1]).all()), "ascending, so distinct"
    groups = sizes.get("num_groups", 1)
    by_group = torch.zeros(T, groups, dtype=torch.bool).scatter(1, ids // (E // groups), True)
    assert int(by_group.sum(dim=1).max()) <= sizes.get("top_groups", 1)
    counts = torch.bincount(ids.flatten(), minlength=E)
    assert abs(int(counts.max()) - skew * T * K / E) <= 2 * groups
    assert int(counts.argmax()) == 0 or share in (0.0, 1.0)
    if share == 0:
        assert int(counts.max() - counts.min()) <= 2 * groups


def test_random_choices_spread_over_ranks_like_random_ones() -> None:
    """Top-8 of 256 over 8 ranks: 5.2947 distinct ranks a token on average, as without a structure."""
    loads = SkewedLoads(config(num_experts=256, top_k=8), 1.0)
    found = [
        torch.zeros(512, 8).scatter(1, loads.draw(512, seed) // 32, 1.0).sum(dim=1).mean().item() for seed in range(40)
    ]
    assert sum(found) / len(found) == pytest.approx(5.2947, abs=0.1)


def test_no_tokens_no_choices() -> None:
    assert SkewedLoads(config(num_experts=8, top_k=2), 2.0).draw(0, seed=0).shape == (0, 2)


def test_calls_take_turns_with_different_tables() -> None:
    choices = ForcedChoices(SkewedLoads(config(num_experts=8, top_k=2), 1.0), seed=1)
    device = torch.device("cpu")
    first = [choices.given(64, device, "") for _ in range(VARIANTS)]
    assert len({tuple(ids.flatten().tolist()) for ids in first}) == VARIANTS
    again = [choices.given(64, device, "") for _ in range(VARIANTS)]
    assert {id(ids) for ids in again} == {id(ids) for ids in first}
    other = ForcedChoices(choices.loads, seed=2).given(64, device, "")
    assert not any(torch.equal(other, ids) for ids in first)


def test_a_layer_takes_them_while_it_trains_and_its_router_still_learns() -> None:
    layer = MoELayer(config(num_experts=8, top_k=2))
    layer.choices = ForcedChoices(SkewedLoads(layer.config, 1.0), seed=0)
    layer.choices = recorder = Recorder(layer.choices)
    x = torch.randn(4, 16, 8)
    packed = layer.pack(x.flatten(0, 1), (4, 16), label="micro_batch 2")
    rows = layer.compute(layer.dispatch_wait(layer.dispatch_start(packed)))
    combine_wait(layer.combine_start(rows, packed)).sum().backward()
    assert layer.router.num_tokens_per_expert.tolist() == [16] * 8
    assert layer.router.weight.grad is not None and float(layer.router.weight.grad.abs().sum()) > 0
    assert list(recorder.by_micro_batch) == [2] and recorder.by_micro_batch[2].shape == (64, 2)
    layer.eval()
    given = layer.router(x)
    layer.pack(x.flatten(0, 1), (4, 16), label="micro_batch 0")
    assert list(recorder.by_micro_batch) == [2], "evaluation routes naturally"
    assert given.expert_ids.shape == (4, 16, 2)


def test_a_given_choice_has_the_routers_weights() -> None:
    layer = MoELayer(config(num_experts=8, top_k=2))
    x = torch.randn(5, 8)
    natural = layer.router(x)
    same = layer.router(x, None, natural.expert_ids)
    assert torch.equal(same.expert_weights, natural.expert_weights)
    other = layer.router(x, None, torch.tensor([[0, 1]] * 5))
    scores = natural.scores[:, :2]
    assert torch.allclose(other.expert_weights, scores / scores.sum(dim=1, keepdim=True))


def test_modes_are_read_strictly() -> None:
    assert routing_mode("natural") == RoutingMode("natural")
    assert routing_mode("balanced") == routing_mode("skewed:1") == RoutingMode("forced", 1.0)
    assert routing_mode("skewed:2.5") == RoutingMode("forced", 2.5)
    assert routing_mode("replay:runs/a:b/step_1") == RoutingMode("replay", folder="runs/a:b/step_1")
    for text, told in {
        "balance": "no such choice; there are natural, balanced, skewed:<x> (for example skewed:2) and replay:<folder>",
        "": "no such choice",
        "replay:": "no such choice",
        "skewed": "no such choice",
        "skewed:": "skewed takes a number, for example skewed:2",
        "skewed:much": "skewed takes a number",
        "skewed:0.5": "the most loaded expert has at least the mean load, for example skewed:2",
        "skewed:nan": "the most loaded expert has at least",
        "skewed:inf": "the most loaded expert has at least",
    }.items():
        with pytest.raises(ConfigError) as caught:
            routing_mode(text)
        assert str(caught.value).startswith(told), text
    assert routing_problem("moe.routing", "skewed:5", 16, 4) == (
        "an expert can have at most num_experts / top_k = 4 times the mean load, that of every token; "
        "use moe.routing=skewed:4 or less"
    )
    assert routing_problem("moe.routing", "skewed:4", 16, 4) is None
    told = routing_problem("moe.routing", "skewed:3", 8, 3)
    assert told is not None and told.endswith("use moe.routing=skewed:2.66 or less")
    assert routing_problem("moe.routing", "skewed:2.66", 8, 3) is None
