"""The pieces of experts that move, applied to all ranks' shards at once."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moe_engine.config.load import load
from moe_engine.config.validate import resolve
from moe_engine.model.names import moe_layer_names
from moe_engine.moe.placement import ExpertPlacement
from moe_engine.optim.relocate import Move, Stacked
from moe_engine.trainer import Trainer

EXPERTS, PLACES = 12, 4


def placement(seed: int) -> ExpertPlacement:
    ranks = [i % PLACES for i in range(EXPERTS)]
    random.Random(seed).shuffle(ranks)
    return ExpertPlacement(EXPERTS, PLACES, tuple(ranks))


def filled(stacked: Stacked, placement: ExpertPlacement) -> dict[int, Tensor]:
    """Every rank's shard: element i of expert e holds e + i/1000; -1 where no expert lies."""
    shards = {}
    for place, owners in enumerate(stacked.owners):
        flat = torch.full((len(owners) * stacked.shard_size,), -1.0, dtype=torch.float64)
        for i, expert in enumerate(placement.experts_of(place)):
            start = stacked.offset + i * stacked.numel
            flat[start : start + stacked.numel] = expert + torch.arange(stacked.numel) / 1000
        shards |= dict(zip(owners, flat.split(stacked.shard_size), strict=True))
    return shards


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(("numel", "offset"), [(64, 0), (10, 0), (10, 128), (200, 64)])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_element_arrives_once_and_nothing_else_changes(replicas: int, numel: int, offset: int, seed: int) -> None:
    owners = [[place + PLACES * replica for replica in range(replicas)] for place in range(PLACES)]
    used = offset + numel * EXPERTS // PLACES
    shard_size = -(-used // replicas)
    stacked = Stacked(offset, numel, shard_size, owners)
    old, new = placement(seed), placement(seed + 10)
    move = Move(old, new)
    before, after = filled(stacked, old), {rank: shard.clone() for rank, shard in filled(stacked, old).items()}
    written: set[tuple[int, int]] = set()
    for piece in stacked.pieces(move):
        target = after[piece.target][piece.place : piece.place + piece.numel]
        target.copy_(before[piece.source][piece.start : piece.start + piece.numel])
        assert len(target) == piece.numel, "inside the shard"
        places = {(piece.target, piece.place + i) for i in range(piece.numel)}
        assert not places & written
        written |= places
    expected = filled(stacked, new)
    assert all(torch.equal(after[rank], expected[rank]) for rank in expected)
    assert move.num_moved == sum(a != b for a, b in zip(old.rank_list(), new.rank_list(), strict=True)) > 0


def test_an_expert_that_keeps_its_place_does_not_travel() -> None:
    stacked = Stacked(0, 8, 24, [[place] for place in range(PLACES)])
    assert list(stacked.pieces(Move(placement(3), placement(3)))) == []
    old = ExpertPlacement(4, 2)
    new = ExpertPlacement(4, 2, (0, 1, 0, 1))  # experts 1 and 2 change places, and both keep their index
    pieces = list(Stacked(0, 8, 16, [[0], [1]]).pieces(Move(old, new)))
    assert [(p.source, p.start, p.target, p.place) for p in pieces] == [(0, 8, 1, 0), (1, 0, 0, 8)]


def test_the_names_of_moe_layers_are_those_of_the_modules() -> None:
    config = resolve(
        load("train", ["model=tiny", "model.num_layers=3", "model.num_dense_layers=1", "model.mtp_depth=2"])
    )
    trainer = Trainer(config, 0, torch.device("cpu"))
    assert moe_layer_names(config.model) == list(trainer.moe_layers()) and len(trainer.moe_layers()) == 4
