"""The planner's answer: memory of every rank, time of a step, what it costs, and what to be warned of."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_engine.planner.hardware import ClusterConfig, Efficiency
from moe_engine.planner.memory import RankMemory, rank_memory
from moe_engine.planner.request import Request
from moe_engine.planner.routing import distinct_ranks
from moe_engine.planner.stages import Cut, cut
from moe_engine.planner.strategy import Strategy
from moe_engine.planner.timing import StepTime, step_time, step_work

SECONDS_OF_A_DAY = 86400.0


@dataclass(frozen=True)
class Answer:
    """Everything about one layout. mfu: model FLOPs over the bf16 peak by convention: attention counted for the half
    below the diagonal, or in full; MTP modules included, or left out as DeepSeek publishes them."""

    request: Request
    cut: Cut
    memory: list[RankMemory]
    time: StepTime
    efficiency: Efficiency
    mfu: dict[str, float]
    warnings: list[str]

    @property
    def tokens_per_step(self) -> int:
        return self.request.strategy.global_batch * self.request.strategy.seq_len

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_step / self.time.seconds / self.request.cluster.gpus

    @property
    def peak_bytes(self) -> float:
        """Of the fullest rank."""
        return max(rank.total for rank in self.memory)

    def days(self, tokens: float) -> float:
        """Days to train on so many tokens."""
        return tokens / self.tokens_per_step * self.time.seconds / SECONDS_OF_A_DAY

    def gpu_hours(self, tokens: float) -> float:
        return self.days(tokens) * 24 * self.request.cluster.gpus


def room(cluster: ClusterConfig) -> float:
    """Bytes that tensors may take on one card."""
    return (cluster.memory_gb - cluster.runtime_gb) * 1e9


def answer(request: Request, efficiency: Efficiency) -> Answer:
    """Plan one layout."""
    held = cut(request.model, request.strategy)
    memory = rank_memory(held, request.keeping, request.load)
    time = step_time(step_work(held, request.cluster), efficiency)
    return Answer(request, held, memory, time, efficiency, _mfu(request, time), _warnings(request, held, memory, time))


def _mfu(request: Request, time: StepTime) -> dict[str, float]:
    strategy, cluster = request.strategy, request.cluster
    peak = cluster.peak("bf16") * cluster.gpus * time.seconds
    found = {}
    for mtp in (True, False)[: 1 + (request.model.mtp_depth > 0)]:
        model = request.model if mtp else replace(request.model, mtp_depth=0)
        for words, causal in (("causal attention", True), ("full attention", False)):
            flops = 3 * model.forward_flops(strategy.seq_len, causal) * strategy.global_batch
            found[words if mtp else f"{words}, MTP not counted"] = flops / peak
    return found


def _warnings(request: Request, held: Cut, memory: list[RankMemory], time: StepTime) -> list[str]:
    strategy, cluster, model = request.strategy, request.cluster, request.model
    layout = strategy.layout
    found = []
    fullest = max(memory, key=lambda rank: rank.total)
    if fullest.total > room(cluster):
        found.append(
            f"does not fit: pipeline rank {fullest.pp} needs {fullest.total / 1e9:.1f} GB, "
            f"{cluster.card} has room for {room(cluster) / 1e9:.1f} GB"
        )
    elif fullest.total > 0.95 * room(cluster):
        found.append(f"tight: pipeline rank {fullest.pp} leaves {(room(cluster) - fullest.total) / 1e9:.1f} GB free")
    if layout.tp > cluster.gpus_per_node:
        found.append(f"tensor parallel across nodes: tp {layout.tp} on nodes of {cluster.gpus_per_node} cards")
    if layout.tp > model.num_kv_heads and not model.kv_lora_rank:
        found.append(f"tp {layout.tp} exceeds the {model.num_kv_heads} heads of keys and values: they are copied")
    if layout.pp > 1 and strategy.micro_batches < 4 * layout.pp and time.bubble > 0.1:
        found.append(
            f"batch too small for the pipeline: micro-batches {strategy.micro_batches}, pipeline ranks {layout.pp}, "
            f"bubble {time.bubble:.0%}"
        )
    found += _expert_warnings(strategy, cluster, held)
    exposed = time.communication["dispatch and combine"] - time.hidden
    if model.num_experts and exposed > 0.25 * time.seconds:
        found.append(f"dispatch and combine take {exposed / time.seconds:.0%} of the step in the open")
    return found


def _expert_warnings(strategy: Strategy, cluster: ClusterConfig, held: Cut) -> list[str]:
    model, layout = held.model, strategy.layout
    if not model.num_experts:
        return ["expert parallel has nothing to spread: the model is dense"] if layout.ep > 1 else []
    found = []
    nodes = layout.ep * strategy.etp / cluster.gpus_per_node
    if nodes > 1 and distinct_ranks(model, round(nodes)) > 4.5:
        found.append(f"a token reaches {distinct_ranks(model, round(nodes)):.1f} of {nodes:.0f} nodes on the average")
    rows = strategy.tokens / layout.tp * model.top_k / (model.num_experts / layout.ep)
    if rows < 128:
        found.append(f"small expert batches: {rows:.0f} rows for each expert of a micro-batch")
    return found
