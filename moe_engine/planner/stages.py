"""What each pipeline rank holds: its stages, and how many parameters of their parts lie on one of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moe_engine.config.errors import ConfigError
from moe_engine.layout import Placement, StageSpec, stages_of_sizes
from moe_engine.planner.architecture import Architecture
from moe_engine.planner.strategy import Strategy
from moe_engine.schedule import schedules


@dataclass(frozen=True)
class Held:
    """Parameters that one rank holds of one part of the model: dense ones, and those of routed experts."""

    dense: float
    expert: float = 0.0


@dataclass(frozen=True)
class Cut:
    """A model cut into stages and laid over the pipeline ranks."""

    model: Architecture
    strategy: Strategy
    placement: Placement

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        return self.placement.stages

    @cached_property
    def parts(self) -> list[dict[str, Held]]:
        """For each stage, the parameters on one rank of every part, by the part's global name."""
        blocks = {moe: self._block(moe) for moe in (False, True)[: 1 + self.has_experts]}
        return [{part: self._held(part, stage, blocks) for part in self._parts_of(stage)} for stage in self.stages]

    def rank_parts(self, pp: int) -> dict[str, Held]:
        """The parts that a pipeline rank holds; one in two of its stages is counted once."""
        return {part: held for stage in self.placement.stages_of_rank[pp] for part, held in self.parts[stage].items()}

    @property
    def has_experts(self) -> bool:
        return self.model.num_experts > 0

    def _parts_of(self, stage: StageSpec) -> list[str]:
        names = ["embedding"] if stage.embedding else []
        names += block_names(stage)
        names += ["norm"] if stage.head else []
        names += ["head"] if (stage.head or stage.mtp) and not self.model.tied_head else []
        return names

    def _held(self, part: str, stage: StageSpec, blocks: dict[bool, Held]) -> Held:
        model, tp = self.model, self.strategy.layout.tp
        kind = part.partition(".")[0]
        if kind == "embedding":
            positions = model.learned_positions * model.dim if stage.first else 0
            return Held(model.vocabulary_size / tp + positions)
        if kind == "head":
            return Held(model.vocabulary_size / tp)
        if kind == "norm":
            return Held(model.dim * model.norm_vectors)
        block = blocks[self.is_moe(part)]
        return Held(block.dense + model.mtp_extra, block.expert) if kind == "mtp" else block

    def _block(self, moe: bool) -> Held:
        """Parameters of one transformer block on one rank."""
        model, strategy = self.model, self.strategy
        dense = sum(matrix.local(strategy.layout.tp) for matrix in model.dense_matrices(moe)) + model.vectors(moe)
        local_experts = model.num_experts / strategy.layout.ep / strategy.etp if moe else 0
        return Held(dense, local_experts * model.expert_size)

    def is_moe(self, part: str) -> bool:
        """Whether a block has experts."""
        kind, _, index = part.partition(".")
        if not self.model.num_experts:
            return False
        return kind == "mtp" or int(index) not in self.model.dense_layers

    def kinds(self, stage: StageSpec) -> list[tuple[bool, bool]]:
        """For each block of a stage, whether it has experts and whether attention sees a window alone."""
        return [(self.is_moe(f"layers.{i}"), self.model.windowed(i)) for i in stage.layers] + [
            (self.is_moe(f"mtp.{k}"), False) for k in stage.mtp
        ]

    def blocks(self, stage: StageSpec) -> list[bool]:
        """For each block of a stage, whether it has experts."""
        return [self.is_moe(part) for part in block_names(stage)]


def block_names(stage: StageSpec) -> list[str]:
    """Global names of a stage's blocks: its layers, then MTP modules."""
    return [f"layers.{i}" for i in stage.layers] + [f"mtp.{k}" for k in stage.mtp]


def cut(model: Architecture, strategy: Strategy) -> Cut:
    """Lay the model over the ranks. Raises ConfigError when `stage_layers` does not give every layer one stage."""
    name, pp = strategy.schedule, strategy.layout.pp
    held = schedules.stage_of_rank(name, pp, strategy.virtual_stages)
    num_stages = schedules.num_stages(name, pp, strategy.virtual_stages)
    sizes = list(strategy.stage_layers) or _even(model, num_stages)
    if len(sizes) != num_stages or sum(sizes) != model.num_layers:
        raise ConfigError(
            f"plan.stage_layers={list(sizes)}: needs {num_stages} numbers adding up to the {model.num_layers} layers; "
            f"leave it out, or use {_even(model, num_stages)}"
        )
    stages = stages_of_sizes(sizes, model.mtp_depth, model.tied_head)
    return Cut(model, strategy, Placement(tuple(stages), tuple(map(tuple, held))))


def balanced(model: Architecture, num_stages: int, seq_len: int) -> tuple[int, ...]:
    """Layers of each stage, such that the last, with the heads and MTP blocks, takes about as long as the others."""
    if num_stages == 1:
        return (model.num_layers,)
    heads = (1 + model.mtp_depth) * 2.0 * model.vocabulary_size * seq_len
    blocks = model.num_layers + model.mtp_depth
    block = (model.forward_flops(seq_len) - heads) / blocks
    share = (blocks * block + heads) / num_stages
    last = max(0, round((share - heads) / block) - model.mtp_depth)
    return tuple(_before(model, num_stages, last))


def _even(model: Architecture, num_stages: int) -> list[int]:
    """Block counts as even as possible, MTP blocks on the last stage; earlier stages take the remainder."""
    if num_stages == 1:
        return [model.num_layers]
    last = max((model.num_layers + model.mtp_depth) // num_stages - model.mtp_depth, 0)
    return _before(model, num_stages, last)


def _before(model: Architecture, num_stages: int, last: int) -> list[int]:
    """Layers of each stage with `last` on the last one, the others as even as possible; earlier ones take the rest."""
    earlier, rest = num_stages - 1, model.num_layers - last
    return [rest // earlier + (i < rest % earlier) for i in range(earlier)] + [last]
