"""Memory of every pipeline rank, part by part, at the moment when it is fullest.

States follow ZeRO (Rajbhandari et al., arXiv 1910.02054, section 3): a parameter costs its own bytes, a gradient, a
master and two moments; what stage `zero` shards is divided by the ranks that share the parameter: dense ones by
holders x dp·cp, experts by holders x edp, where a part that several pipeline ranks hold (both copies of a DualPipe
stage, a tied head) counts them all. Kept activations follow the schedule's own lists: each rank's actions are walked,
a forward adds what its stage keeps, the end of its backward takes it away.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from moe_engine.config.errors import ConfigError
from moe_engine.layout import StageSpec
from moe_engine.planner import engine_kept
from moe_engine.planner.activations import Kept, block_tensors, head_tensors, kept_bytes
from moe_engine.planner.architecture import Architecture
from moe_engine.planner.stages import Cut, Held, block_names
from moe_engine.planner.strategy import Precision, Strategy
from moe_engine.schedule import schedules
from moe_engine.schedule.action import Action, Kind, inputs
from moe_engine.schedule.check import rank_of_work

KEEPING = ("engine", "megatron")
# A micro-batch after its forward; and after its input gradient, when what the weight gradients need waits in the queue.
STATES = ("whole", "queued")
# More micro-batches than these many per stage change no peak: every schedule is in its steady state by then, and those
# of pairs have all kinds of them.
STEADY = 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank of pipeline rank `pp`.

    dense, experts: parameters held. in_flight: micro-batches kept of each stage at the peak. activations: what they
    keep, by tensor. working: what one block needs beside while it computes (tensors computed again, gradients).
    buffers: by name.
    """

    pp: int
    stages: tuple[int, ...]
    dense: float
    experts: float
    parameters: float
    gradients: float
    master: float
    moments: float
    in_flight: tuple[int, ...]
    activations: dict[str, float]
    working: float
    buffers: dict[str, float] = field(default_factory=dict)

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.master + self.moments

    @property
    def activation_bytes(self) -> float:
        return sum(self.activations.values())

    @property
    def total(self) -> float:
        return self.states + self.activation_bytes + self.working + sum(self.buffers.values())

    def parts(self) -> dict[str, float]:
        """The summands of `total`, for tables and pictures."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "master": self.master,
            "moments": self.moments,
            "activations": self.activation_bytes,
            "working": self.working,
            "buffers": sum(self.buffers.values()),
        }


@dataclass(frozen=True)
class StateBytes:
    """Bytes of parameters, gradients, masters and moments."""

    parameters: float
    gradients: float
    master: float
    moments: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.master + self.moments


def state_bytes(count: float, sharers: float, strategy: Strategy) -> StateBytes:
    """What `count` parameters cost on a rank that shares them with `sharers` ranks, itself included."""
    sharers = min(sharers, strategy.shard) if strategy.shard else sharers
    precision, zero = strategy.precision, strategy.zero
    if strategy.frozen:
        return StateBytes(count * precision.parameter / (sharers if zero >= 3 else 1), 0.0, 0.0, 0.0)
    return StateBytes(
        parameters=count * precision.parameter / (sharers if zero >= 3 else 1),
        gradients=count * precision.gradient / (sharers if zero >= 2 else 1),
        master=count * precision.master / (sharers if zero >= 1 else 1),
        moments=count * precision.moments / (sharers if zero >= 1 else 1),
    )


def rank_memory(cut: Cut, keeping: str = "engine", load: float = 1.0) -> list[RankMemory]:
    """The memory of each pipeline rank. keeping: what is kept for backward, as this `engine` or as `megatron` does;
    load: rows at the busiest rank's experts over the mean. Raises ConfigError for an unknown `keeping`.
    """
    if keeping not in KEEPING:
        raise ConfigError(f"keeping={keeping}: no such way; use one of {', '.join(KEEPING)}")
    strategy = cut.strategy
    live = live_counts(strategy.schedule, strategy.layout.pp, _steady(strategy), strategy.virtual_stages)
    needs = _stage_needs(cut, keeping, load)
    kept, working = [need[0] for need in needs], [need[1] for need in needs]
    sizes = [[sum(tensors.values()) for tensors in states] for states in kept]
    message = _message(cut) if keeping == "engine" else 0.0
    ranks = []
    for pp, stages in enumerate(cut.placement.stages_of_rank):
        flat = [*(size for stage in stages for size in sizes[stage]), message]
        *found, ahead = max(live[pp], key=lambda counts: sum(size * n for size, n in zip(flat, counts, strict=True)))
        activations = {"received ahead": ahead * message, "weight codes": _weight_codes(cut, pp, keeping, load)}
        for place, count in enumerate(found):
            for name, size in kept[stages[place // len(STATES)]][place % len(STATES)].items():
                activations[name] = activations.get(name, 0.0) + size * count
        activations = {name: size for name, size in activations.items() if size}
        counts = tuple(sum(found[i : i + len(STATES)]) for i in range(0, len(found), len(STATES)))
        states, dense, experts = _states(cut, pp)
        ranks.append(
            RankMemory(
                pp=pp,
                stages=tuple(stages),
                dense=dense,
                experts=experts,
                parameters=states.parameters,
                gradients=states.gradients,
                master=states.master,
                moments=states.moments,
                in_flight=counts,
                activations=activations,
                working=max(working[stage] for stage in stages),
                buffers=_buffers(cut, pp),
            )
        )
    return ranks


def least_states(cut: Cut) -> float:
    """Bytes of states of the rank that has most of them: what no recompute and no micro-batch makes smaller."""
    return max(_states(cut, pp)[0].total for pp in range(cut.strategy.layout.pp))


@lru_cache(maxsize=512)
def live_counts(name: str, pp: int, micro_batches: int, virtual: int) -> list[list[tuple[int, ...]]]:
    """For every rank, how many micro-batches it keeps of each of its stages in each of STATES, stage by stage, and how
    many messages it receives for its next action, at all moments that can be its fullest.

    Moments at which it keeps no more of any than at another are left out. A weight gradient still in the queue keeps
    its micro-batch: memory is free after W.
    """
    lists = schedules.schedule(name, pp, micro_batches, virtual)
    rank_of, last = rank_of_work(lists), schedules.num_stages(name, pp, virtual)
    found = []
    for rank, (actions, stages) in enumerate(zip(lists, schedules.stage_of_rank(name, pp, virtual), strict=True)):
        needed = [inputs(action, last) for action in actions[1:]]
        ahead = [sum(rank_of[item.stage, item.micro_batch] != rank for item in items) for items in needed]
        found.append(_maximal(_moments(actions, stages, [*ahead, 0])))
    return found


def _moments(actions: list[Action], stages: list[int], ahead: list[int]) -> set[tuple[int, ...]]:
    """What a rank keeps right after each of its actions. ahead: messages it is receiving then."""
    live = [0] * (len(STATES) * len(stages))
    found = set()
    for action, messages in zip(actions, ahead, strict=True):
        for half in action.halves():
            first = len(STATES) * stages.index(half.stage)
            if half.kind is Kind.F:
                live[first] += 1
            elif half.kind is Kind.W:
                live[first + 1] -= 1
            else:
                live[first] -= 1
                live[first + 1] += half.kind is Kind.I
        found.add((*live, messages))
    return found


def _maximal(moments: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those that no other is at least as large as everywhere; largest sums first."""
    kept: list[tuple[int, ...]] = []
    for moment in sorted(moments, key=lambda m: (-sum(m), m)):
        if not any(all(a >= b for a, b in zip(other, moment, strict=True)) for other in kept):
            kept.append(moment)
    return kept


def megatron_estimate(model: Architecture, strategy: Strategy) -> float:
    """Bytes of states on the most loaded rank, as Megatron-LM's theoretical estimator counts them.

    Layers are divided by pp as fractions; the block of MTP and one vocabulary matrix come on top; experts shard over
    their replicas, the rest over dp·cp; layer norms, the final norm and routers are not divided by tp, latent norms
    and down projections are. An MTP module is its block: no projection, no norms of its own.
    """
    layout = strategy.layout
    dense, moe, pp = model.num_dense_layers, model.num_moe_layers, layout.pp
    norms, router = 2 * model.dim, model.dim * model.num_experts
    shared = sum(matrix.size for matrix in model.mlp(model.shared_hidden))
    attention = sum(matrix.size for matrix in model.attention()) + model.q_lora_rank + model.kv_lora_rank
    blocks = model.num_layers / pp + model.mtp_depth
    moe_blocks = moe / pp + model.mtp_depth
    split = blocks * attention + moe_blocks * shared + model.vocabulary_size
    split += dense / pp * sum(matrix.size for matrix in model.mlp(model.dense_hidden))
    split += model.vocabulary_size if pp == 1 and not model.tied_head else 0
    whole = blocks * norms + moe_blocks * router + model.dim / pp
    experts = moe_blocks * model.num_experts * model.expert_size / layout.ep / strategy.etp
    dense_bytes = state_bytes(split / layout.tp + whole, strategy.dense_replicas, strategy).total
    return dense_bytes + state_bytes(experts, strategy.expert_replicas, strategy).total


def zero_table(parameters: float, ranks: int, gradient_bytes: float = 2) -> dict[str, StateBytes]:
    """The classical derivation: states of a model in 16-bit with AdamW, plain data parallel and ZeRO-1, 2, 3."""
    precision = Precision(gradient=gradient_bytes)
    names = ("plain data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
    return {
        name: state_bytes(parameters, ranks, Strategy(zero=zero, precision=precision))
        for zero, name in enumerate(names)
    }


def _steady(strategy: Strategy) -> int:
    """Micro-batches that reach the steady state, or as many as there are."""
    enough = STEADY * strategy.layout.pp
    if strategy.schedule == "gpipe" or strategy.micro_batches <= enough:
        return strategy.micro_batches
    return enough


def _stage_needs(cut: Cut, keeping: str, load: float) -> list[tuple[list[dict[str, float]], float]]:
    """For each stage, what it keeps of one micro-batch in each of STATES, by tensor, and what one of its blocks needs
    while it computes."""
    model, strategy = cut.model, cut.strategy
    kinds = sorted({kind for spec in cut.stages for kind in _kinds(cut, spec)})
    sizes = engine_kept.Sizes(model, strategy, load)
    wide = engine_kept.Sizes(model, replace(strategy, precision=replace(strategy.precision, codes=False)), load)
    if keeping == "engine":
        of_state = (engine_kept.block_tensors, engine_kept.queued_tensors)
        states = [{kind: of(sizes if kind[1] else wide, kind[0]) for kind in kinds} for of in of_state]
    else:
        states = [{kind: block_tensors(model, strategy, kind[0], load) for kind in kinds}] * len(STATES)
    kept = [{kind: kept_bytes(found, strategy.recompute) for kind, found in state.items()} for state in states]
    working = {kind: _working(found, kept[0][kind]) for kind, found in states[0].items()}
    needs = []
    for spec in cut.stages:
        blocks, found = _kinds(cut, spec), []
        for state, of_block in zip(STATES, kept, strict=True):
            total: dict[str, float] = {}
            for kind in sorted(set(blocks)):
                for name, size in of_block[kind].items():
                    total[name] = total.get(name, 0.0) + size * blocks.count(kind)
            if keeping != "engine":
                total |= _of_megatron(cut, spec)
            else:
                of_stage = engine_kept.stage_tensors(sizes, len(spec.mtp), spec.head)
                if state == "queued":
                    of_stage = engine_kept.stage_queued(sizes, len(spec.mtp))
                total |= kept_bytes(of_stage, strategy.recompute)
            found.append(total)
        needs.append((found, max((working[kind] for kind in set(blocks)), default=0.0)))
    return needs


def _kinds(cut: Cut, spec: StageSpec) -> list[tuple[bool, bool]]:
    """For each block of a stage, whether it has experts, and whether this engine computes it with codes."""
    return [(cut.is_moe(part), _in_codes(cut, part)) for part in block_names(spec)]


def _in_codes(cut: Cut, part: str) -> bool:
    """Whether this engine computes a block with codes: in fp8, all but the first and last layers that stay in bf16."""
    precision, (kind, _, index) = cut.strategy.precision, part.partition(".")
    if kind == "mtp" or not precision.codes:
        return precision.codes
    return precision.bf16_first <= int(index) < cut.model.num_layers - precision.bf16_last


def _weight_codes(cut: Cut, pp: int, keeping: str, load: float) -> float:
    """Bytes of the codes of a rank's weights, where this engine computes with them."""
    if keeping != "engine" or not cut.strategy.precision.codes:
        return 0.0
    sizes = engine_kept.Sizes(cut.model, cut.strategy, load)
    parts = [
        part for part in cut.rank_parts(pp) if part.partition(".")[0] in ("layers", "mtp") and _in_codes(cut, part)
    ]
    joins = sum(2 * cut.strategy.precision.code_copies * cut.model.dim**2 for part in parts if part.startswith("mtp"))
    return joins + sum(engine_kept.weight_codes(sizes, cut.is_moe(part)) for part in parts)


def _of_megatron(cut: Cut, spec: StageSpec) -> dict[str, float]:
    """What a stage keeps besides its blocks."""
    found = {"token ids": 8 * cut.strategy.tokens} if spec.first else {}
    if spec.head:
        found |= {each.name: each.bytes * (1 + len(spec.mtp)) for each in head_tensors(cut.model, cut.strategy)}
    return found


def _working(tensors: list[Kept], kept: dict[str, float]) -> float:
    """What one block needs in backward besides what is kept: recomputed tensors, and gradients of the two largest
    tensors that it reads or makes."""
    largest = sorted((tensor.bytes for tensor in tensors), reverse=True)[:2]
    return sum(tensor.bytes for tensor in tensors) - sum(kept.values()) + sum(largest)


def _states(cut: Cut, pp: int) -> tuple[StateBytes, float, float]:
    """States of a pipeline rank, and its dense and expert parameters."""
    strategy = cut.strategy
    found: list[StateBytes] = []
    dense = experts = 0.0
    for part, held in cut.rank_parts(pp).items():
        holders = len(cut.placement.holders(part))
        dense, experts = dense + held.dense, experts + held.expert
        found.append(state_bytes(held.dense, holders * strategy.dense_replicas, strategy))
        found.append(state_bytes(held.expert, holders * strategy.expert_replicas, strategy))
    total = StateBytes(
        sum(state.parameters for state in found),
        sum(state.gradients for state in found),
        sum(state.master for state in found),
        sum(state.moments for state in found),
    )
    return total, dense, experts


def _message(cut: Cut) -> float:
    """Bytes of what crosses a stage's border."""
    strategy = cut.strategy
    along = strategy.layout.tp if strategy.sequence_parallel else 1
    return strategy.precision.parameter * strategy.tokens * cut.model.dim / along


def _buffers(cut: Cut, pp: int) -> dict[str, float]:
    """Space for communication: gathered layers of ZeRO-3 with their unsharded gradients, pipeline messages, rows."""
    strategy, model = cut.strategy, cut.model
    parts: dict[str, Held] = cut.rank_parts(pp)
    largest = max((held.dense + held.expert for held in parts.values()), default=0.0)
    buffers = {}
    if strategy.zero >= 3:
        buffers["gathered parameters"] = 2 * largest * 2.0
    if strategy.zero >= 2:
        buffers["gradients before reduction"] = largest * min(4.0, strategy.precision.gradient)
    message = _message(cut)
    if strategy.layout.pp > 1:
        buffers["pipeline messages"] = 4 * message
    if strategy.windows:
        buffers["symmetric memory"] = float(sum(strategy.windows.by_use.values()))
    if strategy.layout.ep > 1 and any(cut.is_moe(part) for part in parts if part.startswith(("layers", "mtp"))):
        buffers["dispatch and combine"] = 2 * message * min(model.top_k, strategy.layout.ep)
    return buffers
