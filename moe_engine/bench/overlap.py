"""What the overlapped pair hides of the exchanges between two hosts joined by a slow wire.

Two ranks in two network namespaces (`namespaces`) share the experts; a token bucket limits the wire. Each rank runs
steps of `overlapped_1f1b` at pp=1, with the phases of a pair in several orders, in turns; see `schedule.pair`. A step
here is all forwards and backwards; the optimizer, whose exchanges nothing hides yet, is left out.

Two kinds of computation:
timed   phases sleep, in the proportions of DeepSeek's published trace; messages are real (`timed_blocks`)
real    a small decoder; the two ranks and the network's threads share this machine's cores

How much is hidden: 1 - (time in which a rank stood still for exchanges) / (what the same exchanges take when one waits
for each, as measured in the same run); see `overlap_times` for what is counted.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_engine.bench import machine, record
from moe_engine.bench.namespaces import require
from moe_engine.bench.overlap_picture import draw
from moe_engine.bench.overlap_rank import ORDERS, Job
from moe_engine.bench.overlap_times import ExchangeTimes, exchange_times, total
from moe_engine.bench.timed_blocks import PhaseTimes
from moe_engine.bench.wire import run_over_wire
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import to_yaml

CASE = re.compile(r"(timed|real)([1-9]\d*)")
KINDS = ("combine(B)", "dispatch(F)", "dispatch(B)", "combine(F)")
# Milliseconds of the compute phases of one layer of DeepSeek-V3, 4096 tokens on H800 (github.com/deepseek-ai/
# profile-data); its exchanges take 3.41 to 6.37 ms.
TRACE_MS = PhaseTimes(attn_f=4.37, mlp_f=4.60, mlp_b=5.31, mlp_w=3.54, attn_b=9.34, attn_w=2.39)
FIGURES = {
    "compute_s": ".2f",
    "exchanges_s": ".2f",
    "still_s": ".2f",
    "hidden_in_pairs": ".1%",
    "hidden_of_step": ".1%",
}

# What ranks found, see `overlap_rank.run`: by rank and order of phases the steps, with seconds and events.
Ranks = Sequence[Mapping[str, Sequence[Mapping[str, Any]]]]


@dataclass
class OverlapSection:
    """Section `bench`."""

    # What computes, and the wire's rate in 10^6 bits a second.
    cases: list[str] = field(default_factory=lambda: ["timed400", "timed300", "timed200", "real400", "real200"])
    micro_batches: int = 16
    blocks: int = 2
    tokens: int = 1024  # of a micro-batch on one rank
    dim: int = 128  # a message to the other host is up to tokens x dim numbers
    expert_hidden: int = 384  # of the real model
    precision: str = "fp32"  # of the real model and its messages: fp32 | bf16
    stretch: float = 7.0  # timed: how many times longer than in the published trace each phase is
    rounds: int = 2  # timed steps of each order
    burst_kb: int = 64  # KiB that the wire lets through at once after a pause


@dataclass
class OverlapBenchConfig:
    """Options of `moe-engine bench overlap`."""

    bench: OverlapSection = field(default_factory=OverlapSection)
    out: str = "bench/overlap"


SCHEMA = OverlapBenchConfig


def help_text() -> str:
    return """usage: moe-engine bench overlap [section.option=value …]

Measure how much of the exchanges between two hosts the overlapped pair hides: two network namespaces joined by a wire
of limited rate, a rank in each, forward and backward in several orders. Needs Linux, root and iproute2.

options:
  bench.cases=[timed300,real200]   timedN: phases that sleep, with real messages; realN: a small decoder; over a wire of
                                N Mbit/s each way
  bench.micro_batches=16 bench.blocks=2 bench.tokens=1024 bench.dim=128 bench.expert_hidden=384 bench.precision=fp32
  bench.stretch=7               timed: phases this many times longer than in DeepSeek's trace
  bench.rounds=2                timed steps of each order
  out=bench/overlap             the folder of results; out= writes none

examples:
  moe-engine bench overlap
  moe-engine bench overlap bench.cases=[real200] out=bench/real"""


def run(config: OverlapBenchConfig) -> int:
    """Returns 0. Raises ConfigError for options that cannot be, and RuntimeError when a rank fails."""
    _check(config)
    results: list[record.Result] = []
    reports: list[str] = []
    events: dict[str, Any] = {}
    for case in config.bench.cases:
        compute, rate = _parse(case)
        job = asdict(_job(config.bench, compute))
        ranks = run_over_wire("moe_engine.bench.overlap_rank", job, rate, config.bench.burst_kb)
        found = [_result(config.bench, case, compute, name, ranks) for name in ORDERS]
        title = f"{compute} computation, {rate:g} Mbit/s"
        kinds = _kinds(config.bench, ranks, _slots(config.bench, compute))
        text = f"## {title}\n\n{record.table(found, FIGURES)}\n\n{kinds}"
        print(text + "\n", flush=True)
        results += found
        reports.append(text)
        events[case] = title, {name: ranks[0][name][0]["events"] for name in ("one_after_the_other", "overlapped")}
    if config.out:
        folder = Path(config.out)
        record.write(folder, results, machine.describe([1]), to_yaml(config), "\n\n".join(["# Overlap", *reports, ""]))
        for case, (title, by_order) in events.items():
            draw(by_order, folder / f"{case}.svg", title)
        print(f"results in {config.out}")
    return 0


def _check(config: OverlapBenchConfig) -> None:
    problems = []
    for name in ("micro_batches", "blocks", "tokens", "dim", "expert_hidden", "rounds", "burst_kb"):
        value, least = getattr(config.bench, name), 2 if name == "micro_batches" else 1
        if value < least:
            problems.append(f"bench.{name}={value}: must be {least} or more, for example bench.{name}={max(least, 16)}")
    problems += [
        f"bench.cases=[{case}]: a case is timedN or realN, N the wire's Mbit/s, for example bench.cases=[timed300]"
        for case in config.bench.cases
        if not CASE.fullmatch(case)
    ]
    if not config.bench.cases:
        problems.append("bench.cases=[]: nothing to measure; use bench.cases=[timed300]")
    if config.bench.precision not in ("fp32", "bf16"):
        problems.append(f"bench.precision={config.bench.precision}: no such choice; there are fp32 and bf16")
    if config.bench.tokens % 4:
        problems.append(f"bench.tokens={config.bench.tokens}: must be a multiple of 4; use bench.tokens=1024")
    if config.bench.stretch <= 0:
        problems.append(f"bench.stretch={config.bench.stretch:g}: must be larger than 0, for example bench.stretch=8")
    if config.out and Path(config.out).is_file():
        problems.append(f"out={config.out}: is a file; name a folder, for example out=bench/overlap")
    if problems:
        raise ConfigError("\n".join(problems))
    require()


def _parse(case: str) -> tuple[str, float]:
    match = CASE.fullmatch(case)
    assert match is not None
    return match[1], float(match[2])


def _times(bench: OverlapSection) -> PhaseTimes:
    return PhaseTimes(**{name: ms * bench.stretch / 1e3 for name, ms in asdict(TRACE_MS).items()})


def _job(bench: OverlapSection, compute: str) -> Job:
    times = asdict(_times(bench)) if compute == "timed" else None
    return Job(
        bench.micro_batches, bench.blocks, bench.tokens, bench.dim, bench.expert_hidden, bench.precision, bench.rounds,
        times,
    )  # fmt: skip


def _exchanges(bench: OverlapSection, order: str, ranks: Ranks) -> list[ExchangeTimes]:
    """Of each rank and step."""
    return [
        exchange_times(own["events"], peer["events"], bench.micro_batches, bench.blocks)
        for a, b in zip(*(rank[order] for rank in ranks), strict=True)
        for own, peer in ((a, b), (b, a))
    ]


def _result(bench: OverlapSection, case: str, compute: str, order: str, ranks: Ranks) -> record.Result:
    """Seconds are those of the slower rank, exchanges the mean of both."""
    samples = [max(step["seconds"] for step in both) for both in zip(*(rank[order] for rank in ranks), strict=True)]
    alone = _exchanges(bench, "one_after_the_other", ranks)
    flight, outside = total(alone, "flight"), statistics.mean(each.flight_outside for each in alone)
    figures: dict[str, Any] = {"exchanges_s": flight + outside}
    if compute == "timed":
        figures["compute_s"] = _times(bench).total * bench.blocks * bench.micro_batches
    if order != "plain":  # which is one graph: it tells nothing of its phases
        times = _exchanges(bench, order, ranks)
        still, still_outside = total(times, "still"), statistics.mean(each.still_outside for each in times)
        figures |= {
            "still_s": still + still_outside,
            "late_s": statistics.mean(each.late for each in times),
            "hidden_in_pairs": 1 - still / flight,
            "hidden_of_step": 1 - (still + still_outside) / (flight + outside),
        }
    verdict = record.Verdict(True, "the losses of all orders have the same bits")
    return record.Result("overlap", case, order, case, samples, verdict, figures, asdict(bench))


def _slots(bench: OverlapSection, compute: str) -> dict[str, float]:
    """Seconds of computation that each exchange may hide behind; known where it sleeps."""
    if compute != "timed":
        return {}
    t = _times(bench)
    slots = (t.attn_f, t.mlp_b, t.mlp_w + t.mlp_f, t.attn_b + t.attn_w)
    return dict(zip(KINDS, slots, strict=True))


def _kinds(bench: OverlapSection, ranks: Ranks, slots: Mapping[str, float]) -> str:
    """Markdown: each kind of exchange in pairs: by itself, its slot, and what each order hides of it."""
    orders = [name for name in ORDERS if name not in ("plain", "one_after_the_other")]
    alone = _exchanges(bench, "one_after_the_other", ranks)
    by_order = {name: _exchanges(bench, name, ranks) for name in orders}
    lines = ["| exchange | alone ms | slot ms | " + " | ".join(f"{name} hides" for name in orders) + " |"]
    lines.append("| --- " * (3 + len(orders)) + "|")
    for kind in KINDS:
        seconds = statistics.mean(each for times in alone for each in times.flight[kind])
        row = [kind, f"{seconds * 1e3:.1f}", f"{slots[kind] * 1e3:.1f}" if slots else ""]
        for name in orders:
            still = statistics.mean(each for times in by_order[name] for each in times.still[kind])
            row.append(f"{1 - still / seconds:.1%}")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)
