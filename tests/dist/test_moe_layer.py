"""The layer over 2 and 4 ranks equals one process: outputs, raw gradients, counts, bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_moe import global_tensors, make_config
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_engine.distributed.collectives import CollectiveLog, Communicator
from moe_engine.moe.layer import MoELayer
from moe_engine.ops.wgrad_queue import WgradQueue

WORLDS = (2, 4)


@dataclass(frozen=True)
class Scenario:
    """tokens: of each quarter of the batch; a rank of a world of 4 has one quarter, of a world of 2 two."""

    tokens: tuple[int, int, int, int] = (10, 7, 12, 8)
    dtype: torch.dtype = torch.float64
    skew: int | None = None  # every token prefers this expert
    tie: bool = False  # all experts have equal logits
    recompute: bool = False
    defer: bool = False
    changes: dict[str, Any] = field(default_factory=dict)


FP64 = {
    "balanced": Scenario(),
    "exact": Scenario(changes={"combine": "exact"}),
    "softmax": Scenario(changes={"score_function": "softmax", "group_score": "max", "normalize_weights": False}),
    "everything to one expert": Scenario(skew=6, changes={"top_k": 1, "num_groups": 1, "top_groups": 1}),
    "most to one expert": Scenario(skew=0),
    "ranks without tokens": Scenario(tokens=(9, 0, 0, 0)),
    "no tokens at all": Scenario(tokens=(0, 0, 0, 0)),
    "a single token": Scenario(tokens=(0, 0, 0, 1), changes={"combine": "exact"}),
    "no shared expert": Scenario(changes={"num_shared_experts": 0}),
    "ties, recomputed": Scenario(tie=True, recompute=True),
    "deferred": Scenario(defer=True),
}
BITS = {
    f"{combine} {str(dtype)[6:]}": Scenario(dtype=dtype, changes={"combine": combine})
    for combine in ("dedup", "exact")
    for dtype in (torch.float32, torch.bfloat16)
}


def make_layer(scenario: Scenario, ep: Communicator | None = None, counts: Communicator | None = None) -> MoELayer:
    layer = MoELayer(make_config(**scenario.changes), ep=ep, ep_counts=counts, dtype=scenario.dtype)
    layer.router.expert_bias.copy_(torch.arange(8) * 0.01)
    if scenario.skew is not None:
        layer.router.expert_bias[scenario.skew] = 5.0
    if scenario.tie:
        with torch.no_grad():
            layer.router.weight[:] = layer.router.weight[:1]
        layer.router.expert_bias.zero_()
    return layer


def quarters(scenario: Scenario) -> list[tuple[Tensor, Tensor]]:
    """(x, d_out) of each quarter of the batch."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(2, n, 24, generator=generator, dtype=torch.float64).to(scenario.dtype) for n in scenario.tokens]
    return [(both[0], both[1]) for both in made]


def run_layer(layer: MoELayer, scenario: Scenario, parts: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """One forward and backward over some quarters, each a sequence of its own in the balance loss."""
    queue = WgradQueue() if scenario.defer else None
    outs, inputs = [], []
    for i, (x, d_out) in enumerate(parts):
        x = x.clone().requires_grad_()
        if scenario.recompute:
            out, aux = checkpoint(layer, x, None, True, queue, use_reentrant=False)
        else:
            out, aux = layer(x, return_aux=True, queue=queue)
        if queue is None:
            torch.autograd.backward([out, aux], [d_out, None])
        else:
            with queue.defer(i):
                torch.autograd.backward([out, aux], [d_out, None])
            queue.run(i)
        outs.append(out.detach())
        inputs.append(x.grad)
    counts = layer.router.num_tokens_per_expert.clone()
    layer.update_balance()
    return {
        "out": outs,
        "d_x": inputs,
        "grads": global_tensors(layer, gradients=True),
        "counts": counts,
        "bias": layer.router.expert_bias.clone(),
    }


def _rank(rank: int, scenarios: dict[str, Scenario]) -> dict[str, Any]:
    world, log = dist.get_world_size(), CollectiveLog()
    ep = Communicator("ep", range(world), rank, dist.group.WORLD, log)
    counts = Communicator("ep_counts", range(world), rank, dist.new_group(list(range(world))), log)
    results: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        share = 4 // world
        mine = quarters(scenario)[rank * share : (rank + 1) * share]
        results[name] = run_layer(make_layer(scenario, ep, counts), scenario, mine)
        if name in BITS:
            # The same tokens in one forward: the split of the batch must change no bit.
            layer = make_layer(scenario, ep, counts)
            results[name]["whole"] = layer(torch.cat([x for x, _ in mine])).detach()
        results[name]["log"] = [(r.op, r.communicator, r.label) for r in log.records]
        log.records.clear()
    return results


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return {name: run_layer(make_layer(s), s, quarters(s)) for name, s in (FP64 | BITS).items()}


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"ep{world}")
def by_rank(request: pytest.FixtureRequest, alone: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of each rank. After `alone`, so that what recompute imports is loaded before the ranks are forked."""
    return run_ranks(request.param, _rank, FP64 | BITS)


def joined(ranks: list[dict[str, Any]], what: str) -> list[Tensor]:
    return [part for rank in ranks for part in rank[what]]


def summed_gradients(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Experts sit on one rank each: their gradient as it is. Of the rest: the sum over ranks."""
    total: dict[str, Tensor] = {}
    for rank in ranks:
        for name, grad in rank["grads"].items():
            assert name not in total or not name.startswith("experts."), f"{name} is on two ranks"
            total[name] = total[name] + grad if name in total else grad
    return total


@pytest.mark.parametrize("name", FP64)
def test_equals_one_process_in_fp64(name: str, by_rank: list[dict[str, Any]], alone: dict[str, dict[str, Any]]) -> None:
    ranks, expected = [result[name] for result in by_rank], alone[name]
    for what in ("out", "d_x"):
        torch.testing.assert_close(joined(ranks, what), expected[what], rtol=1e-12, atol=1e-12)
    grads = summed_gradients(ranks)
    assert sorted(grads) == sorted(expected["grads"])
    for key, grad in grads.items():
        torch.testing.assert_close(grad, expected["grads"][key], rtol=1e-12, atol=1e-12, msg=key)
    assert torch.equal(sum(rank["counts"] for rank in ranks), expected["counts"])
    assert expected["counts"].sum() == sum(FP64[name].tokens) * make_config(**FP64[name].changes).top_k
    for rank in ranks:
        assert torch.equal(rank["bias"], expected["bias"])


@pytest.mark.parametrize("name", FP64)
def test_every_rank_enqueues_the_same_collectives(name: str, by_rank: list[dict[str, Any]]) -> None:
    logs = [result[name]["log"] for result in by_rank]
    assert len(logs[0]) > 0 and all(log == logs[0] for log in logs)


def test_idle_experts_have_zero_gradients_and_the_busy_one_has_not(by_rank: list[dict[str, Any]]) -> None:
    grads = summed_gradients([result["everything to one expert"] for result in by_rank])
    for name, grad in grads.items():
        if name.startswith("experts."):
            assert bool(grad.any()) == name.startswith("experts.6."), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_combine_has_the_bits_of_one_process(
    dtype: str, by_rank: list[dict[str, Any]], alone: dict[str, dict[str, Any]]
) -> None:
    name = f"exact {dtype}"
    out = joined([result[name] for result in by_rank], "out")
    for mine, exact, dedup in zip(out, alone[name]["out"], alone[f"dedup {dtype}"]["out"], strict=True):
        assert torch.equal(mine, exact)
        assert torch.equal(exact, dedup)  # with one rank the two modes are one


def test_dedup_combine_is_close_to_one_process_in_fp32(
    by_rank: list[dict[str, Any]], alone: dict[str, dict[str, Any]]
) -> None:
    out = torch.cat(joined([result["dedup float32"] for result in by_rank], "out")).double()
    expected = torch.cat(alone["dedup float32"]["out"]).double()
    assert 1 - 2 * (out * expected).sum() / (out.square().sum() + expected.square().sum()) < 1e-12


@pytest.mark.parametrize("name", BITS)
def test_a_token_has_the_same_bits_under_any_split_of_the_batch(name: str, by_rank: list[dict[str, Any]]) -> None:
    for result in by_rank:
        assert torch.equal(torch.cat(result[name]["out"]), result[name]["whole"])


def _given_group(rank: int) -> tuple[Tensor, Tensor]:
    layer = MoELayer(make_config(), ep_group=dist.group.WORLD, dtype=torch.float64)
    x, d_out = quarters(Scenario())[rank]
    out = layer(x)
    out.backward(d_out)
    return out.detach(), layer.router.weight.grad


def test_a_torch_process_group_is_enough() -> None:
    results = run_ranks(2, _given_group)
    alone = MoELayer(make_config(), dtype=torch.float64)
    for rank, (out, _) in enumerate(results):
        x, d_out = quarters(Scenario())[rank]
        expected = alone(x)
        expected.backward(d_out)
        torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    router_grad = results[0][1] + results[1][1]
    torch.testing.assert_close(router_grad, alone.router.weight.grad, rtol=1e-12, atol=1e-12)
