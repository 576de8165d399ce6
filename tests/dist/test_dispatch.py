"""Rows over real ranks: who receives what, in which order, and what comes back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from moe_engine import MoEConfig, MoELayer
from moe_engine.distributed.collectives import CollectiveLog, Communicator
from moe_engine.moe import dispatch as wire
from moe_engine.moe.dispatch import (
    Links,
    combine_start,
    combine_wait,
    dispatch_start,
    dispatch_wait,
    exchange,
    pack_rows,
    plan,
)
from moe_engine.moe.placement import ExpertPlacement

E, K, D = 8, 3, 2
TOKENS = (5, 0, 7, 1)  # of each rank


def choices(rank: int) -> Tensor:
    scores = torch.rand(TOKENS[rank], E, generator=torch.Generator().manual_seed(rank))
    return scores.topk(K, dim=1).indices.sort(dim=1).values


def token_values(rank: int) -> Tensor:
    """A token is recognised by 100*rank + t."""
    return (100.0 * rank + torch.arange(TOKENS[rank], dtype=torch.float64))[:, None].expand(-1, D)


def weight_values(rank: int) -> Tensor:
    return token_values(rank)[:, :1] + choices(rank) / 16.0


def _exchange(rank: int, exact: bool) -> dict[str, object]:
    world, log = dist.get_world_size(), CollectiveLog()
    ep = Communicator("ep", range(world), rank, dist.group.WORLD, log)
    counts = Communicator("ep_counts", range(world), rank, dist.new_group(list(range(world))), log)
    placement, ids = ExpertPlacement(E, world), choices(rank)
    x = token_values(rank).clone().requires_grad_()
    weights = weight_values(rank).clone().requires_grad_()
    handle = plan(ids, placement, Links(ep, counts, exact), "layer 0")
    arrived = dispatch_wait(dispatch_start(pack_rows(x, ids, weights, placement, handle), handle))
    out = combine_wait(combine_start(arrived.x * 2, handle))
    # d rows.x = 2 from combine + 1; d weights = the row's slot number + 1
    slot = torch.arange(1.0, arrived.weights.shape[1] + 1, dtype=torch.float64)
    (out.sum() + arrived.x.sum() + (arrived.weights * slot).sum()).backward()
    return {
        "x": arrived.x.detach(),
        "ids": arrived.local_ids,
        "weights": arrived.weights.detach(),
        "out": out.detach(),
        "d_x": x.grad,
        "d_weights": weights.grad,
        "log": [(r.op, r.communicator, r.label) for r in log.records],
    }


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_rows_arrive_in_order_of_source_and_token_and_return_to_their_tokens(world: int, exact: bool) -> None:
    results = run_ranks(world, _exchange, exact)
    local = E // world
    for rank, result in enumerate(results):
        expected_rows = []  # (token value, [(local id, weight)])
        for source in range(world):
            for t, ids in enumerate(choices(source).tolist()):
                value = 100.0 * source + t
                here = [(e % local, value + e / 16.0) for e in ids if e // local == rank]
                expected_rows += [(value, [pair]) for pair in here] if exact else [(value, here)] if here else []
        assert result["x"].tolist() == [[value] * D for value, _ in expected_rows]
        for (_, pairs), ids, weights in zip(
            expected_rows, result["ids"].tolist(), result["weights"].tolist(), strict=True
        ):
            unused = len(ids) - len(pairs)
            assert ids == [e for e, _ in pairs] + [-1] * unused
            assert weights == [w for _, w in pairs] + [0.0] * unused

        ids = choices(rank)
        rows_of_token = torch.tensor([K if exact else len({e // local for e in row}) for row in ids.tolist()])
        per_token = rows_of_token[:, None].double().expand(-1, D).reshape(-1, D)
        assert torch.equal(result["out"], token_values(rank) * 2 * per_token)
        assert torch.equal(result["d_x"], 3 * per_token)
        expected_d = [
            [1.0 if exact else 1.0 + sum(f // local == e // local for f in row[:c]) for c, e in enumerate(row)]
            for row in ids.tolist()
        ]
        assert result["d_weights"].tolist() == expected_d


def test_all_ranks_enqueue_the_same_collectives_in_the_same_order() -> None:
    logs = [result["log"] for result in run_ranks(4, _exchange, False)]
    assert all(log == logs[0] for log in logs)
    assert [(communicator, label) for _, communicator, label in logs[0]] == [
        ("ep_counts", "layer 0 counts"),
        ("ep", "layer 0 dispatch slots"),
        ("ep", "layer 0 dispatch x"),
        ("ep", "layer 0 combine"),
        ("ep", "layer 0 combine backward"),
        ("ep", "layer 0 dispatch x backward"),
        ("ep", "layer 0 dispatch slots backward"),
    ]


def _bytes(rank: int) -> int:
    world, log = dist.get_world_size(), CollectiveLog()
    ep = Communicator("ep", range(world), rank, dist.group.WORLD, log)
    counts = Communicator("ep_counts", range(world), rank, dist.new_group(list(range(world))), log)
    ids = torch.tensor([[0, 1, 4], [0, 1, 2]])
    placement = ExpertPlacement(E, world)
    handle = plan(ids, placement, Links(ep, counts))
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    dispatch_wait(dispatch_start(pack_rows(x, ids, torch.ones(2, 3), placement, handle), handle))
    return next(record.bytes for record in log.records if record.label.endswith("dispatch x"))


def test_a_token_crosses_the_wire_once_per_destination_rank() -> None:
    assert run_ranks(2, _bytes) == [3 * 64 * 2] * 2


def _events(rank: int) -> list[str]:
    log, waited, events = CollectiveLog(), exchange.dispatch_wait, []
    layer = MoELayer(
        MoEConfig(8, 16, 4, 2, num_shared_experts=1), ep=Communicator("ep", range(2), rank, dist.group.WORLD, log)
    )

    def waits(pending: exchange.PendingDispatch) -> exchange.Rows:
        events.append("waits for rows")
        return waited(pending)

    wire.dispatch_wait = waits  # in a process of its own
    for name, module in (("shared", layer.shared), ("routed", layer.experts)):
        assert module is not None
        module.register_forward_pre_hook(lambda *_, name=name: events.append(f"{name} {log.records[-1].label}"))
    layer(torch.randn(3, 8))
    return events


def test_the_shared_expert_computes_while_rows_travel() -> None:
    sent = " dispatch x"
    assert run_ranks(2, _events) == [[f"shared {sent}", "waits for rows", f"routed {sent}"]] * 2
