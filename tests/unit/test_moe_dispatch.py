"""The layout of rows over ranks, computed without any rank but this one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.distributed.collectives import Pending
from moe_engine.moe.dispatch import (
    DispatchHandle,
    Links,
    combine_start,
    combine_wait,
    dispatch_start,
    dispatch_wait,
    pack_rows,
    plan,
)
from moe_engine.moe.dispatch.rows import plan_rows
from moe_engine.moe.placement import ExpertPlacement


class Alone:
    """Stands in for one rank's communicator of `size` ranks: what it sends comes straight back."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0

    def all_to_all(self, x: Tensor, send_splits: list[int], recv_splits: list[int], label: str = "") -> Pending:
        assert sum(send_splits) == len(x) and len(send_splits) == len(recv_splits) == self.size
        return Pending(x.detach().clone())


def layout(
    expert_ids: Tensor, num_experts: int, ranks: int, exact: bool = False, placement: ExpertPlacement | None = None
) -> tuple[DispatchHandle, ExpertPlacement]:
    placement, alone = placement or ExpertPlacement(num_experts, ranks), Alone(ranks)
    communicator: Any = alone
    handle = plan(expert_ids, placement, Links(communicator, communicator, exact))
    assert handle is not None
    return handle, placement


def random_choice(T: int, E: int, K: int, seed: int = 0) -> Tensor:
    scores = torch.rand(T, E, generator=torch.Generator().manual_seed(seed))
    return scores.topk(K, dim=1).indices.sort(dim=1).values


IDS = torch.tensor([[0, 1, 5], [2, 3, 4], [3, 6, 7]])  # 8 experts over 4 ranks: pairs {0,1} {2,3} {4,5} {6,7}


def test_dedup_sends_one_row_per_token_and_destination_rank() -> None:
    handle, placement = layout(IDS, 8, 4)
    assert handle.sent.splits == [1, 2, 2, 1]
    assert handle.tokens.source.tolist() == [0, 1, 2, 0, 1, 2]
    assert handle.tokens.places.tolist() == [[0, 3, -1], [1, 4, -1], [2, 5, -1]]
    assert handle.sent.choice_of_slot.tolist() == [[0, 1], [3, 4], [6, -1], [2, -1], [5, -1], [7, 8]]
    assert handle.sent.slot_of_choice.tolist() == [[0, 1, 6], [2, 3, 8], [4, 10, 11]]
    weights = torch.arange(1.0, 10.0).view(3, 3)
    rows = pack_rows(torch.tensor([[10.0], [20.0], [30.0]]), IDS, weights, placement, handle)
    assert rows.x.flatten().tolist() == [10, 20, 30, 10, 20, 30]
    assert rows.local_ids.tolist() == [[0, 1], [0, 1], [1, -1], [1, -1], [0, -1], [0, 1]]
    assert rows.local_ids.dtype == torch.int32
    assert rows.weights.tolist() == [[1, 2], [4, 5], [7, 0], [3, 0], [6, 0], [8, 9]]


def test_exact_sends_one_row_per_token_and_expert() -> None:
    handle, placement = layout(IDS, 8, 4, exact=True)
    assert handle.sent.splits == [2, 3, 2, 2]
    assert handle.tokens.source.tolist() == [0, 0, 1, 1, 2, 0, 1, 2, 2]
    assert handle.tokens.places.tolist() == [[0, 1, 5], [2, 3, 6], [4, 7, 8]]
    rows = pack_rows(torch.zeros(3, 1), IDS, torch.arange(9.0).view(3, 3), placement, handle)
    assert rows.local_ids.flatten().tolist() == [0, 1, 0, 1, 1, 1, 0, 0, 1]
    assert rows.weights.flatten().tolist() == [0, 1, 3, 4, 6, 2, 5, 7, 8]


def test_one_rank_copies_nothing() -> None:
    placement = ExpertPlacement(8)
    communicator: Any = Alone(1)
    assert plan(IDS, placement, Links(communicator, communicator)) is None
    x, weights = torch.zeros(3, 4), torch.ones(3, 3)
    rows = dispatch_wait(dispatch_start(pack_rows(x, IDS, weights, placement, None), None))
    assert rows.x is x and rows.weights is weights
    assert combine_wait(combine_start(x, None)) is x


@pytest.mark.parametrize(("ranks", "expected"), [(8, 5.2947), (16, 6.5233), (32, 7.2668), (64, 7.6758)])
def test_rows_per_token_of_random_top_8_of_256(ranks: int, expected: float) -> None:
    T = 20_000
    handle, _ = layout(random_choice(T, 256, 8), 256, ranks)
    rows_per_token = (handle.tokens.places >= 0).sum(dim=1).double()
    error = rows_per_token.std().item() / T**0.5
    assert sum(handle.sent.splits) == rows_per_token.sum()
    assert rows_per_token.mean().item() == pytest.approx(expected, abs=4 * error)
    assert 4 * error < 0.03


def test_with_the_group_limit_a_token_goes_to_at_most_four_nodes() -> None:
    """DeepSeek-V3's routing over 8 nodes: 256 experts in 8 groups, a node each, of which a token uses 4."""
    chance = torch.Generator().manual_seed(0)
    scores = torch.rand(2000, 8, 32, generator=chance)
    kept = torch.rand(2000, 8, generator=chance).topk(4, dim=1).indices
    refused = torch.ones(2000, 8, dtype=torch.bool).scatter(1, kept, False)
    limited = scores.masked_fill(refused[..., None], -1)
    rows = []
    for each in (scores, limited):
        nodes = each.flatten(1).topk(8, dim=1).indices.sort(dim=1).values // 32
        rows.append((plan_rows(nodes, 8, 8).tokens.places >= 0).sum(dim=1))
    assert rows[0].double().mean().item() == pytest.approx(5.2947, abs=0.1)
    assert int(rows[0].max()) > 4 and int(rows[1].max()) == 4


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(0, 8, 3, 4), (1, 8, 8, 2), (50, 16, 5, 4), (50, 16, 16, 16), (7, 4, 1, 2)])
def test_the_index_maps_are_each_others_inverses(shape: tuple[int, int, int, int], exact: bool, moved: bool) -> None:
    T, E, K, ranks = shape
    ids = random_choice(T, E, K)
    placement = ExpertPlacement(E, ranks, tuple(i % ranks for i in range(E)) if moved else None)
    handle, _ = layout(ids, E, ranks, exact, placement)
    places, source = handle.tokens.places, handle.tokens.source
    assert sum(handle.sent.splits) == len(source) == (places >= 0).sum()
    for t in range(T):
        mine = [p for p in places[t].tolist() if p >= 0]
        assert all(source[p] == t for p in mine)
        assert mine == sorted(mine) or (exact and moved)  # in the order of experts, which is not that of ranks then
        assert len(mine) == (K if exact else len(set(placement.rank_of(ids[t]).tolist())))
    choices = torch.arange(T * K).view(T, K)
    assert torch.equal(handle.sent.choice_of_slot.flatten()[handle.sent.slot_of_choice], choices)
    assert (handle.sent.choice_of_slot >= 0).sum() == T * K
    destination = torch.repeat_interleave(torch.arange(ranks), torch.tensor(handle.sent.splits))
    rows = pack_rows(torch.zeros(T, 2), ids, torch.ones(T, K), placement, handle)
    for row, rank in enumerate(destination.tolist()):
        held = placement.experts_of(rank)
        mine = [e for e in ids[source[row]].tolist() if e in held]
        here = [held[e] for e in rows.local_ids[row].tolist() if e >= 0]
        assert here == mine or (exact and len(here) == 1 and here[0] in mine)


def test_backward_returns_rows_and_weights_by_the_same_handle() -> None:
    ids = random_choice(9, 8, 3)
    handle, placement = layout(ids, 8, 4)
    x = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(9, 3, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: Tensor, weights: Tensor) -> Tensor:
        rows = dispatch_wait(dispatch_start(pack_rows(x, ids, weights, placement, handle), handle))
        out = rows.x * (rows.weights.square().sum(dim=1, keepdim=True) + rows.weights[:, :1])
        return combine_wait(combine_start(out, handle))

    assert torch.autograd.gradcheck(there_and_back, (x, weights))


@pytest.mark.parametrize("exact", [False, True])
def test_masked_choices_go_nowhere(exact: bool) -> None:
    """A choice of -1, also between others of its rank, has no row of its own, no slot and no gradient."""
    ids = torch.tensor([[0, -1, 1], [-1, -1, -1], [-1, 2, 7], [3, 6, -1]])
    handle, placement = layout(ids, 8, 4, exact)
    assert handle.sent.splits == ([2, 2, 0, 2] if exact else [1, 2, 0, 2])
    assert handle.sent.slot_of_choice[ids < 0].tolist() == [-1] * 6
    weights = torch.arange(1.0, 13.0).view(4, 3).requires_grad_()
    x = torch.randn(4, 5, requires_grad=True)
    rows = pack_rows(x, ids, weights, placement, handle)
    if not exact:
        assert rows.local_ids.tolist() == [[0, 1], [0, -1], [1, -1], [1, -1], [0, -1]]
        assert rows.weights.tolist() == [[1, 3], [8, 0], [10, 0], [9, 0], [11, 0]]
    (rows.x.sum() + rows.weights.sum()).backward()
    assert weights.grad is not None and weights.grad.tolist() == (ids >= 0).float().tolist()
    assert x.grad is not None and x.grad[1].tolist() == [0.0] * 5
    local = pack_rows(x, ids, weights, ExpertPlacement(8), None)
    assert local.local_ids.tolist() == ids.tolist()
