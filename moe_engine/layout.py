"""Where everything sits: rank arithmetic, pipeline stages, holders. Pure Python, nothing of torch.

The world is a grid of pp x dp x cp x tp ranks. From the inside out the order is tp, cp, dp, pp, so a rank is
`((pp * DP + dp) * CP + cp) * TP + tp` and all ranks of one stage are contiguous. Expert parallelism folds into
the same ranks: of the `dp*cp*tp` ranks of a stage, `ep` contiguous ones hold one copy of all experts (so an EP
group sits on the fewest nodes), and the `edp = dp*cp*tp/ep` ranks with equal `ep` index hold the same experts.

A parameter that several stages hold (the embedding table used by MTP or as a tied head) has one global name
and a *holder set*, the tuple of stages that hold it. Its gradient is summed, its optimizer shards are cut and
its norm is counted over holders x dp*cp (dense) or holders x edp (experts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import ModelConfig, ParallelConfig, PipelineConfig

_PARTS = ("embedding", "head", "mtp")  # the words of `pipeline.stages`, besides numbers of layers

# In the optimizer's buffers parameters start, and shards are cut, at multiples of this many elements. Vectorised
# kernels may treat the elements after the last full vector by other instructions; this way there are none, and no bit
# can depend on the layout.
ALIGNMENT = 64


@dataclass(frozen=True)
class Coordinate:
    """A rank's place on every axis."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Layout:
    """The rank grid. All sizes are counts of ranks."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    ranks_per_node: int | None = None  # None: not told

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Layout:
        """The grid of a resolved configuration (`parallel.dp` filled in)."""
        if parallel.dp is None:
            raise ValueError("parallel.dp=None: resolve the configuration first")
        return cls(parallel.pp, parallel.dp, parallel.cp, parallel.tp, parallel.ep, parallel.ranks_per_node)

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage: dp * cp * tp."""
        return self.dp * self.cp * self.tp

    @property
    def world(self) -> int:
        return self.pp * self.stage_size

    @property
    def edp(self) -> int:
        """Replicas of each expert within a stage."""
        return self.stage_size // self.ep

    def coordinate(self, rank: int) -> Coordinate:
        inner = rank % self.stage_size
        return Coordinate(
            pp=rank // self.stage_size,
            dp=inner // (self.cp * self.tp),
            cp=inner // self.tp % self.cp,
            tp=inner % self.tp,
            ep=inner % self.ep,
            edp=inner // self.ep,
        )

    def cp_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that share sequences with `rank`, in the order of their shards."""
        first = rank - self.coordinate(rank).cp * self.tp
        return tuple(range(first, first + self.cp * self.tp, self.tp))

    def stage_ranks(self, pp: int) -> tuple[int, ...]:
        return tuple(range(pp * self.stage_size, (pp + 1) * self.stage_size))

    def dense_ranks(self, rank: int, holders: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks that share the dense parameters held by the pipeline ranks `holders`, as seen from `rank`."""
        tp, size = rank % self.tp, self.stage_size
        return tuple(r for pp in holders for r in range(pp * size + tp, (pp + 1) * size, self.tp))

    def ep_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that exchange tokens with `rank`: one copy of all experts, in expert order."""
        first = rank - self.coordinate(rank).ep
        return tuple(range(first, first + self.ep))

    def ep_node_ranks(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Of the ranks that exchange tokens with `rank`: those with its place on their nodes, those on its own node."""
        if self.ranks_per_node is None:
            return None
        ranks, on_node = self.ep_ranks(rank), min(self.ranks_per_node, self.ep)
        place = self.coordinate(rank).ep % on_node
        first = self.coordinate(rank).ep - place
        return ranks[place::on_node], ranks[first : first + on_node]

    def expert_ranks(self, rank: int, holders: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks that hold the same experts as `rank`, over the pipeline ranks `holders`."""
        ep, size = rank % self.stage_size % self.ep, self.stage_size
        return tuple(r for pp in holders for r in range(pp * size + ep, (pp + 1) * size, self.ep))

    def neighbour(self, rank: int, pp: int) -> int:
        """The rank with the same place as `rank` on pipeline rank `pp`."""
        return pp * self.stage_size + rank % self.stage_size


def shard_chunks(seq_len: int, cp: int, shard: int) -> tuple[range, range]:
    """The places in a sequence that one of `cp` shards holds, in its order: two of 2 cp equal chunks.

    One as early as the other is late: under a causal mask a token's work grows with its place, and so every shard has
    equal work. Raises ValueError where the chunks would not be equal.
    """
    if seq_len % (2 * cp) or not 0 <= shard < cp:
        raise ValueError(f"shard {shard} of {cp} of a sequence of {seq_len} tokens: cut in {2 * cp} equal chunks")
    size = seq_len // (2 * cp)
    late = 2 * cp - 1 - shard
    return range(shard * size, (shard + 1) * size), range(late * size, (late + 1) * size)


@dataclass(frozen=True)
class StageSpec:
    """What one pipeline stage holds of the model."""

    index: int
    num_stages: int
    layers: tuple[int, ...]
    embedding: bool  # the embedding table: as the input, for MTP, or as a tied head
    head: bool  # final norm, output head and main loss
    mtp: tuple[int, ...] = ()  # modules of multi-token prediction, which need the output head too

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.num_stages - 1


def stages_of(model: ModelConfig, pipeline: PipelineConfig, num_stages: int) -> list[StageSpec]:
    """The stages as `pipeline.stages` describes them, or as even as possible where it says nothing.

    Raises ConfigError, with what would work, unless they cover the model exactly and in its order.
    """
    if not pipeline.stages:
        return split_stages(model, num_stages)
    read = [_read_stage(text) for text in pipeline.stages]
    problems = _stage_problems(model, pipeline.stages, read, num_stages)
    if problems:
        shown = f"pipeline.stages=[{','.join(pipeline.stages)}]"
        blocks = model.num_layers + (model.mtp_depth > 0)
        works = (
            f"use pipeline.stages=[{','.join(_described(split_stages(model, num_stages)))}]"
            if blocks >= num_stages
            else (f"use fewer stages than {num_stages}, or more layers")
        )
        raise ConfigError("\n".join(f"{shown}: {problem}; {works}" for problem in problems))
    stages, start = [], 0
    for i, (words, layers) in enumerate(read):
        mtp = tuple(range(model.mtp_depth)) if "mtp" in words else ()
        stages.append(
            StageSpec(
                index=i,
                num_stages=num_stages,
                layers=tuple(range(start, start + layers)),
                embedding="embedding" in words or bool(mtp) or ("head" in words and model.tied_head),
                head="head" in words,
                mtp=mtp,
            )
        )
        start += layers
    return stages


def _read_stage(text: str) -> tuple[list[str], int]:
    """`embedding+2L` -> (["embedding"], 2)."""
    words = [word.removesuffix("L") for word in text.replace(" ", "").split("+")]
    return [word for word in words if not word.isdecimal()], sum(int(word) for word in words if word.isdecimal())


def _stage_problems(
    model: ModelConfig, texts: Sequence[str], read: Sequence[tuple[list[str], int]], num_stages: int
) -> list[str]:
    """What is wrong with a description, a line each."""
    unknown = sorted({word for words, _ in read for word in words} - set(_PARTS))
    if unknown:
        return [
            f"{unknown[0]!r} is no part of a model; a stage is made of embedding, layers (3L for three), head and mtp"
        ]
    problems = []
    if len(read) != num_stages:
        problems.append(f"describes {len(read)} stages, and the schedule has {num_stages}")
    layers = [count for _, count in read]
    if sum(layers) != model.num_layers:
        problems.append(f"has {sum(layers)} layers, and the model has model.num_layers={model.num_layers}")
    problems += [f"stage {i} ({texts[i]}) is empty" for i, (words, count) in enumerate(read) if not words and not count]
    place = {part: [i for i, (words, _) in enumerate(read) for word in words if word == part] for part in _PARTS}
    for part, wanted in (("embedding", 1), ("head", 1), ("mtp", int(model.mtp_depth > 0))):
        if len(place[part]) != wanted:
            depth = f" with model.mtp_depth={model.mtp_depth}" if part == "mtp" else ""
            found = len(place[part])
            problems.append(f"names {part} {_times(found)}, and should name it {_times(wanted)}{depth}")
            return problems
    if place["embedding"] != [0]:
        problems.append(f"has the embedding on stage {place['embedding'][0]}, and it comes first, on stage 0")
    last_layer = max((i for i, count in enumerate(layers) if count), default=0)
    if place["head"][0] < last_layer:
        problems.append(f"has the head on stage {place['head'][0]}, and layers after it, on stage {last_layer}")
    if place["mtp"] and place["mtp"][0] < place["head"][0]:
        problems.append(f"has mtp on stage {place['mtp'][0]}, before the head on stage {place['head'][0]}")
    return problems


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _described(stages: Sequence[StageSpec]) -> list[str]:
    """The words of `pipeline.stages` for some stages."""
    found = []
    for stage in stages:
        words = ["embedding"] if stage.first else []
        words += [f"{len(stage.layers)}L"] if stage.layers else []
        found.append("+".join(words + ["head"] * stage.head + ["mtp"] * bool(stage.mtp)))
    return found


def split_stages(model: ModelConfig, num_stages: int) -> list[StageSpec]:
    """Cut the model in `num_stages` stages with block counts as even as possible.

    MTP blocks stay with the head on the last stage and count as blocks there; where the division leaves a
    remainder, earlier stages take it, since the last one also computes the head.
    """
    last = (
        max((model.num_layers + model.mtp_depth) // num_stages - model.mtp_depth, 0)
        if num_stages > 1
        else model.num_layers
    )
    earlier, rest = num_stages - 1, model.num_layers - last
    sizes = [rest // earlier + (i < rest % earlier) for i in range(earlier)] + [last]
    return stages_of_sizes(sizes, model.mtp_depth, model.tied_head)


def stages_of_sizes(sizes: Sequence[int], mtp_depth: int, tied_head: bool) -> list[StageSpec]:
    """Consecutive stages of so many layers each: the embedding on the first one, the head and MTP on the last."""
    stages, start = [], 0
    for i, size in enumerate(sizes):
        last = i == len(sizes) - 1
        stages.append(
            StageSpec(
                index=i,
                num_stages=len(sizes),
                layers=tuple(range(start, start + size)),
                embedding=i == 0 or (last and (tied_head or mtp_depth > 0)),
                head=last,
                mtp=tuple(range(mtp_depth)) if last else (),
            )
        )
        start += size
    return stages


@dataclass(frozen=True)
class Placement:
    """Which pipeline rank holds which stages, and who holds what: the holder contract."""

    stages: tuple[StageSpec, ...]
    stages_of_rank: tuple[tuple[int, ...], ...]

    @cached_property
    def rank_of_stage(self) -> dict[int, tuple[int, ...]]:
        """Pipeline ranks that hold a stage (two in a bidirectional pipeline)."""
        ranks: dict[int, list[int]] = {stage.index: [] for stage in self.stages}
        for pp, indices in enumerate(self.stages_of_rank):
            for index in indices:
                ranks[index].append(pp)
        return {index: tuple(found) for index, found in ranks.items()}

    def holders(self, name: str) -> tuple[int, ...]:
        """The pipeline ranks that hold the parameter with this global name, ascending."""
        return self._holders_of_part[part_of(name)]

    @cached_property
    def holder_sets(self) -> tuple[tuple[int, ...], ...]:
        """Every holder set that occurs, in one fixed order."""
        return tuple(sorted(set(self._holders_of_part.values())))

    @cached_property
    def _holders_of_part(self) -> dict[str, tuple[int, ...]]:
        held: dict[str, set[int]] = {}
        for stage in self.stages:
            parts = [f"layers.{i}" for i in stage.layers] + [f"mtp.{k}" for k in stage.mtp]
            parts += ["embedding"] if stage.embedding else []
            parts += ["norm"] if stage.head else []
            parts += ["head"] if stage.head or stage.mtp else []
            for part in parts:
                held.setdefault(part, set()).update(self.rank_of_stage[stage.index])
        return {part: tuple(sorted(ranks)) for part, ranks in held.items()}


def part_of(name: str) -> str:
    """The part of the model that a global name belongs to: `layers.3`, `mtp.0`, `embedding`, `norm` or `head`."""
    words = name.split(".")
    return ".".join(words[:2]) if words[0] in ("layers", "mtp") else words[0]


def aligned(numel: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-numel // ALIGNMENT) * ALIGNMENT
