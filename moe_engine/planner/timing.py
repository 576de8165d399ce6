"""The time of one step, part by part, with the bubble of the real schedule.

Each stage's forward, input gradient and weight gradient become a cost; the schedule's own lists are simulated with
them (`schedule.simulate`); what happens once a step (reduction of gradients, gathering of parameters, the optimizer)
comes on top, less what hides beside the first and last micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from moe_engine.planner import hardware
from moe_engine.planner.architecture import Architecture
from moe_engine.planner.hardware import ClusterConfig, Efficiency
from moe_engine.planner.stages import Cut
from moe_engine.planner.strategy import Overlap
from moe_engine.planner.work import Passes, Rates, Work, block_parts, head_passes
from moe_engine.schedule import schedules
from moe_engine.schedule.action import Kind
from moe_engine.schedule.simulate import Cost, Prepared, prepare

# A schedule repeats itself once it is full: longer ones are simulated up to this many micro-batches per rank and
# extended by the time that each further one adds.
SIMULATED = 2
FOLDED = ("zbv", "dualpipe", "dualpipev")  # these need one more to be full
# How well two things at a time hide each other: 1 not at all, infinity perfectly.
HIDING = 3.0


@dataclass(frozen=True)
class StageWork:
    """The passes of one stage over one micro-batch, by part."""

    parts: dict[str, Passes]

    @cached_property
    def total(self) -> Passes:
        return sum(self.parts.values(), Passes(Work(), Work(), Work()))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. `parts` adds up to `seconds`: work of the busiest rank by part, with communication that
    nothing hides; the bubble; and what comes once a step.

    hidden: communication that runs beside computation. communication: all of it, by kind, per rank and step.
    """

    seconds: float
    parts: dict[str, float]
    hidden: float
    communication: dict[str, float]
    bubble: float  # fraction of the pipeline's time


@dataclass(frozen=True)
class StepWork:
    """All that the time of a step follows from, before efficiencies: what the fit evaluates many times."""

    cut: Cut
    cluster: ClusterConfig
    stages: tuple[StageWork, ...]
    message: float  # seconds of one message between neighbouring ranks
    reduce: float  # seconds of the reduction of gradients, once a step (ZeRO-3: for each micro-batch)
    gather: float  # … of the gathering of parameters
    optimizer: float  # seconds of memory traffic of the update


def step_work(cut: Cut, cluster: ClusterConfig) -> StepWork:
    """The work of every stage and of the step."""
    strategy = cut.strategy
    rates = Rates(strategy, cluster)
    kinds = {kind for spec in cut.stages for kind in cut.kinds(spec)}
    by_kind = {kind: block_parts(cut.model, rates, *kind) for kind in kinds}
    head = head_passes(cut.model, rates)
    stages: list[StageWork] = []
    equal: dict[tuple[tuple[tuple[bool, bool], ...], bool], StageWork] = {}
    for spec in cut.stages:
        key = (tuple(sorted(cut.kinds(spec))), spec.head)
        if key in equal:
            stages.append(equal[key])
            continue
        parts: dict[str, Passes] = {}
        for kind in cut.kinds(spec):
            for name, passes in by_kind[kind].items():
                parts[name] = parts[name] + passes if name in parts else passes
        if spec.head:
            parts["head and loss"] = head * (1 + len(spec.mtp))
        equal[key] = StageWork(parts)
        stages.append(equal[key])
    cut_along = strategy.layout.tp if strategy.sequence_parallel else 1
    volume = 2.0 * strategy.tokens * cut.model.dim / cut_along
    message = hardware.message_seconds(cluster, volume, strategy.layout.stage_size) if strategy.layout.pp > 1 else 0.0
    reduce, gather, optimizer = _once_a_step(cut, cluster)
    return StepWork(cut, cluster, tuple(stages), message, reduce, gather, optimizer)


def step_time(work: StepWork, efficiency: Efficiency) -> StepTime:
    """The time of a step with these efficiencies."""
    strategy = work.cut.strategy
    costs = [stage_cost(work, stage, efficiency) for stage in range(len(work.stages))]
    name, pp = strategy.schedule, strategy.layout.pp
    makespan = _makespan(name, pp, strategy.micro_batches, strategy.virtual_stages, costs)
    busiest = max(range(pp), key=lambda rank: _busy(work, costs, rank))
    scale = rank_share(work)
    parts: dict[str, float] = {}
    hidden = 0.0
    communication = {"tensor parallel": 0.0, "context parallel": 0.0, "dispatch and combine": 0.0}
    for stage in work.cut.placement.stages_of_rank[busiest]:
        times = strategy.micro_batches * scale
        for part, passes in work.stages[stage].parts.items():
            whole = passes.forward + passes.dgrad + passes.wgrad
            seconds = whole.compute_seconds(efficiency)
            exposed = _exposed(whole, efficiency, strategy.overlap.tp, strategy.overlap.cp, strategy.overlap.ep)
            parts[part] = parts.get(part, 0.0) + (seconds + exposed) * times
            hidden += (whole.communication_seconds(efficiency) - exposed) * times
            communication["tensor parallel"] += whole.tp / efficiency.links * times
            communication["context parallel"] += whole.cp / efficiency.links * times
            communication["dispatch and combine"] += whole.ep / efficiency.links * times
    busy = _busy(work, costs, busiest) * strategy.micro_batches
    # overlapped pairs hide some, and products the launches of others; ZeRO-3 adds its exchange to every pass
    unlike, paired = busy - sum(parts.values()), has_pairs(name, pp)
    if abs(unlike) > 1e-9 * busy:
        hiding = "hidden by pairs" if paired else "launches beside products"
        parts[hiding if unlike < 0 else "ZeRO-3 exchange"] = unlike
        hidden -= min(0.0, unlike) if paired else 0.0
    parts["bubble"] = makespan - busy
    once = _exposed_once(work, efficiency, costs)
    parts |= once
    communication["gradients and parameters"] = (work.reduce + work.gather) / efficiency.links
    communication["pipeline"] = 2 * work.message / efficiency.links * strategy.micro_batches if pp > 1 else 0.0
    return StepTime(
        seconds=makespan + sum(once.values()),
        parts=parts,
        hidden=hidden + communication["gradients and parameters"] - once["data parallel"],
        communication=communication,
        bubble=(makespan - busy) / makespan,
    )


def steadiness(work: StepWork, efficiency: Efficiency) -> float:
    """Length of the schedule over the busy time of its busiest rank: 1 without a bubble."""
    strategy = work.cut.strategy
    costs = [stage_cost(work, stage, efficiency) for stage in range(len(work.stages))]
    makespan = _makespan(strategy.schedule, strategy.layout.pp, strategy.micro_batches, strategy.virtual_stages, costs)
    busy = max(_busy(work, costs, rank) for rank in range(strategy.layout.pp))
    return makespan / (busy * strategy.micro_batches)


def quick_seconds(work: StepWork, efficiency: Efficiency, steadiness: float) -> float:
    """The time of a step without simulating: the busiest rank's time, stretched by a known `steadiness`."""
    strategy = work.cut.strategy
    known: dict[int, Cost] = {}
    costs = []
    for stage, passes in enumerate(work.stages):
        if id(passes) not in known:
            known[id(passes)] = stage_cost(work, stage, efficiency)
        costs.append(known[id(passes)])
    busy = max(_busy(work, costs, rank) for rank in range(strategy.layout.pp))
    return busy * strategy.micro_batches * steadiness + sum(_exposed_once(work, efficiency, costs).values())


def stage_cost(work: StepWork, stage: int, efficiency: Efficiency) -> Cost:
    """A stage's passes as the simulator's costs: computation, and the communication that nothing hides."""
    strategy, total = work.cut.strategy, work.stages[stage].total
    cost = _cost(total, strategy.overlap, efficiency)
    forward, backward = cost.f, cost.b
    if strategy.zero >= 3:
        share = strategy.layout.pp / sum(len(stages) for stages in work.cut.placement.stages_of_rank)
        gather, reduce = work.gather / efficiency.links * share, work.reduce / efficiency.links * share
        forward += beside(gather / 2, strategy.overlap.dp * forward)
        backward += beside(gather / 2 + reduce, strategy.overlap.dp * backward)
    return Cost(f=forward, b=backward, w=cost.w, fb=cost.fb, communication=work.message / efficiency.links)


def block_cost(model: Architecture, rates: Rates, moe: bool, windowed: bool, efficiency: Efficiency) -> Cost:
    """The costs of one block by itself."""
    passes = sum(block_parts(model, rates, moe, windowed).values(), Passes(Work(), Work(), Work()))
    return _cost(passes, rates.strategy.overlap, efficiency)


def head_cost(model: Architecture, rates: Rates, efficiency: Efficiency) -> float:
    """Seconds of the head and the loss, forward and backward, of one micro-batch."""
    cost = _cost(head_passes(model, rates), rates.strategy.overlap, efficiency)
    return cost.f + cost.b


def _cost(passes: Passes, overlap: Overlap, efficiency: Efficiency) -> Cost:
    """Passes as costs, without pipeline messages and data-parallel communication."""
    forward, dgrad, wgrad = (
        work.compute_seconds(efficiency) + _exposed(work, efficiency, overlap.tp, overlap.cp, overlap.ep)
        for work in (passes.forward, passes.dgrad, passes.wgrad)
    )
    both = passes.forward + passes.dgrad + passes.wgrad
    computing = both.compute_seconds(efficiency) + both.tp / efficiency.links
    pair = computing + beside((both.ep + both.cp) / efficiency.links, computing)
    return Cost(f=forward, b=dgrad + wgrad, w=wgrad, fb=min(pair, forward + dgrad + wgrad))


def beside(communication: float, computation: float) -> float:
    """What a communication adds to the computation that it runs beside: little while it is shorter, all that it is
    longer; never quite nothing, since the two share memory and neither starts at once."""
    if communication <= 0.0:
        return 0.0
    return float((communication**HIDING + computation**HIDING) ** (1 / HIDING)) - computation


def _exposed(work: Work, efficiency: Efficiency, tp: float, cp: float, ep: float) -> float:
    """Communication of a pass that does not run beside its computation; context parallel's hides behind the core."""
    exposed_cp = beside(work.cp / efficiency.links, cp * work.attention / efficiency.attention)
    return (work.tp * (1 - tp) + work.ep * (1 - ep)) / efficiency.links + exposed_cp


def _makespan(name: str, pp: int, micro_batches: int, virtual: int, costs: list[Cost]) -> float:
    """Simulated time of the passes of a step; long schedules by extension."""
    step = {"dualpipe": 2, "interleaved_1f1b": pp}.get(name, 1)
    cap = (SIMULATED + (name in FOLDED)) * pp
    if micro_batches <= cap + step:
        return prepared(name, pp, micro_batches, virtual).makespan(costs)
    first = cap + (micro_batches - cap) % step
    short = prepared(name, pp, first, virtual).makespan(costs)
    longer = prepared(name, pp, first + step, virtual).makespan(costs)
    return short + (longer - short) / step * (micro_batches - first)


@lru_cache(maxsize=256)
def prepared(name: str, pp: int, micro_batches: int, virtual: int) -> Prepared:
    """A schedule ready for timing; a search asks for the same few again and again."""
    lists = schedules.schedule(name, pp, micro_batches, virtual)
    return prepare(lists, schedules.num_stages(name, pp, virtual))


@lru_cache(maxsize=256)
def has_pairs(name: str, pp: int) -> bool:
    """Whether a schedule overlaps forwards with backwards."""
    lists = schedules.schedule(name, pp, 4 * pp)
    return any(action.kind is Kind.FB for actions in lists for action in actions)


def rank_share(work: StepWork) -> float:
    """The part of the micro-batches that passes one stage on one rank: half where two ranks hold each stage."""
    held = sum(len(stages) for stages in work.cut.placement.stages_of_rank)
    return len(work.stages) / held


def _busy(work: StepWork, costs: list[Cost], rank: int) -> float:
    """Time of one micro-batch on a rank, over its stages; in pairs where the schedule has them."""
    strategy = work.cut.strategy
    paired = has_pairs(strategy.schedule, strategy.layout.pp)
    seconds = sum(
        costs[stage].fb if paired else costs[stage].f + costs[stage].b
        for stage in work.cut.placement.stages_of_rank[rank]
    )
    return seconds * rank_share(work)


def _once_a_step(cut: Cut, cluster: ClusterConfig) -> tuple[float, float, float]:
    """Seconds at the peaks of reducing gradients, gathering parameters, and updating; of the rank with most."""
    strategy = cut.strategy
    layout, precision = strategy.layout, strategy.precision
    if strategy.frozen and strategy.zero < 3:
        return 0.0, 0.0, 0.0
    dense_group = hardware.group(cluster, strategy.dense_replicas, layout.tp)
    expert_group = hardware.group(cluster, strategy.expert_replicas, layout.ep * strategy.etp)
    worst = (0.0, 0.0, 0.0)
    for pp in range(layout.pp):
        parts = cut.rank_parts(pp)
        dense = sum(held.dense for held in parts.values())
        experts = sum(held.expert for held in parts.values())
        seconds = []
        for width in (precision.gradient, 2.0):
            seconds.append(
                hardware.ring_seconds(cluster, dense_group, dense * width)
                + hardware.ring_seconds(cluster, expert_group, experts * width)
            )
        reduce, gather = seconds
        owned = dense / strategy.dense_replicas + experts / strategy.expert_replicas
        owned = owned if strategy.zero else dense + experts
        states = 2 * (precision.master + precision.moments) + precision.gradient + 2
        update = (owned * states + (dense + experts) * precision.gradient) / (cluster.memory_tb_s * 1e12)
        worst = max(worst, (reduce, gather * (2 if strategy.zero >= 3 else 1), update), key=sum)
    return worst


def _exposed_once(work: StepWork, efficiency: Efficiency, costs: list[Cost]) -> dict[str, float]:
    """Seconds of a step outside the passes: data-parallel communication that nothing hides, and the update."""
    strategy = work.cut.strategy
    update = work.optimizer / efficiency.memory
    if strategy.zero >= 3:
        return {"data parallel": 0.0, "optimizer": update}
    stages = work.cut.placement.stages_of_rank[0]
    forward, backward = sum(costs[s].f for s in stages), sum(costs[s].b for s in stages)
    hide = strategy.overlap.dp
    reduce = beside(work.reduce / efficiency.links, hide * backward)
    gather = beside(work.gather / efficiency.links, hide * forward)
    return {"data parallel": reduce + gather, "optimizer": update}
