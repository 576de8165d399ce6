"""A dry run: one training step of one rank of a job, by the engine's own code, with nobody else there and no data.

What is real: layout, communicators, stages, optimizer with its buckets, schedule and executor, autograd, recompute, and
so every tensor's size and life and every collective. What is not is listed in `FAKED`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_engine.config.schema import Config
from moe_engine.distributed.collectives import CollectiveLog, CollectiveRecord
from moe_engine.distributed.groups import Groups
from moe_engine.distributed.silent import silent_groups
from moe_engine.dryrun.routing import choice_over_ranks, even_choice
from moe_engine.dryrun.tensors import META, FusedAttention, LiveBytes, TensorsWithoutData
from moe_engine.layout import Layout, Placement, StageSpec
from moe_engine.model.batch import Batch
from moe_engine.model.names import NamedParameter, named_parameters
from moe_engine.model.transformer import Stage
from moe_engine.planner.architecture import architecture
from moe_engine.planner.routing import row_counts
from moe_engine.trainer import Trainer, placement_of

FAKED = (
    "numbers: floating-point tensors have sizes and no values; what they would decide is 0",
    "the other ranks: they say what this one says, and nothing is sent",
    "the router's choice: experts are chosen as the stated assumption wants",
    "kernels: their fake implementations give the sizes of their results; attention is the fused kernel of a GPU",
    "text: whole rows of one document each",
)


@dataclass(frozen=True)
class Moment:
    """An action of the schedule, and the bytes that it leaves alive beside the states."""

    action: str
    kept: int


@dataclass(frozen=True)
class DryRun:
    """What one rank held and sent in a step; bytes.

    states: parameters, gradients, master and moments. kept: what forwards have kept for their backwards, at the action
    after which it is most. peak: the most that was alive at any time of the step, states included.
    """

    rank: int
    world: int
    parameters: int  # how many this rank holds
    states: dict[str, int]
    kept: int
    peak: int
    timetable: list[Moment]
    collectives: list[CollectiveRecord]


def dry_run(config: Config, rank: int, load: float = 1.0) -> DryRun:
    """One step of `rank`. `config` must be valid and resolved; `load`: rows at the busiest rank over the mean.

    This rank is taken for the busiest of its expert-parallel group.
    """
    log, connect = CollectiveLog(), _connector(config)
    with TensorsWithoutData() as without_data, FusedAttention():
        trainer = Trainer(config, rank, META, log, connect)
        states = trainer.optimizer.state_bytes()
        parameters = sum(named.parameter.numel() for named in trainer.named)
        _set_routing(trainer, load)
        batches = [_batch(config) for _ in range(trainer.micro_batches)]
        recorder = _Moments(without_data.live)
        trainer.executor.recorder = recorder
        log.records.clear()  # those of the start
        trainer.step(batches)
    return DryRun(
        rank=rank,
        world=trainer.groups.layout.world,
        parameters=parameters,
        states=states,
        kept=max(moment.kept for moment in recorder.moments),
        peak=without_data.live.peak,
        timetable=recorder.moments,
        collectives=log.records,
    )


def _connector(config: Config) -> Callable[[Layout, Placement, int, CollectiveLog | None], Groups]:
    """Makes communicators without anybody at the other end; the world knows who owns what of the parameters."""
    sizes = {
        name: piece.numel()
        for stage in placement_of(config).stages
        for named in _whole_stage(config, stage)
        for name, piece in named.pieces()
    }

    def others(own: list[tuple[str, int, int]]) -> list[Any]:
        rest = dict(sizes)
        for name, part, _ in own:
            rest[name] -= part
        return [[(name, part, sizes[name]) for name, part in rest.items()]]

    def connect(layout: Layout, placement: Placement, rank: int, log: CollectiveLog | None) -> Groups:
        return silent_groups(layout, placement, rank, log, others)

    return connect


def _whole_stage(config: Config, spec: StageSpec) -> list[NamedParameter]:
    """Every parameter of a stage with all its experts."""
    dtype = getattr(torch, config.precision.compute)
    stage = Stage(spec, config.model, config.moe, None, dtype, META, config.recompute)
    return named_parameters({"": stage}.values(), placement_of(config))


def _set_routing(trainer: Trainer, load: float) -> None:
    """Experts are chosen by the assumption; a choice depends on the number of tokens alone."""
    model, ep = trainer.config.model, trainer.groups.ep

    @cache
    def ids(tokens: int) -> Tensor:
        exact = trainer.config.moe.combine == "exact"
        if ep.size == 1 or (exact and load == 1.0):
            return even_choice(tokens, model.top_k, model.num_experts)
        rows = row_counts(architecture(model), tokens, ep.size, load, exact)
        return choice_over_ranks(tokens, model.top_k, model.num_experts, rows, ep.rank)

    for layer in trainer.moe_layers().values():
        layer.router.choose = lambda scores: ids(scores.shape[0]).clone()  # type: ignore[method-assign]


def _batch(config: Config) -> Batch:
    """A micro-batch of whole rows, one document each."""
    model, train = config.model, config.train
    tokens = torch.zeros(1 + model.mtp_depth, train.micro_batch, train.seq_len, dtype=torch.int64)
    positions = torch.arange(train.seq_len).expand(train.micro_batch, -1)
    return Batch(tokens, tokens.clone(), positions, torch.zeros(tokens.shape[1:], dtype=torch.int32))


class _Moments:
    """Told by the executor what happens (a `pipeline.recorder.Recorder`), remembers what is alive after each action."""

    def __init__(self, live: LiveBytes) -> None:
        self.live, self.before = live, live.now
        self.moments: list[Moment] = []

    def start(self, label: str) -> None:
        pass

    def end(self, label: str) -> None:
        if "@" in label.partition(" ")[0] and " " not in label:
            self.moments.append(Moment(label, self.live.now - self.before))
