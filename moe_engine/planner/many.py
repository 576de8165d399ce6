"""The times of many steps at once: what the fit asks for thousands of times, as arrays.

The same arithmetic as `timing.quick_seconds` (`test_many_steps_at_once_are_those_one_by_one`), over all distinct stages
of all steps together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, fields

import numpy as np
import numpy.typing as npt

from moe_engine.planner.hardware import Efficiency
from moe_engine.planner.timing import HIDING, StepWork, has_pairs, rank_share
from moe_engine.planner.work import BF16_PRODUCTS, LAUNCH_POWER

NAMES = tuple(field.name for field in fields(Efficiency))
ATTENTION, MEMORY, LINKS, LAUNCHES = (NAMES.index(name) for name in ("attention", "memory", "links", "block_us"))
Array = npt.NDArray[np.float64]


class Steps:
    """Steps of given work. steadiness: of each, see `timing.steadiness`."""

    def __init__(self, works: Sequence[StepWork], steadiness: Sequence[float]) -> None:
        passes: list[list[tuple[float, ...]]] = []  # of each distinct stage: forward, dgrad, wgrad
        step_of_stage: list[int] = []
        loads: list[tuple[int, int, int]] = []  # (rank, stage, how many times it holds such a stage)
        step_of_rank: list[int] = []
        first: list[tuple[int, int, int]] = []  # the same of every step's first rank, by step
        for step, work in enumerate(works):
            known: dict[int, int] = {}
            for stage in work.stages:
                if id(stage) not in known:
                    known[id(stage)] = len(passes)
                    total = stage.total
                    passes.append([astuple(each) for each in (total.forward, total.dgrad, total.wgrad)])
                    step_of_stage.append(step)
            held = [Counter(known[id(work.stages[s])] for s in rank) for rank in work.cut.placement.stages_of_rank]
            first += [(step, stage, count) for stage, count in held[0].items()]
            for kind in {frozenset(each.items()) for each in held}:
                loads += [(len(step_of_rank), stage, count) for stage, count in kind]
                step_of_rank.append(step)
        self.passes = np.array(passes)  # [stages, 3, parts of Work]
        self.step_of_stage, self.step_of_rank = np.array(step_of_stage), np.array(step_of_rank)
        self.loads, self.first = np.array(loads), np.array(first)
        strategies = [work.cut.strategy for work in works]
        overlaps = [strategy.overlap for strategy in strategies]
        self.hides = {name: np.array([getattr(each, name) for each in overlaps]) for name in ("tp", "cp", "ep", "dp")}
        once = [(work.reduce, work.gather, work.optimizer) for work in works]
        self.reduce, self.gather, self.optimizer = np.array(once).T
        shares = [
            s.layout.pp / sum(map(len, w.cut.placement.stages_of_rank)) for w, s in zip(works, strategies, strict=True)
        ]
        self.of_stage = np.array([s.zero >= 3 for s in strategies]) * np.array(shares)  # of ZeRO-3's exchange
        self.paired = np.array([has_pairs(s.schedule, s.layout.pp) for s in strategies])
        stretch = [rank_share(w) * s.micro_batches * x for w, s, x in zip(works, strategies, steadiness, strict=True)]
        self.stretch = np.array(stretch)

    def seconds(self, efficiencies: Array) -> Array:
        """The time of each step with its efficiencies [steps, 6], or those of all [6], in the order of `NAMES`."""
        efficiencies = np.broadcast_to(efficiencies, (len(self.stretch), len(NAMES)))
        of = self.step_of_stage
        own, links = efficiencies[of], efficiencies[:, LINKS]
        alone = _computing(self.passes, own[:, None, :]) + self._exposed(own[:, None, :])
        forward, backward = alone[:, 0], alone[:, 1] + alone[:, 2]
        both = self.passes.sum(axis=1)
        computing = _computing(both, own) + both[:, 4] / own[:, LINKS]
        pair = computing + _beside((both[:, 5] + both[:, 6]) / own[:, LINKS], computing)
        pair = np.minimum(pair, forward + backward)
        gather, reduce = (self.of_stage * each / links for each in (self.gather, self.reduce))
        hide = self.hides["dp"]
        forward = forward + _beside(gather[of] / 2, hide[of] * forward)
        backward = backward + _beside(gather[of] / 2 + reduce[of], hide[of] * backward)
        busy = np.where(self.paired[of], pair, forward + backward)
        ranks = np.bincount(self.loads[:, 0], busy[self.loads[:, 1]] * self.loads[:, 2])
        longest = np.zeros(len(self.stretch))
        np.maximum.at(longest, self.step_of_rank, ranks)
        step, stage, count = self.first.T
        exposed = (
            _beside((self.of_stage == 0) * volume / links, hide * np.bincount(step, cost[stage] * count))
            for volume, cost in ((self.reduce, backward), (self.gather, forward))
        )
        return np.asarray(longest * self.stretch + sum(exposed) + self.optimizer / efficiencies[:, MEMORY])

    def _exposed(self, efficiencies: Array) -> Array:
        """`timing._exposed` of every pass of every stage."""
        tp, cp, ep = (self.hides[name][self.step_of_stage][:, None] for name in ("tp", "cp", "ep"))
        passes, links = self.passes, efficiencies[..., LINKS]
        core = _beside(passes[..., 5] / links, cp * passes[..., 2] / efficiencies[..., ATTENTION])
        return np.asarray((passes[..., 4] * (1 - tp) + passes[..., 6] * (1 - ep)) / links + core)


def _computing(work: Array, efficiencies: Array) -> Array:
    """`Work.compute_seconds` of [..., parts of Work] with [..., 6]."""
    units = (work[..., :4] / efficiencies[..., :4]).sum(axis=-1) + work[..., 7] / BF16_PRODUCTS
    launches = work[..., 8] * (efficiencies[..., LAUNCHES] * 1e-6)
    return np.asarray((units**LAUNCH_POWER + launches**LAUNCH_POWER) ** (1 / LAUNCH_POWER))


def _beside(communication: Array, computation: Array) -> Array:
    """`timing.beside`."""
    added = (communication**HIDING + computation**HIDING) ** (1 / HIDING) - computation
    return np.where(communication > 0, added, 0.0)
