"""A dry run: one training step of one rank of a job, by the engine's own code, with nobody else there and no data.

What is real: layout, communicators, stages, optimizer with its buckets, schedule and executor, autograd, recompute, and
so every tensor's size and life and every collective. What is not is listed in `FAKED`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_engine.config.schema import Config
from moe_engine.distributed.collectives import CollectiveLog, CollectiveRecord, Communicator
from moe_engine.distributed.groups import Groups
from moe_engine.distributed.silent import silent_groups
from moe_engine.dryrun.collectives import kind
from moe_engine.dryrun.routing import AssumedChoices
from moe_engine.dryrun.tensors import META, TensorsWithoutData
from moe_engine.dryrun.windows import SilentWindow
from moe_engine.layout import Layout, Placement, StageSpec
from moe_engine.model.batch import Batch, Shard
from moe_engine.model.names import NamedParameter, named_parameters
from moe_engine.model.transformer import Stage
from moe_engine.moe.dispatch import with_windows
from moe_engine.planner.architecture import architecture
from moe_engine.planner.choices import expert_choice
from moe_engine.planner.job import placement_of
from moe_engine.trainer import Connect, Trainer

FAKED = (
    "numbers: floating-point tensors have sizes and no values; what they would decide is 0",
    "the other ranks: they say what this one says, and nothing is sent",
    "the router's choice: experts are chosen as the stated assumption wants",
    "kernels: their fake implementations give the sizes of their results, attention's as well; nothing is kept but"
    " what a GPU keeps (a CPU keeps the softmax of rows up to 512 tokens, and bf16 activations in fp32)",
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
    after which it is most. peak: the most that was alive at any time of the step, states included. ranks: of each
    communicator, by its kind. symmetric: memory into which other ranks put rows.
    """

    rank: int
    world: int
    parameters: int  # how many this rank holds
    states: dict[str, int]
    kept: int
    peak: int
    timetable: list[Moment]
    collectives: list[CollectiveRecord]
    ranks: dict[str, int]
    symmetric: int = 0


def dry_run(config: Config, rank: int, load: float = 1.0) -> DryRun:
    """One step of `rank`. `config` must be valid and resolved; `load`: rows at the busiest rank over the mean.

    This rank is taken for the busiest of its expert-parallel group.
    """
    log, connect = CollectiveLog(), _connector(config)
    with TensorsWithoutData() as without_data:
        trainer = Trainer(config, rank, META, log, connect)
        without_data.live.peak = without_data.live.now  # of the step, not of the start
        states = trainer.optimizer.state_bytes()
        parameters = sum(named.parameter.numel() for named in trainer.named)
        set_routing(trainer, load)
        batches = [whole_rows(config, trainer.groups) for _ in range(trainer.micro_batches)]
        recorder = Moments(lambda: without_data.live.now)
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
        ranks={kind(each.name): each.size for each in _communicators(trainer.groups)}
        | {each.name: each.group.size for each in _windows(trainer.groups)},
        symmetric=sum(each.held.numel() for each in _windows(trainer.groups)),
    )


def _windows(groups: Groups) -> list[SilentWindow]:
    found = groups.ep_windows
    each = () if found is None else (found.rows, found.counts)
    return [window for window in each if isinstance(window, SilentWindow)]


def _communicators(groups: Groups) -> list[Communicator]:
    alone = [groups.world, groups.data, groups.cp, groups.cp_counts, groups.ep, groups.ep_counts]
    several = (groups.dense, groups.expert, groups.edges)
    return [*alone, *(groups.ep_nodes or ()), *(each for found in several for each in found.values())]


def _connector(config: Config) -> Connect:
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
        return with_windows(config, silent_groups(layout, placement, rank, log, others), META, SilentWindow)

    return connect


def _whole_stage(config: Config, spec: StageSpec) -> list[NamedParameter]:
    """Every parameter of a stage with all its experts."""
    dtype = getattr(torch, config.precision.compute)
    stage = Stage(spec, config.model, config.moe, None, dtype, META, config.recompute)
    return named_parameters({"": stage}.values(), placement_of(config))


def set_routing(trainer: Trainer, load: float) -> None:
    """Experts are chosen by the assumption; a choice depends on the number of tokens alone."""
    model, ep = architecture(trainer.config.model), trainer.groups.ep
    exact = trainer.config.moe.combine == "exact"
    for layer in trainer.moe_layers().values():
        layer.choices = AssumedChoices(lambda tokens: expert_choice(model, tokens, ep.size, ep.rank, load, exact))


def whole_rows(config: Config, groups: Groups) -> Batch:
    """A micro-batch of whole rows, one document each; of their tokens this rank's shard."""
    model, train, cp = config.model, config.train, groups.cp
    rows, length = train.micro_batch, train.seq_len // cp.size
    tokens = torch.zeros(1 + model.mtp_depth, rows, length, dtype=torch.int64)
    documents = torch.zeros(rows, train.seq_len, dtype=torch.int32)
    places, shard = torch.arange(length), None
    if cp.size > 1:
        shard = Shard(cp.rank, cp.size, documents, torch.full((rows,), train.seq_len))
        places = shard.places()
    return Batch(tokens, tokens.clone(), places.expand(rows, -1), documents[:, :length], None, shard)


class Moments:
    """Told by the executor what happens (a `pipeline.recorder.Recorder`), remembers what is alive after each action."""

    def __init__(self, bytes_now: Callable[[], int]) -> None:
        self.bytes_now, self.before = bytes_now, bytes_now()
        self.moments: list[Moment] = []

    def start(self, label: str) -> None:
        pass

    def end(self, label: str) -> None:
        if "@" in label and " " not in label:
            self.moments.append(Moment(label, self.bytes_now() - self.before))
