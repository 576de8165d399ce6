"""What one rank of this engine sends in a step, counted from the configuration: which exchanges, how often, how many
bytes. The same as the engine's own log (`distributed.collectives.CollectiveLog`) says of a step, summed by purpose.

Bytes are what the rank puts in (of a receive: what comes). Only ways of training that the engine has: ZeRO-1, no
tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.layout import aligned
from moe_engine.planner.engine_kept import heads_over_ranks
from moe_engine.planner.routing import RowCounts, row_counts
from moe_engine.planner.stages import Cut
from moe_engine.planner.strategy import coded_row_bytes
from moe_engine.planner.travel import Travel, travel, travels
from moe_engine.schedule import schedules
from moe_engine.schedule.action import Action, Kind
from moe_engine.schedule.check import Lists, rank_of_work


@dataclass(frozen=True)
class Parameter:
    """A parameter as the engine holds it. `expert`: one slice for each of a rank's experts, `numel` those of one."""

    numel: int
    decays: bool
    expert: bool = False


def parameters_of(cut: Cut, part: str) -> list[Parameter]:
    """The parameters of a part of the model (`layers.3`, `mtp.0`, `embedding`, `norm`, `head`)."""
    model, kind = cut.model, part.partition(".")[0]
    if kind in ("embedding", "head"):
        return [Parameter(model.vocabulary_size, True)]
    if kind == "norm":
        return [Parameter(model.dim, False)]
    norms = [model.dim, model.dim]
    if model.kv_lora_rank:
        matrices = [matrix.size for matrix in model.attention()]
        norms += [model.kv_lora_rank] + [model.q_lora_rank] * bool(model.q_lora_rank)
    else:
        keys = model.num_kv_heads * model.qk_head_dim
        matrices = [model.dim * model.num_heads * model.qk_head_dim, model.dim * keys, model.dim * keys]
        matrices.append(model.dim * model.num_heads * model.v_head_dim)
        norms += [*model.qk_norms, *model.attention_vectors]
    found: list[Parameter] = []
    if cut.is_moe(part):
        if model.shared_hidden:
            matrices += [matrix.size for matrix in model.mlp(model.shared_hidden)]
        found.append(Parameter(model.dim * model.num_experts, False))
        found += [Parameter(model.dim, False)] * model.shared_gate
        found += [Parameter(model.num_experts, False)] * model.expert_biases
        found += [Parameter(size, False, expert=True) for size in model.expert_vectors]
        found += [Parameter(matrix.size, True, expert=True) for matrix in model.mlp(model.expert_hidden)]
    else:
        matrices += [matrix.size for matrix in model.mlp(model.dense_hidden)]
    if kind == "mtp":
        matrices.append(2 * model.dim * model.dim)
        norms += [model.dim] * 3
    return found + [Parameter(size, True) for size in matrices] + [Parameter(size, False) for size in norms]


@dataclass(frozen=True)
class Bucket:
    """Parameters that are reduced and sharded together: elements of one shard, and how many ranks have one."""

    shard: int
    sharers: int
    expert: bool


def buckets(cut: Cut, pp: int) -> list[Bucket]:
    """The optimizer's buckets on a pipeline rank."""
    strategy = cut.strategy
    used: dict[tuple[bool, tuple[int, ...], bool], int] = {}
    for part in cut.rank_parts(pp):
        holders = cut.placement.holders(part)
        for each in parameters_of(cut, part):
            numel = each.numel * (cut.model.num_experts // strategy.layout.ep if each.expert else 1)
            key = (each.expert, holders, each.decays)
            used[key] = used.get(key, 0) + aligned(numel)
    found = []
    for (expert, holders, _), elements in sorted(used.items()):
        sharers = len(holders) * (strategy.expert_replicas if expert else strategy.dense_replicas)
        found.append(Bucket(aligned(-(-elements // sharers)), sharers, expert))
    return found


def step_bytes(cut: Cut, pp: int, load: float = 1.0) -> dict[str, int]:
    """Bytes of a step of the busiest rank of its group on pipeline rank `pp`, by purpose; purposes without any are
    left out."""
    strategy = cut.strategy
    lists = schedules.schedule(strategy.schedule, strategy.layout.pp, strategy.micro_batches, strategy.virtual_stages)
    found = _messages(cut, pp, lists)
    tokens = int(strategy.tokens)
    if strategy.layout.ep > 1:
        exact = strategy.dispatch == "expert"
        if travels(strategy):
            exchanges = _travelling(cut, travel(cut.model, strategy, tokens, load))
        else:
            rows = row_counts(cut.model, tokens, strategy.layout.ep, load, exact).in_windows(strategy.windows)
            exchanges = _exchanges(cut, rows, exact)
        blocks = sum(cut.blocks(cut.stages[stage]).count(True) for stage in _forwards(lists[pp]))
        found |= {name: size * blocks for name, size in exchanges.items()}
    if strategy.layout.cp > 1:
        stages = _forwards(lists[pp])
        found |= {
            name: size * sum(len(cut.blocks(cut.stages[stage])) for stage in stages)
            for name, size in _shared_sequences(cut).items()
        }
        moe = sum(cut.blocks(cut.stages[stage]).count(True) for stage in stages)
        found["sequence counts"] = 8 * strategy.micro_batch * cut.model.num_experts * moe  # for the balance loss
    held = buckets(cut, pp)
    found["gradients"] = sum(b.shard * b.sharers for b in held if b.sharers > 1) * int(strategy.precision.gradient)
    found["parameters"] = sum(b.shard for b in held if b.sharers > 1) * int(strategy.precision.parameter)
    found |= _figures(cut, pp)
    return {name: size for name, size in found.items() if size}


def _forwards(actions: list[Action]) -> list[int]:
    """The stage of each forward of a rank."""
    return [half.stage for action in actions for half in action.halves() if half.kind is Kind.F]


def _messages(cut: Cut, pp: int, lists: Lists) -> dict[str, int]:
    """Activations and their gradients, sent and received."""
    rank_of, last = rank_of_work(lists), len(cut.stages) - 1
    size = int(cut.strategy.tokens) * cut.model.dim * int(cut.strategy.precision.parameter)
    onward = backward = 0
    for (stage, micro_batch), rank in rank_of.items():
        if rank == pp:
            onward += stage < last and rank_of[stage + 1, micro_batch] != pp
            backward += stage > 0 and rank_of[stage - 1, micro_batch] != pp
    both = onward + backward  # an activation one way, its gradient the other
    return {"messages sent": both * size, "messages received": both * size}


def _exchanges(cut: Cut, rows: RowCounts, exact: bool) -> dict[str, int]:
    """Dispatch and combine of one MoE block and micro-batch, forward and backward."""
    model, strategy = cut.model, cut.strategy
    slots = 1 if exact else min(model.top_k, model.num_experts // rows.ep)
    row, weight, to_experts = _row_bytes(cut)
    # Rows, and in how many rounds; kernels put those for all ranks, and choices, in words of 4 bytes, to each.
    counts = 2 * 8 * rows.ep if strategy.windows is None else 2 * 4 * rows.ep**2
    return {
        "dispatch counts": counts,
        "dispatch": rows.sent * (to_experts + slots * (4 + weight)),
        "dispatch backward": rows.received * (row + slots * weight),
        "combine": rows.received * row,
        "combine backward": rows.sent * to_experts,
    }


def _row_bytes(cut: Cut) -> tuple[int, int, int]:
    """Bytes of a row, of a weight, and of a row to its experts (or the gradient of one that came back)."""
    dim, number = cut.model.dim, int(cut.strategy.precision.parameter)
    return dim * number, max(4, number), coded_row_bytes(dim) if cut.strategy.wire_fp8 else dim * number


def _travelling(cut: Cut, found: Travel) -> dict[str, int]:
    """The same in two hops, in rounds, or limited: further rounds go again in backward, before their gradients."""
    (row, weight, to_experts), ep = _row_bytes(cut), cut.strategy.layout.ep
    slot, total = 4 + weight, dict.fromkeys(("dispatch", "dispatch backward", "combine", "combine backward"), 0)
    for number, leg in enumerate(found.legs):
        times, hops = 1 + (number > 0), found.nodes > 0
        between = found.node_slots if hops else found.slots
        there = leg.sent * (to_experts + between * slot) + leg.onward * (to_experts + found.slots * slot)
        total["dispatch"] += times * there
        total["combine"] += times * (leg.received + leg.passing) * row
        total["dispatch backward"] += leg.received * (row + found.slots * weight)
        total["dispatch backward"] += leg.passing * (row + found.node_slots * weight)
        total["combine backward"] += (leg.sent + leg.onward) * to_experts
    return {"dispatch counts": len(found.legs) * 8 * (3 if found.nodes else 2) * ep, **total}


def _shared_sequences(cut: Cut) -> dict[str, int]:
    """The exchanges of one attention and micro-batch over ranks that share sequences, forward and backward; what each
    is: `model.context_parallel`."""
    model, strategy = cut.model, cut.strategy
    cp, tokens, size = strategy.layout.cp, int(strategy.tokens), int(strategy.precision.parameter)
    latent, wide = strategy.payload == "latent", max(4, size)
    key_value = model.qk_head_dim + model.v_head_dim
    numbers = model.kv_lora_rank + model.qk_rope_head_dim if latent else model.num_kv_heads * key_value
    own = tokens * numbers
    by_heads = strategy.exchange == "ulysses"
    found: dict[str, int] = {}
    if by_heads:
        heads = model.num_heads * model.qk_head_dim + (0 if latent else heads_over_ranks(model, cp) * key_value)
        result = model.num_heads * model.v_head_dim
        for name, each in (("heads", heads), ("tokens", result)):
            found |= {f"attention {name}{way}": tokens * each * size for way in ("", " backward")}
    if strategy.exchange == "ring":
        found |= {"attention ring": 2 * (cp - 1) * own * size, "attention ring backward": cp * own * wide}
    elif latent or not by_heads:
        found |= {"attention gather": 2 * own * size, "attention gather backward": cp * own * wide}
    return found


def _figures(cut: Cut, pp: int) -> dict[str, int]:
    """What a step says over ranks besides: counts, norm, losses, loads of experts."""
    model, strategy = cut.model, cut.strategy
    layout, depths = strategy.layout, 1 + model.mtp_depth
    found = {"valid items": 8 * (2 + depths)} if strategy.dense_replicas > 1 else {}
    layers = {part: cut.placement.holders(part) for part in cut.rank_parts(pp) if _has_experts(cut, part)}
    summed = [part for part, holders in layers.items() if len(holders) * strategy.dense_replicas > 1]
    found["expert counts"] = 8 * len(summed) * model.num_experts
    if strategy.capacity_factor:
        found["dropped choices"] = 16
    if layout.world > 1:
        moe_layers = model.num_moe_layers + model.mtp_depth if model.num_experts else 0
        names = sum(
            model.num_experts if each.expert else 1 for part in _all_parts(cut) for each in parameters_of(cut, part)
        )
        found["gradient norm"] = (8 + 16) * names
        found["losses"] = 2 * 8 * depths + 2 * 8
        found["expert loads"] = 8 * moe_layers * model.num_experts
    return found


def _has_experts(cut: Cut, part: str) -> bool:
    return part.partition(".")[0] in ("layers", "mtp") and cut.is_moe(part)


def _all_parts(cut: Cut) -> set[str]:
    parts: set[str] = set()
    for stage in range(len(cut.stages)):
        parts |= set(cut.parts[stage])
    return parts
