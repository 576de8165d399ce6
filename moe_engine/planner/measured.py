"""Published measurements as questions to the planner: model, strategy, cluster, and the answer that was measured.

Nothing here knows a model or a publisher by name: what a table's columns leave out comes from two tables of the user's
(`conf/published/`), sizes by model and habits by source. A row that cannot be used says why.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_engine.config.errors import ConfigError
from moe_engine.layout import Layout
from moe_engine.planner.architecture import Architecture
from moe_engine.planner.efficiencies import Group
from moe_engine.planner.hardware import ClusterConfig
from moe_engine.planner.recipes import recipe_of, release_of
from moe_engine.planner.stages import balanced
from moe_engine.planner.strategy import RECOMPUTE, Overlap, Precision, Strategy

Row = Mapping[str, str]


@dataclass(frozen=True)
class Measurement:
    """One row that can be planned. seconds: of a step, measured; memory: bytes, 0 where not published; year: of the
    software; release: its year and month, where they are said.
    """

    id: str
    name: str
    stack: str
    model: Architecture
    strategy: Strategy
    cluster: ClusterConfig
    seconds: float
    memory: float
    year: int = 0
    release: str = ""

    @property
    def configuration(self) -> tuple[object, ...]:
        """Equal for rows that differ in the version of their software alone."""
        name, cluster = re.sub(r"[^a-z0-9.]", "", self.name.lower()), self.cluster
        return (name, self.stack, cluster.card, cluster.gpus, self.model, self.strategy)

    @property
    def group(self) -> Group:
        """Card, precision and software: measurements that share efficiencies."""
        return (self.cluster.card.split()[0], self.strategy.precision.compute, self.stack)


@dataclass(frozen=True)
class Feasibility:
    """A layout that fitted on a card, or did not."""

    id: str
    model: Architecture
    strategy: Strategy
    cluster: ClusterConfig
    fits: bool


@dataclass(frozen=True)
class Dropped:
    """A row that cannot be used, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class Tables:
    """What the user's tables say beyond the measurements: cards, models, sources, recipes of releases."""

    clusters: Mapping[str, ClusterConfig]
    models: Sequence[Row]
    sources: Sequence[Row]
    recipes: Sequence[Row] = ()


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; lines that begin with # are comments. Raises ConfigError naming a file that is none."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; name a CSV file with a line of column names")
    try:
        lines = [line for line in path.read_text("utf-8-sig").splitlines() if not line.startswith("#")]
        return list(csv.DictReader(lines))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: not readable as a table: {error}") from None


def read_measurements(rows: Sequence[Row], tables: Tables) -> tuple[list[Measurement], list[Dropped]]:
    """Every row as a measurement, or as dropped."""
    used: list[Measurement] = []
    dropped: list[Dropped] = []
    for row in rows:
        found = _read(row, tables)
        if isinstance(found, Measurement):
            used.append(found)
        else:
            dropped.append(found)
    return used, dropped


def _read(row: Row, tables: Tables) -> Measurement | Dropped:
    source = _match(row["source"], [s for s in tables.sources if s["note"] in row["note"]], start=False)
    if source is None:
        return Dropped(row["id"], "unknown source")
    known = _match(re.sub(r"[^a-z0-9]", "", row["model"].lower()), tables.models, start=True) or {}
    if known.get("unsupported"):
        return Dropped(row["id"], known["unsupported"])
    card = card_of(row["gpu"], tables.clusters)
    if card is None:
        return Dropped(row["id"], f"unknown card {row['gpu']}")
    if not (row["gpus"] and row["tp"] and row["pp"]):
        return Dropped(row["id"], "layout not stated")
    if "ZB-2p" in row["schedule"]:
        return Dropped(row["id"], "a schedule that does not exist here")
    model = architecture_of(row, known)
    if isinstance(model, str):
        return Dropped(row["id"], model)
    source = {**source, **recipe_of(row, card.card, _compute(row["precision"]), tables.recipes)}
    strategy = _strategy(row, source, model)
    if isinstance(strategy, str):
        return Dropped(row["id"], strategy)
    cluster = replace(card, gpus=int(row["gpus"]))
    seconds = _seconds(row, source, model, strategy, cluster)
    if seconds is None:
        return Dropped(row["id"], "no time, throughput or FLOPS published")
    binary = "GiB" in row["note"] or source["memory"] == "GiB"
    memory = float(row["memory_gb"] or 0) * (2**30 if binary else 1e9)
    return Measurement(
        id=row["id"],
        name=row["model"],
        stack=source["stack"],
        model=model,
        strategy=strategy,
        cluster=cluster,
        seconds=seconds,
        memory=memory,
        year=int(source["year"]),
        release=release_of(row),
    )


def read_feasibility(rows: Sequence[Row], cluster: ClusterConfig) -> list[Feasibility]:
    """Layouts of dense models that fitted, or ran out of memory. Embedding and head are one table where the stated
    number of parameters says so."""
    found = []
    for row in rows:
        model = architecture_of(row, {"gated": "1"})
        if isinstance(model, str):
            continue
        stated = float(row["params_total_B"] or 0)
        tied = bool(stated) and stated * 1e9 < model.parameters() - 0.5 * model.vocabulary_size
        micro_batch, dp = int(row["micro_batch"]), int(row["dp"])
        strategy = Strategy(
            layout=Layout(pp=int(row["pp"]), dp=dp, tp=int(row["tp"])),
            micro_batch=micro_batch,
            micro_batches=max(1, int(row["global_batch_sequences"]) // (dp * micro_batch)),
            seq_len=int(row["seq_len"]),
            zero=int(row["zero_or_fsdp"][-1]),
            precision=Precision(gradient=6.0 if "fp32 grad accumulation" in row["precision"] else 4.0),
        )
        found.append(Feasibility(row["id"], replace(model, tied_head=tied), strategy, cluster, row["fits"] == "1"))
    return found


def _match(name: str, rows: Sequence[Row], start: bool) -> Row | None:
    found = [row for row in rows if (name.startswith(row["match"]) if start else row["match"] in name)]
    return max(found, key=lambda row: len(row["match"] + row.get("note", "")), default=None)


def card_of(text: str, clusters: Mapping[str, ClusterConfig]) -> ClusterConfig | None:
    """The cluster whose card is named in a text; longer names first, `Ampere` is an A100."""
    words = re.sub(r"[^a-z0-9]", "", text.lower()).replace("nvidiaampere", "a100")
    found = [c for c in clusters.values() if re.sub(r"[^a-z0-9]", "", c.card.lower()) in words]
    return max(found, key=lambda cluster: len(cluster.card), default=None)


def architecture_of(row: Row, known: Row) -> Architecture | str:
    """The sizes, from the row first; or which one is missing."""

    def size(column: str, other: int | None = None, source: str | None = None) -> int | None:
        text = row.get(source or column, "") or known.get(column, "")
        return int(text) if text else other

    hidden, layers, heads = size("hidden"), size("layers"), size("heads")
    if hidden is None or layers is None or heads is None:
        return "sizes of the model not stated"
    kv_lora = size("kv_lora", 0) or 0
    head_dim = size("head_dim", hidden // heads) or 0
    rope = size("rope_dim", 0) or 0
    experts = size("experts", 0) or 0
    return Architecture(
        vocab_size=size("vocab", 51200) or 0,
        dim=hidden,
        num_layers=layers,
        dense_layers=frozenset(range(min(layers, size("dense_layers", 0) or 0) if experts else layers)),
        dense_hidden=size("ffn_hidden", 4 * hidden) or 0,
        num_heads=heads,
        num_kv_heads=size("kv_heads", heads) or 0,
        qk_head_dim=(size("nope_dim", 0) or 0) + rope if kv_lora else head_dim,
        v_head_dim=(size("v_dim", 0) or 0) if kv_lora else head_dim,
        q_lora_rank=size("q_lora", 0) or 0,
        kv_lora_rank=kv_lora,
        qk_rope_head_dim=rope,
        qk_norm=bool(size("qk_norm", 0)),
        gated=bool(size("gated", 1)),
        biases=bool(size("biases", 0)),
        learned_positions=size("positions", 0) or 0,
        num_experts=experts,
        top_k=size("topk", 0) or 0,
        expert_hidden=size("moe_ffn_hidden", 0) or 0,
        shared_hidden=size("shared_hidden", 0) or 0,
        num_groups=size("groups", 1) or 1,
        top_groups=size("top_groups", 1) or 1,
        mtp_depth=size("mtp", 0) or 0,
        tied_head=bool(size("tied", 0)),
        expert_biases=bool(size("expert_biases", 0)),
        window=size("window", 0) or 0,
        window_every=size("window_every", 1) or 1,
    )


def _strategy(row: Row, source: Row, model: Architecture) -> Strategy | str:
    """The strategy, or why there is none."""
    gpus, tp, pp, cp = int(row["gpus"]), int(row["tp"]), int(row["pp"]), int(row["cp"] or 1)
    if gpus % (tp * pp * cp):
        return "tp x pp x cp does not divide the cards"
    dp = gpus // (tp * pp * cp)
    if model.num_experts and not row["ep"] and not row["zero_or_fsdp"].startswith("FSDP"):
        return "expert parallelism not stated"
    ep = int(row["ep"] or 1) if model.num_experts else 1
    if row["etp"]:
        etp = int(row["etp"])
    else:
        etp = tp if source["etp"] == "tp" and ep * tp <= dp * cp * tp and model.num_experts else 1
    ep = min(ep, max(1, dp * cp * tp // etp))
    seq_len = int(row["seq_len"] or 4096)
    micro_batch = int(float(row["micro_batch"] or 1))
    stated = re.search(r"(\d+) microbatches|local batch (\d+)", row["note"])
    if row["global_batch_sequences"]:
        micro_batches = max(1, round(float(row["global_batch_sequences"]) / (dp * micro_batch)))
        if float(row["global_batch_sequences"]) < dp * micro_batch:
            micro_batch = max(1, round(float(row["global_batch_sequences"]) / dp))
    elif stated:
        micro_batches = int(stated[1] or stated[2])
    elif pp > 1:
        return "batch not stated"
    else:
        micro_batches = 1
    schedule, virtual = _schedule(row, source["virtual"], model, pp, micro_batches)
    zero, shard = _zero(row, source)
    try:
        return Strategy(
            layout=Layout(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep),
            etp=etp,
            schedule=schedule,
            virtual_stages=virtual,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            seq_len=seq_len,
            stage_layers=_stage_layers(source["balanced"], model, pp * virtual, seq_len),
            zero=zero,
            shard=shard,
            recompute=_recompute(row["recompute"] or source["recompute"]),
            precision=_precision(row["precision"], source),
            sequence_parallel=source["sequence_parallel"] == "1" and "no sequence parallel" not in row["recompute"],
            flash=source["flash"] == "1",
            dropout=source["dropout"] == "1",
            dispatch=source["dispatch"],
            graphs=source.get("graphs", ""),
            capacity_factor=1.0 if "tokendrop" in row["model"] else 0.0,
            fused_biases=source.get("fused_biases", "0") == "1",
            frozen="LoRA" in row["note"],
            overlap=Overlap(
                tp=float(source["tp_hidden"]),
                ep=0.8
                if "overlap" in row["note"] and not re.search("no (EP )?overlap|overlap off", row["note"])
                else float(source["ep_hidden"]),
            ),
        )
    except ConfigError as error:
        return str(error)


def _schedule(row: Row, usual: str, model: Architecture, pp: int, micro_batches: int) -> tuple[str, int]:
    """Name and virtual stages; `usual`: a publisher's where a row says nothing, `layer` for one layer each."""
    name, virtual = row["schedule"], int(row["vpp"] or 1)
    if usual == "layer" and not row["vpp"] and model.num_layers % pp == 0:
        virtual = model.num_layers // pp
    if pp == 1:
        return "1f1b", 1
    if name.startswith("DualPipe"):
        return "dualpipe", 1
    if name == "ZB-1p":
        return "zb_h1", 1
    if name == "1F1B-I" and not row["vpp"]:
        virtual = max(1, (model.num_layers + 2) // pp)
    if virtual > 1 and micro_batches % pp == 0 and pp * virtual <= model.num_layers + 2:
        return "interleaved_1f1b", min(virtual, -(-model.num_layers // pp))
    return "1f1b", 1


def _stage_layers(how: str, model: Architecture, stages: int, seq_len: int) -> tuple[int, ...]:
    """Layers of each stage as a publisher cuts models: `1` by time, `ends`: the first and last hold one less, beside
    embedding and head; else as even as possible."""
    if how == "1" and stages > 1:
        return balanced(model, stages, seq_len)
    if how == "ends" and stages > 2 and (model.num_layers + 2) % stages == 0:
        each = (model.num_layers + 2) // stages
        return (each - 1, *[each] * (stages - 2), each - 1)
    return ()


def _zero(row: Row, source: Row) -> tuple[int, int]:
    """ZeRO stage and the ranks that a state is spread over (0: all)."""
    text = row["zero_or_fsdp"]
    numbers = re.findall(r"(?:FSDP2?|shard) (\d+)", text)
    shard = int(numbers[0]) * int(row["cp"] or 1) if numbers else 0
    if text.startswith("ZeRO-"):
        return int(text[5]), 0
    if "SHARD_GRAD_OP" in text:
        return 2, 0
    if text.startswith("FSDP"):
        return 3, shard
    return int(source["zero"]), 0


def _compute(text: str) -> str:
    """The format of products in a publisher's words."""
    words = text.lower()
    return "fp4" if "fp4" in words else "fp8" if "fp8" in words or "float8" in words else "bf16"


def _precision(text: str, source: Row) -> Precision:
    """The format of products, and the bytes of each kind of number where a source's are not the usual ones."""
    usual = Precision(compute=_compute(text))
    gradient, moments = (source.get(name) or getattr(usual, name) for name in ("gradient", "moments"))
    return replace(usual, gradient=float(gradient), moments=float(moments))


def _recompute(text: str) -> frozenset[str]:
    """The parts named in a publisher's words."""
    words = text.lower().replace("layernorm", "norm").replace("rmsnorm", "norm").replace("swiglu", "moe_act")
    words = words.replace("mla up-proj", "mla_up_proj").replace("core attention", "core_attn")
    if words.startswith("full"):
        return frozenset({"full"})
    found = frozenset(part for part in RECOMPUTE if re.search(rf"\b{part}\b", words))
    if "selective" in words and not found:
        return frozenset({"norm", "moe_act", "core_attn"})
    return found


def _seconds(row: Row, source: Row, model: Architecture, strategy: Strategy, cluster: ClusterConfig) -> float | None:
    """Measured seconds of a step of the strategy's batch: from time, tokens, or FLOPS in the publisher's counting."""
    tokens = strategy.global_batch * strategy.seq_len
    if row["iter_time_s"]:
        return float(row["iter_time_s"]) * _batch_ratio(row, strategy)
    if row["tokens_per_s_per_gpu"]:
        return tokens / (float(row["tokens_per_s_per_gpu"]) * cluster.gpus)
    causal = source["flops"] == "causal"
    forward = model.forward_flops(strategy.seq_len, causal)
    head = 2.0 * model.vocabulary_size * strategy.seq_len
    flops = 3 * forward + (forward - head if source["recomputed"] == "1" and "full" in strategy.recompute else 0)
    if row["tflops_per_gpu"]:
        rate = float(row["tflops_per_gpu"]) * 1e12
    elif row["mfu_pct"]:
        rate = float(row["mfu_pct"]) / 100 * cluster.peak("fp8" if "MFU vs FP8 peak" in row["note"] else "bf16")
    else:
        return None
    return strategy.global_batch * flops / (rate * cluster.gpus)


def _batch_ratio(row: Row, strategy: Strategy) -> float:
    """The planned batch over the published one, where the latter is not whole micro-batches."""
    published = float(row["global_batch_sequences"] or 0)
    ratio = strategy.global_batch / published if published else 1.0
    return ratio if math.isfinite(ratio) else 1.0
