"""Experts move between ranks during training, so that the ranks' loads even out.

Every `moe.placement.every` steps the loads counted since the last time stand for those to come. Where another
placement makes a layer's busiest rank less busy (`planner.eplb.rearrange`), the layer's experts move: weights,
masters and moments, the same move on every replica and every holder of the stage. The balancing bias, the counts and
the router's rows go by global ids, which stay. So the mathematics stays too: with `moe.combine=exact` to the last bit,
otherwise up to the order in which the ranks' parts of a token's output are summed. Where nodes are told
(`parallel.ranks_per_node`) and routing is limited to some groups of experts, a group stays together on one node.

Every rank knows the placement and the loads of all layers and comes to the same decision by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.config.schema import ModelConfig, PlacementSection
from moe_engine.distributed.groups import Groups
from moe_engine.model.names import moe_layer_names, named_parameters
from moe_engine.model.transformer import Stage
from moe_engine.moe.placement import ExpertPlacement
from moe_engine.optim.relocate import Move
from moe_engine.optim.zero import ZeroOptimizer
from moe_engine.planner.eplb import max_over_mean, rearrange


@dataclass(frozen=True)
class Rearranged:
    """What one re-placement did.

    before, after: the busiest rank's predicted load over the mean, in the layer where it is largest; moved: experts
    that changed their rank, over all layers; seconds: what it took on this rank.
    """

    before: float
    after: float
    moved: int
    seconds: float


class Rebalancer:
    """Where the experts of every MoE layer are, what they had to do, and how they move."""

    def __init__(
        self,
        section: PlacementSection,
        model: ModelConfig,
        groups: Groups,
        stages: Iterable[Stage],
        optimizer: ZeroOptimizer,
    ) -> None:
        self.section, self.model, self.groups = section, model, groups
        self.stages, self.optimizer = list(stages), optimizer
        self.layers = moe_layer_names(model)
        ep, ranks_per_node = groups.layout.ep, groups.layout.ranks_per_node or groups.layout.ep
        self.nodes = max(ep // ranks_per_node, 1)  # of the expert-parallel group
        self.expert_groups = model.num_groups if model.top_groups < model.num_groups else 1
        self.placements = {name: ExpertPlacement(model.num_experts, groups.layout.ep) for name in self.layers}
        self.loads = torch.zeros(len(self.layers), model.num_experts, dtype=torch.int64)

    def observe(self, counts: Tensor) -> None:
        """Add a step's tokens by layer and expert, [L, E], over the whole global batch."""
        self.loads += counts

    def rearrange(self) -> Rearranged:
        """Even out the ranks' loads as counted so far, and begin to count anew. All ranks call this together."""
        start = time.perf_counter()
        rows: list[list[int]] = self.loads.tolist()
        before = self._worst(rows)
        moves = {name: move for name, row in zip(self.layers, rows, strict=True) if (move := self._move(name, row))}
        self.move(moves)
        after = self._worst(rows)
        self.loads.zero_()
        moved = sum(move.num_moved for move in moves.values())
        return Rearranged(before, after, moved, time.perf_counter() - start)

    def move(self, moves: Mapping[str, Move]) -> None:
        """Move the experts of these layers (by name), with all their states."""
        parameters: dict[int, Move] = {}
        for name, move in moves.items():
            self.placements[name] = move.new
        for stage in self.stages:
            for name, layer in stage.moe_layers().items():
                if name in moves:
                    layer.place(moves[name].new)
                    parameters |= {id(parameter): moves[name] for parameter in layer.experts.parameters()}
        if moves:
            self.optimizer.move_experts(named_parameters(self.stages, self.groups.placement), parameters)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what `restore` takes. Equal on all ranks."""
        ranks = {name: placement.rank_list() for name, placement in self.placements.items()}
        loads = dict(zip(self.layers, self.loads.tolist(), strict=True))
        return {"ep": self.groups.layout.ep, "ranks": ranks, "loads": loads}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: its loads; and with as many ranks its placement, on which bits depend."""
        self.loads = torch.tensor([state["loads"][name] for name in self.layers], dtype=torch.int64)
        self.loads = self.loads.view(len(self.layers), self.model.num_experts)
        if state["ep"] == self.groups.layout.ep:
            moves = {}
            for name, ranks in state["ranks"].items():
                new = ExpertPlacement(self.model.num_experts, self.groups.layout.ep, tuple(ranks))
                if new != self.placements[name]:
                    moves[name] = Move(self.placements[name], new)
            self.move(moves)

    def _move(self, name: str, loads: Sequence[int]) -> Move | None:
        """The move that evens out a layer, None where it would gain too little."""
        old = self.placements[name]
        ranks = rearrange(loads, old.rank_list(), old.ep_size, self.expert_groups, self.nodes)
        new = ExpertPlacement(old.num_experts, old.ep_size, tuple(ranks))
        gain = 1 - max(new.loads(loads)) / max(*old.loads(loads), 1)
        return Move(old, new) if new != old and gain >= self.section.least_gain else None

    def _worst(self, loads: Sequence[Sequence[int]]) -> float:
        ratios = [max_over_mean(self.placements[name].loads(row)) for name, row in zip(self.layers, loads, strict=True)]
        return max(ratios, default=1.0)
