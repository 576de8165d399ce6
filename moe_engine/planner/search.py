"""Finds the fastest layouts that fit, exactly in the planner's own terms: best first, with a bound.

Every combination of axes, schedule, micro-batch and recompute gets a lower bound on its step: the mean work of a rank,
no bubble, nothing once a step. In the order of the bounds, each is planned in full (memory, simulated schedule); the
search stops when the next bound is above the slowest of the layouts already kept. So nothing better is missed, and the
result depends on nothing but the question.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import TrainConfig
from moe_engine.layout import Layout
from moe_engine.planner.answer import Answer, answer, room
from moe_engine.planner.architecture import Architecture
from moe_engine.planner.hardware import Efficiency
from moe_engine.planner.memory import least_states, rank_memory
from moe_engine.planner.request import Request
from moe_engine.planner.stages import cut
from moe_engine.planner.strategy import Strategy, recompute_section
from moe_engine.planner.timing import block_cost, head_cost
from moe_engine.planner.work import Rates

KEPT = 10
MOST_DOUBLINGS = 12  # of a cluster, where nothing fits and one is looked for that has room
MOST_PLANNED = 1500  # in full; more than any question needed so far
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipe", "dualpipev")
PAIRED = ("dualpipe", "dualpipev")
CHUNKS = (2, 4)  # stages of a rank tried for interleaved_1f1b
MICRO_BATCHES = (1, 2, 4)
RECOMPUTES: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"norm", "moe_act", "mla_up_proj"}),
    frozenset({"full"}),
)


@dataclass(frozen=True)
class Found:
    """A layout that fits, fully planned."""

    answer: Answer

    @property
    def seconds(self) -> float:
        return self.answer.time.seconds

    @property
    def key(self) -> tuple[object, ...]:
        """What makes a layout another one: axes, sharding and schedule; not the micro-batch or the recompute."""
        strategy = self.answer.request.strategy
        return (strategy.layout, strategy.zero, strategy.schedule, strategy.virtual_stages)


@dataclass(frozen=True)
class Result:
    """The best layouts, fastest first, and how much was looked at."""

    best: list[Found]
    candidates: int
    planned: int
    too_large: int


def search(request: Request, efficiency: Efficiency, of_engine: bool = False) -> Result:
    """The fastest layouts for the request's model, batch and cluster; its own layout is only a candidate among others.

    Kept as they are: batch, sequence length, precision, ZeRO stage (3 is tried too where it is not asked for), etp.
    of_engine: without tensor parallelism and ZeRO-3, which the engine does not have. Raises ConfigError when nothing
    fits.
    """
    candidates: Iterable[tuple[float, Strategy]] = _candidates(request, efficiency)
    if of_engine:
        candidates = (pair for pair in candidates if pair[1].layout.tp == 1 and pair[1].zero < 3)
    bounded = sorted(candidates, key=lambda pair: (pair[0], _order(pair[1])))
    if not bounded:
        batch, gpus = request.strategy.global_batch, request.cluster.gpus
        raise ConfigError(
            f"train.global_batch={batch}: no layout of {gpus} cards shares it out in whole sequences; "
            f"use train.global_batch={math.ceil(batch / gpus) * gpus}, or another cluster.gpus"
        )
    kept: dict[tuple[object, ...], Found] = {}
    states: dict[tuple[object, ...], float] = {}
    planned = too_large = 0
    for bound, strategy in bounded:
        slowest = sorted(found.seconds for found in kept.values())[KEPT - 1] if len(kept) >= KEPT else None
        if (slowest is not None and bound > slowest) or planned >= MOST_PLANNED:
            break
        asked = replace(request, strategy=strategy)
        try:
            held = cut(request.model, strategy)
            key = (strategy.layout, strategy.zero, strategy.schedule, strategy.virtual_stages)
            if key not in states:
                states[key] = least_states(held)
            if states[key] > room(request.cluster):
                too_large += 1
                continue
            fullest = max(rank.total for rank in rank_memory(held, request.keeping, request.load))
        except ConfigError:  # a schedule that cannot run at this size
            continue
        planned += 1
        if fullest > room(request.cluster):
            too_large += 1
            continue
        found = Found(answer(asked, efficiency))
        if found.key not in kept or found.seconds < kept[found.key].seconds:
            kept[found.key] = found
    if not kept:
        raise ConfigError(
            f"cluster.gpus={request.cluster.gpus}: no layout of {len(bounded)} fits on {request.cluster.card} with "
            f"{room(request.cluster) / 1e9:g} GB for tensors; {_what_fits(request)}"
        )
    best = sorted(kept.values(), key=lambda found: (found.seconds, _order(found.answer.request.strategy)))[:KEPT]
    return Result(best, len(bounded), planned, too_large)


def _what_fits(request: Request) -> str:
    """The smallest cluster, by doubling, that has a layout with room for the model; what the best needs where none has.

    The smallest need: micro-batches of one sequence, everything computed again, plain 1F1B.
    """
    batch, least = request.strategy.global_batch, math.inf
    for doublings in range(MOST_DOUBLINGS + 1):
        gpus = request.cluster.gpus * 2**doublings
        sequences = math.ceil(batch / gpus) * gpus
        asked = replace(
            request,
            cluster=replace(request.cluster, gpus=gpus),
            strategy=replace(request.strategy, layout=Layout(), micro_batch=1, micro_batches=sequences),
        )
        least = min(least, _least_bytes(asked))
        if least <= room(request.cluster):
            also = f" with train.global_batch={sequences}" if sequences != batch else ""
            return f"use cluster.gpus={gpus}{also}, or a card with more memory"
    return (
        f"the least that a card needs, on up to {request.cluster.gpus * 2**MOST_DOUBLINGS} of them, is "
        f"{least / 1e9:.3g} GB; use a card with more memory (cluster.memory_gb), or a smaller model"
    )


def _least_bytes(request: Request) -> float:
    """Bytes of the fullest rank in the layout that needs least, with everything computed again."""
    least = math.inf
    for layout, zero in _layouts(request):
        micro_batches = request.strategy.global_batch // layout.dp
        small = replace(
            request.strategy,
            layout=layout,
            zero=zero,
            micro_batches=micro_batches,
            recompute=frozenset({"full"}),
            stage_layers=(),
        )
        held = cut(request.model, small)
        if least_states(held) < least:
            least = min(least, max(rank.total for rank in rank_memory(held, request.keeping, request.load)))
    return least


def why(found: Found, first: Found) -> str:
    """What a layout loses to the first, by the parts of the step that differ most."""
    if found is first:
        return "the fastest"
    ours, theirs = found.answer.time.parts, first.answer.time.parts
    differences = {name: ours.get(name, 0.0) - theirs.get(name, 0.0) for name in {*ours, *theirs}}
    total = found.seconds - first.seconds
    worst = sorted(differences.items(), key=lambda item: (-item[1], item[0]))[:2]
    spoken = {"hidden by pairs": "hides less in pairs,", "launches beside products": "hides fewer launches,"}
    unit, scale = ("s", 1.0) if first.seconds >= 1 else ("ms", 1000.0)
    words = ", ".join(
        f"{spoken.get(name, name)} {seconds * scale:+.2f} {unit}" for name, seconds in worst if seconds * scale > 0.005
    )
    return f"{total / first.seconds:+.1%}: {words or 'many small parts'}"


def tensor_parallel_across_nodes(result: Result, efficiency: Efficiency) -> str | None:
    """With numbers, why tensor parallelism stays inside a node: a good layout's step with tp over one and two nodes."""
    request = result.best[0].answer.request
    best = next((found for found in result.best if found.answer.request.strategy.zero < 3), result.best[0])
    cluster = request.cluster
    answers = [_with_tp(best, nodes * cluster.gpus_per_node, efficiency) for nodes in (1, 2)]
    if any(found is None for found in answers):
        return None
    numbers = [
        f"tp {found.request.strategy.layout.tp}: step {found.time.seconds:.2f} s, of which tensor parallel "
        f"communication {found.time.communication['tensor parallel']:.2f} s"
        for found in answers
        if found is not None
    ]
    rates = f"{cluster.link_gb_s:g} GB/s inside, {cluster.network_gb_s:g} outside"
    return f"why tp stays inside a node ({rates}), on the best layout without ZeRO-3: {'; '.join(numbers)}"


def override(found: Found) -> str:
    """The layout as YAML that `moe-engine train` takes."""
    strategy = found.answer.request.strategy
    layout, recompute = strategy.layout, recompute_section(strategy.recompute)
    lines = ["parallel:"]
    lines += [f"  {axis}: {getattr(layout, axis)}" for axis in ("pp", "dp", "cp", "ep", "tp")]
    lines += [f"  zero: {strategy.zero}", "pipeline:", f"  schedule: {strategy.schedule}"]
    lines += [f"  virtual_stages: {strategy.virtual_stages}", "recompute:", f"  mode: {recompute.mode}"]
    lines += [f"  names: [{', '.join(recompute.names)}]"] if recompute.mode == "selective" else []
    lines += ["train:", f"  global_batch: {strategy.global_batch}", f"  micro_batch: {strategy.micro_batch}"]
    lines += [f"  seq_len: {strategy.seq_len}"]
    usual = TrainConfig().eval_sequences
    if usual % layout.dp:  # as many on each replica
        lines += [f"  eval_sequences: {max(1, usual // layout.dp) * layout.dp}"]
    return "\n".join([*lines, ""])


def _with_tp(found: Found, tp: int, efficiency: Efficiency) -> Answer | None:
    """The answer for the same layout with another tp; dp makes up for it, and the batch stays."""
    request = found.answer.request
    strategy, gpus = request.strategy, request.cluster.gpus
    dp = gpus // (tp * strategy.layout.pp * strategy.layout.cp)
    if not dp or strategy.global_batch % (dp * strategy.micro_batch) or request.model.num_heads % tp:
        return None
    layout = replace(strategy.layout, tp=tp, dp=dp)
    micro_batches = strategy.global_batch // (dp * strategy.micro_batch)
    try:
        return answer(
            replace(request, strategy=replace(strategy, layout=layout, micro_batches=micro_batches)), efficiency
        )
    except ConfigError:
        return None


def _order(strategy: Strategy) -> tuple[object, ...]:
    """A fixed order among equals: fewer ranks on an axis first."""
    layout = strategy.layout
    return (layout.tp, layout.cp, layout.pp, layout.ep, strategy.zero, strategy.schedule, strategy.virtual_stages,
            strategy.micro_batch, sorted(strategy.recompute))  # fmt: skip


def _candidates(request: Request, efficiency: Efficiency) -> Iterator[tuple[float, Strategy]]:
    """Every strategy that could run, with its bound."""
    for layout, zero in _layouts(request):
        for micro_batch in MICRO_BATCHES:
            batch = request.strategy.global_batch
            if batch % (layout.dp * micro_batch):
                continue
            micro_batches = batch // (layout.dp * micro_batch)
            for recompute in RECOMPUTES:
                base = replace(
                    request.strategy,
                    layout=layout,
                    zero=zero,
                    micro_batch=micro_batch,
                    micro_batches=micro_batches,
                    recompute=recompute,
                    stage_layers=(),
                    schedule="1f1b",
                    virtual_stages=1,
                )
                plain, paired = _bounds(request, base, efficiency)
                for schedule, virtual in _schedules(request, layout, micro_batches):
                    bound = paired if schedule in PAIRED else plain
                    bound *= 1 + _least_bubble(schedule, layout.pp, virtual) / micro_batches
                    yield bound, replace(base, schedule=schedule, virtual_stages=virtual)


def _layouts(request: Request) -> Iterator[tuple[Layout, int]]:
    """Axes of powers of two (and of the layers' divisors for pp) that fill the cluster."""
    model, cluster = request.model, request.cluster
    for tp in _powers(min(cluster.gpus_per_node, 8, model.num_heads)):
        for cp in _powers(max(1, request.strategy.seq_len // 8192)):
            for pp in _powers(min(64, model.num_layers)):
                others = tp * cp * pp
                if cluster.gpus % others or request.strategy.global_batch % (cluster.gpus // others):
                    continue
                dp = cluster.gpus // others
                for ep in _powers(model.num_experts) if model.num_experts else [1]:
                    if dp * cp * tp % (ep * request.strategy.etp) or model.num_experts % ep:
                        continue
                    layout = Layout(pp, dp, cp, tp, ep)
                    yield layout, request.strategy.zero
                    if pp == 1 and dp * cp > 1 and request.strategy.zero < 3:
                        yield layout, 3


def _schedules(request: Request, layout: Layout, micro_batches: int) -> Iterator[tuple[str, int]]:
    if layout.pp == 1:
        yield "1f1b", 1
        return
    blocks = request.model.num_layers + (request.model.mtp_depth > 0)
    for name in SCHEDULES:
        if name == "interleaved_1f1b":
            for chunks in CHUNKS:
                if layout.pp * chunks <= blocks and micro_batches % layout.pp == 0:
                    yield name, chunks
        elif name in ("zbv", "dualpipev"):
            if 2 * layout.pp <= blocks and micro_batches >= 2 * layout.pp:
                yield name, 1
        elif name == "dualpipe":
            if layout.pp % 2 == 0 and micro_batches % 2 == 0 and micro_batches >= 2 * layout.pp:
                yield name, 1
        else:
            yield name, 1


def _bounds(request: Request, strategy: Strategy, efficiency: Efficiency) -> tuple[float, float]:
    """Least seconds of the passes of a step, without and with overlapped pairs: the mean work of a rank."""
    model = request.model
    rates = Rates(strategy, request.cluster)
    plain = paired = 0.0
    for kind, count in _kinds(model).items():
        cost = block_cost(model, rates, *kind, efficiency)
        plain, paired = plain + count * (cost.f + cost.b), paired + count * cost.fb
    head = head_cost(model, rates, efficiency)
    plain, paired = plain + (1 + model.mtp_depth) * head, paired + (1 + model.mtp_depth) * head
    times = strategy.micro_batches / strategy.layout.pp
    # launches hide more in a whole stage than block by block: the bound must stay below
    return 0.95 * plain * times, 0.95 * paired * times


@lru_cache
def _kinds(model: Architecture) -> Counter[tuple[bool, bool]]:
    """How many blocks there are of each kind: with experts or not, with a window or without."""
    whole = cut(model, Strategy())
    return Counter(kind for spec in whole.stages for kind in whole.kinds(spec))


def _least_bubble(schedule: str, pp: int, virtual: int) -> float:
    """Idle time of a rank in micro-batches, below what any stage times give: four fifths of the formulas for a backward
    of twice the forward."""
    ideal = {
        "1f1b": pp - 1.0,
        "interleaved_1f1b": (pp - 1.0) / virtual,
        "zb_h1": (pp - 1.0) / 3,
        "dualpipe": (pp / 2 - 1.0) * 2 / 3,
        "dualpipev": (pp - 1.0) / 3,
    }
    return 0.8 * max(0.0, ideal.get(schedule, 0.0))


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]
