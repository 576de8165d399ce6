"""Which expert sits on which rank, and what a layer computes with its experts moved."""

from __future__ import annotations

import pytest
import torch

from moe_engine.moe.placement import ExpertPlacement

MOVED = (1, 0, 0, 1, 2, 2, 0, 1, 2)  # 9 experts over 3 ranks


def test_a_moved_placement_knows_every_expert() -> None:
    placement = ExpertPlacement(9, 3, MOVED)
    ids = torch.arange(9)
    assert not placement.contiguous
    assert placement.rank_of(ids).tolist() == list(MOVED)
    assert [placement.experts_of(rank) for rank in range(3)] == [[1, 2, 6], [0, 3, 7], [4, 5, 8]]
    assert placement.local_id(ids).tolist() == [0, 0, 1, 1, 0, 1, 2, 2, 2]
    assert placement.rank_of(torch.tensor([[-1, 4]])).tolist() == [[-1, 2]]
    assert placement.loads(range(9)) == [1 + 2 + 6, 0 + 3 + 7, 4 + 5 + 8]


def test_contiguous_blocks_are_recognised() -> None:
    placement = ExpertPlacement(6, 3, (0, 0, 1, 1, 2, 2))
    assert placement.contiguous and placement == ExpertPlacement(6, 3)
    assert placement.rank_list() == [0, 0, 1, 1, 2, 2]
    assert placement.loads([1, 2, 3, 4, 5, 6]) == [3, 7, 11]


def test_ranks_with_unequal_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="2 experts are needed on each of 2 ranks"):
        ExpertPlacement(4, 2, (0, 0, 0, 1))
    with pytest.raises(ValueError, match="needed on each"):
        ExpertPlacement(4, 2, (0, 0, 2, 2))


def test_choices_are_put_in_the_order_of_ranks_with_their_weights() -> None:
    placement = ExpertPlacement(9, 3, MOVED)
    ids = torch.tensor([[0, 1, 4, 6], [3, 4, 5, 8]])
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]], requires_grad=True)
    ordered, moved = placement.by_rank(ids, weights)
    assert ordered.tolist() == [[1, 6, 0, 4], [3, 4, 5, 8]]
    assert torch.equal(moved, torch.tensor([[0.2, 0.4, 0.1, 0.3], [0.5, 0.6, 0.7, 0.8]]))
    (moved * torch.arange(8.0).view(2, 4)).sum().backward()
    assert weights.grad is not None and weights.grad.tolist() == [[2, 0, 3, 1], [4, 5, 6, 7]]
    empty = placement.by_rank(ids[:0], weights[:0])
    assert [each.shape for each in empty] == [(0, 4), (0, 4)]
