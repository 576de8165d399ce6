"""Efficiencies of the user's own machine, from its records of `moe-engine bench`.

An efficiency is seconds at the peaks, as the planner counts them, over seconds measured for the same work: so what the
plan says of a piece of work that was measured is what was measured, whatever peaks the cluster is given. Rates depend
on sizes; each is read at the sizes of the job that is planned, between the measured sizes by the logarithm, and beyond
them as at the nearest.

| efficiency | taken from |
|---|---|
| matmul | `bench kernels` with shapes of one group; else the machine's largest product |
| grouped | `bench kernels`: forward, dgrad and wgrad of more groups than one; else `bench layer`: whole layers |
| attention | `bench attention`: forward and backward of this engine's |
| memory | the machine's copy |
| links | `bench comm`: dispatch and combine of rows in bf16, by one exchange |
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from moe_engine.config.errors import ConfigError
from moe_engine.layout import Layout
from moe_engine.planner import hardware
from moe_engine.planner.architecture import Architecture, Matrix
from moe_engine.planner.hardware import ClusterConfig, Efficiency
from moe_engine.planner.records import Record, Row, read_records, unreadable
from moe_engine.planner.strategy import Strategy
from moe_engine.planner.work import ATTENTION_BACKWARD, CODED_PRODUCT, Rates, core_loss, crossings, experts_work

NUMBERS = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}  # names in machine.json
WIDE = {4.0: "fp32", 8.0: "fp64"}  # by bytes of a parameter
PRODUCTS = ("fprop", "dgrad", "wgrad")
OWN_KERNELS, OWN_ENGINE, OWN_EXCHANGE = "moe_kernels", "moe_engine", "all-to-all_bf16"
CUBES = "products in {}, by the edge of an equal cube"
MEMORY_BOUND = 0.5  # a product that spends more of its time on memory says nothing of the matrix rate


class Timed(NamedTuple):
    """A measured piece of work: its size, seconds at the peaks, seconds measured."""

    size: float
    ideal: float
    taken: float


class Share(NamedTuple):
    """An efficiency, and where it comes from."""

    value: float
    words: str


@dataclass(frozen=True)
class Question:
    """The job whose sizes count, the peaks that shares are of, and what memory reaches of its own."""

    model: Architecture
    strategy: Strategy
    cluster: ClusterConfig
    memory: float

    @property
    def products(self) -> str:
        """The format of matrix products as benchmarks call it."""
        precision = self.strategy.precision
        return WIDE.get(precision.parameter, "bf16") if precision.compute == "bf16" else precision.compute

    @property
    def numbers(self) -> str:
        """… of everything else."""
        return self.products if self.products in NUMBERS else "bf16"


def efficiency_of_machine(
    path: Path, model: Architecture, strategy: Strategy, cluster: ClusterConfig, usual: Efficiency, usual_words: str
) -> tuple[Efficiency, str]:
    """Efficiencies from the records at `path` for a job, and in words which come from where; the others are `usual`.

    Raises ConfigError naming a file that is no record, or records in which there is nothing for this job.
    """
    records = read_records(path)
    found: dict[str, Share] = {}
    question = Question(model, strategy, cluster, usual.memory)
    for name, looks in _LOOKS.items():
        share = next(filter(None, (_looked_up(path, records, question, look) for look in looks)), None)
        if share:
            found[name] = share
            question = replace(question, memory=share.value) if name == "memory" else question
    if not found:
        raise _nothing_for(path, records, question.products)
    left = [name for name in vars(usual) if name not in found]
    words = [f"{name} {share.value:.3g} from {share.words}" for name, share in found.items()]
    words += [f"{', '.join(left)}: {usual_words}"] if left else []
    return replace(usual, **{name: share.value for name, share in found.items()}), "\n  ".join(["", *words])


def _nothing_for(path: Path, records: Sequence[Record], products: str) -> ConfigError:
    rows = [row for record in records for row in record.rows]
    listed = ", ".join(sorted({row.benchmark for row in rows})) or "none of them right"
    return ConfigError(
        f"plan.efficiencies={path}: {len(rows)} results ({listed}), and nothing in them for products in {products}; "
        "use a folder with records of `moe-engine bench kernels`, `layer`, `attention` or `comm`, each with its "
        "machine.json"
    )


Look = Callable[[Record, Question], Share | None]


def _looked_up(path: Path, records: Sequence[Record], question: Question, look: Look) -> Share | None:
    """Of the first record that says something."""
    for record in records:
        try:
            share = look(record, question)
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            raise unreadable(path, record.folder, "lacks what this version's benchmarks write") from None
        if share:
            return share
    return None


def _memory(record: Record, question: Question) -> Share | None:
    """The copy, read and written counted."""
    own = record.machine.get("kernel_ceilings", {}) if record.gpu and _on_gpu(record) else {}
    rates = record.machine.get("ceilings", {}).get("copy_bytes", {})
    rate = own.get("copy") or (rates[_fewest(rates)] if rates else 0.0)
    if not rate:
        return None
    value = rate / (question.cluster.memory_tb_s * 1e12)
    return Share(value, f"{record.folder}: a copy at {rate / 1e9:.3g} GB/s")


def _matmul(record: Record, question: Question) -> Share | None:
    """Products of one group, by size."""
    curve = _curve(_products(record, question, dense=True))
    return _read(curve, list(_dense_sizes(question)), f"{record.folder}: {CUBES.format(question.products)}")


def _largest_product(record: Record, question: Question) -> Share | None:
    """The machine's own product, for any size."""
    products = question.products
    if record.gpu:
        rate = record.machine.get("kernel_ceilings", {}).get(products, 0.0) if _on_gpu(record) else 0.0
    else:
        rates = record.machine.get("ceilings", {}).get("matrix_flops", {})
        rate = rates[_fewest(rates)].get(NUMBERS.get(products, ""), 0.0) if rates else 0.0
    if not rate:
        return None
    value = rate / question.cluster.peak(question.strategy.precision.compute)
    return Share(value, f"{record.folder}: one product in {products} at {rate / 1e12:.3g} TFLOPS, taken for all sizes")


def _grouped(record: Record, question: Question) -> Share | None:
    curve = _curve(_products(record, question, dense=False))
    if not curve or not question.model.num_experts:
        return None
    return _read(curve, list(_expert_sizes(question)), f"{record.folder}: experts' {CUBES.format(question.products)}")


def _layers(record: Record, question: Question) -> Share | None:
    """Experts of whole layers, forward and backward, less what a plan counts for memory traffic and permutation."""
    rows = [row for row in record.rows if (row.benchmark, row.candidate) == ("layer", OWN_ENGINE)]
    rows = [row for row in rows if row.config["phase"] == "both" and row.config["dtype"] == question.products]
    if not rows or not question.model.num_experts:
        return None
    threads, timed = min(row.config["threads"] for row in rows), []
    for row in rows:
        sizes = {name: int(row.config[name]) for name in ("tokens", "dim", "hidden", "experts", "top_k")}
        model = replace(
            question.model, dim=sizes["dim"], expert_hidden=sizes["hidden"], num_experts=sizes["experts"],
            top_k=sizes["top_k"], gated=True,
        )  # fmt: skip
        alone = replace(question.strategy, layout=Layout(), etp=1, micro_batch=1, seq_len=sizes["tokens"])
        products, routed, _ = experts_work(model, Rates(alone, question.cluster))
        traffic = (3 * products.memory + 2 * routed.memory) / question.memory
        if row.config["threads"] == threads and traffic < MEMORY_BOUND * row.seconds:
            pairs = sizes["tokens"] * sizes["top_k"] / sizes["experts"] * model.expert_size / 2
            timed.append(Timed(pairs ** (1 / 3), 3 * products.grouped, row.seconds - traffic))
    words = f"{record.folder}: layers in {question.products} on {threads} threads, by the edge of an equal cube"
    return _read(_curve(timed), list(_expert_sizes(question)), words)


def _attention(record: Record, question: Question) -> Share | None:
    """Forward and backward together: the planner's own ratio of the two stays."""
    if record.gpu:
        return None  # this benchmark measures a CPU's
    phases: dict[tuple[str, int, int], dict[str, Row]] = defaultdict(dict)
    rows = [row for row in record.rows if (row.benchmark, row.candidate) == ("attention", OWN_ENGINE)]
    rows = [row for row in rows if row.config["dtype"] == question.numbers]
    threads = min((row.config["threads"] for row in rows), default=0)
    for row in rows:
        if row.config["threads"] == threads:
            shape = row.config["heads"], row.config["rows"], row.config["length"]
            phases[shape][row.case.split()[0]] = row
    timed = []
    for (heads, sequences, length), found in phases.items():
        if {"forward", "backward"} <= found.keys():
            number, _, keys, values = map(int, heads.split("x"))
            flops = sequences * length**2 * number * (keys + values)
            passes = 1.0 + 2.5 * ATTENTION_BACKWARD
            loss = core_loss(question.cluster, keys + values, length)
            ideal = flops * loss * passes / question.cluster.peak("bf16")
            timed.append(Timed(length, ideal, found["forward"].seconds + found["backward"].seconds))
    strategy = question.strategy
    sizes = [(strategy.seq_len / strategy.layout.cp, 1.0)]
    return _read(_curve(timed), sizes, f"{record.folder}: {question.numbers} on {threads} threads, by tokens")


def _links(record: Record, question: Question) -> Share | None:
    """Between ranks of one machine. Rows that stay on their rank count in the record and travel nowhere."""
    timed = []
    for row in record.rows:
        if (row.benchmark, row.candidate) != ("comm", OWN_EXCHANGE) or "skewed" in row.case:
            continue
        ranks = int(row.config["ranks"])
        volume = row.figures["mib"] * 2**20 * (ranks - 1) / ranks
        ideal = hardware.all_to_all_seconds(question.cluster, hardware.Group(ranks, ranks, 1), volume, 0.0)
        timed.append(Timed(volume, ideal, row.seconds))
    curve, strategy = _curve(timed), question.strategy
    if not curve:
        return None
    width = strategy.tokens / strategy.layout.tp * question.model.dim * 2.0
    ep = hardware.group(question.cluster, strategy.layout.ep, strategy.etp)
    sent = width * sum(crossings(question.model, strategy.dispatch, ep)) if strategy.layout.ep > 1 else 0.0
    return _read(curve, [(sent or curve[-1].size, 1.0)], f"{record.folder}: rows exchanged, by bytes of a rank")


# Memory first: products are told from their memory traffic by it.
_LOOKS: dict[str, tuple[Look, ...]] = {
    "memory": (_memory,),
    "matmul": (_matmul, _largest_product),
    "grouped": (_grouped, _layers),
    "attention": (_attention,),
    "links": (_links,),
}


def _products(record: Record, question: Question, dense: bool) -> Iterator[Timed]:
    """Products of one group, or of more; a product's size is the edge of a cube with as many operations."""
    best: dict[tuple[str, str], Row] = {}
    for row in record.rows:
        if row.benchmark != "kernels" or row.config["device"] != ("cuda" if record.gpu else "cpu"):
            continue
        kind, _, form = row.config["op"].partition("_")
        if kind not in PRODUCTS or form != question.products or (row.config["shape"].startswith("1x") != dense):
            continue
        # products that are not grouped are torch's own in bf16; all others are this engine's kernels
        if row.candidate.startswith(OWN_KERNELS) or (dense and form == "bf16"):
            key = row.config["op"], row.config["shape"]
            best[key] = min(best.get(key, row), row, key=lambda each: each.seconds)
    peak = question.cluster.peak(question.strategy.precision.compute)
    width = CODED_PRODUCT if question.products == "fp8" else 2.0
    for (_, shape), row in best.items():
        groups, rows, columns, depth = map(int, shape.split("x"))
        operands = groups * (rows * (columns + depth) + columns * depth)
        traffic = width * operands / (question.cluster.memory_tb_s * 1e12) / question.memory
        if traffic < MEMORY_BOUND * row.seconds:
            ideal = 2.0 * groups * rows * columns * depth / peak
            yield Timed((rows * columns * depth) ** (1 / 3), ideal, row.seconds - traffic)


def _dense_sizes(question: Question) -> Iterator[tuple[float, float]]:
    """Size and operations of every product of the model but the experts'."""
    model, strategy = question.model, question.strategy
    tp = strategy.layout.tp
    counts = (
        {True: model.num_moe_layers, False: model.num_dense_layers} if model.num_experts else {False: model.num_layers}
    )
    products = [(matrix, count) for moe, count in counts.items() if count for matrix in model.dense_matrices(moe)]
    products.append((Matrix("head", model.dim, model.vocab_size, True), 1))
    for matrix, count in products:
        rows = strategy.tokens / (1 if matrix.split or not strategy.sequence_parallel else tp)
        operations = rows * matrix.local(tp)
        yield operations ** (1 / 3), count * operations


def _expert_sizes(question: Question) -> Iterator[tuple[float, float]]:
    """Size and operations of a routed expert's two products, with evenly chosen experts."""
    model, strategy = question.model, question.strategy
    rows = strategy.tokens / strategy.layout.tp * model.top_k * strategy.etp / (model.num_experts / strategy.layout.ep)
    for matrix in model.mlp(model.expert_hidden):
        operations = rows * matrix.size / strategy.etp
        yield operations ** (1 / 3), operations


def _curve(timed: Iterable[Timed]) -> list[Timed]:
    """By size, with equal sizes as one."""
    by_size: dict[float, list[Timed]] = defaultdict(list)
    for each in timed:
        by_size[round(each.size, 3)].append(each)
    return [
        Timed(size, sum(each.ideal for each in found), sum(each.taken for each in found))
        for size, found in sorted(by_size.items())
    ]


def _read(curve: Sequence[Timed], sizes: Sequence[tuple[float, float]], words: str) -> Share | None:
    """The share with which all `sizes` (size, how much work) take together as long as by the curve, one by one."""
    if not curve:
        return None
    whole = sum(work for _, work in sizes)
    value = whole / sum(work / _at(curve, size) for size, work in sizes)
    small, large = min(size for size, _ in sizes), max(size for size, _ in sizes)
    read = f"{small:,.0f}" + (f" to {large:,.0f}" if large > small else "")
    measured = f"{curve[0].size:,.0f}" + (f" to {curve[-1].size:,.0f}" if len(curve) > 1 else "")
    return Share(value, f"{words}, measured at {measured}, read at {read}")


def _at(curve: Sequence[Timed], size: float) -> float:
    """The share at a size."""
    shares = [each.ideal / each.taken for each in curve]
    for (low, high), (first, second) in zip(pairwise(curve), pairwise(shares), strict=True):
        if size < high.size:
            part = max(0.0, math.log(size / low.size) / math.log(high.size / low.size))
            return first + part * (second - first)
    return shares[-1]


def _fewest(by_threads: Iterable[str]) -> str:
    """The fewest threads: a rank has one, unless it is asked for more."""
    return min(by_threads, key=int)


def _on_gpu(record: Record) -> bool:
    """Whether it was the GPU whose kernels were timed."""
    return any(row.benchmark == "kernels" and row.config["device"] == "cuda" for row in record.rows)
