"""Which expert sits on which rank, in contiguous blocks and moved."""

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
