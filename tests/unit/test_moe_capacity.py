"""Choices beyond an expert's capacity are dropped, by score or by position, and counted."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_engine import MoEConfig, MoELayer
from moe_engine.moe.capacity import limit_load

IDS = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3]])
WEIGHTS = torch.tensor([[0.1, 0.9], [0.4, 0.6], [0.3, 0.7], [0.2, 0.8]])


@pytest.mark.parametrize(("by_score", "kept"), [(False, [0, 1]), (True, [1, 2])])
def test_an_expert_keeps_the_first_or_the_best(by_score: bool, kept: list[int]) -> None:
    ids, weights, dropped = limit_load(IDS, WEIGHTS, 4, 1.0, by_score)  # 4 * 2 / 4 = 2 for each expert
    assert ids[:, 0].tolist() == [0 if t in kept else -1 for t in range(4)]
    assert torch.equal(ids[:, 1], IDS[:, 1]) and torch.equal(weights[:, 1], WEIGHTS[:, 1])
    assert weights[:, 0].tolist() == [float(WEIGHTS[t, 0]) if t in kept else 0.0 for t in range(4)]
    assert dropped.tolist() == [2, 8]


@pytest.mark.parametrize("by_score", [False, True])
def test_padding_takes_no_place_and_counts_nowhere(by_score: bool) -> None:
    mask = torch.tensor([False, True, True, True, True, False])
    padded = (torch.cat((x[:1], x, x[:1])) for x in (IDS, WEIGHTS))
    ids, weights, dropped = limit_load(*padded, 4, 1.0, by_score, mask)
    expected = limit_load(IDS, WEIGHTS, 4, 1.0, by_score)
    assert torch.equal(ids[mask], expected[0]) and torch.equal(weights[mask], expected[1])
    assert bool((ids[~mask] == -1).all()) and torch.equal(dropped, expected[2])


@pytest.mark.parametrize("T", [0, 1, 50])
def test_no_expert_has_more_than_its_capacity(T: int) -> None:
    chance = torch.Generator().manual_seed(0)
    ids = torch.rand(T, 8, generator=chance).pow(torch.arange(1.0, 9.0)).topk(3, dim=1).indices.sort(dim=1).values
    kept, _, dropped = limit_load(ids, torch.rand(T, 3, generator=chance), 8, 0.5, True)
    loads = torch.bincount(kept[kept >= 0], minlength=8)
    capacity = -(-T * 3 // 16)
    wanted = torch.bincount(ids.flatten(), minlength=8)
    assert torch.equal(loads, wanted.clamp(max=capacity))
    assert dropped.tolist() == [int((wanted - loads).sum()), 3 * T]


def test_a_layer_computes_only_what_is_kept() -> None:
    config = MoEConfig(8, 4, 4, 2, capacity_factor=0.5, drop="position", aux_loss_weight=0.0, init_std=0.3)
    limited, free = MoELayer(config), MoELayer(MoEConfig(8, 4, 4, 2, aux_loss_weight=0.0, init_std=0.3))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = limited(x)
    routing = free.router(x)
    ids, weights, dropped = limit_load(routing.expert_ids, routing.expert_weights, 4, 0.5, by_score=False)
    assert 0 < int(dropped[0]) < 12 and not limited.dropped_choices.any()
    for t in range(6):
        token = x[t].detach().clone()
        expected = torch.zeros(8)
        for e, w in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            if e >= 0:
                gate, up = (limited.experts.gate_up[e] @ token).chunk(2)
                expected += limited.experts.down[e] @ (torch.nn.functional.silu(gate) * up * w)
        assert torch.allclose(out[t], expected, atol=1e-6)
    out.sum().backward()
    assert bool(limited.router.num_tokens_per_expert.sum() == 12)  # balance sees what tokens wanted
    assert torch.equal(limited.dropped_choices, dropped)
    limited.eval()
    limited(x)
    assert torch.equal(limited.dropped_choices, dropped)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_is_computed_again_counts_no_dropped_choice_twice(reentrant: bool) -> None:
    layer = MoELayer(MoEConfig(8, 4, 4, 2, capacity_factor=0.5))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layer(x).sum().backward()
    once = layer.dropped_choices.clone()
    layer.dropped_choices.zero_()
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert once[0] > 0 and torch.equal(layer.dropped_choices, once)


def test_a_frozen_router_counts_dropped_choices_too() -> None:
    layer = MoELayer(MoEConfig(8, 4, 4, 2, capacity_factor=0.5))
    layer.router.requires_grad_(False)
    layer(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))
    assert layer.dropped_choices[0] > 0 and layer.dropped_choices[1] == 12
