"""A latent attention layer over sequences that ranks share: time, bytes, memory and what is hidden, of each exchange.

Every candidate, an exchange and a payload, is first held against the whole sequence on one rank. Then steps (forward
and backward of the layer) are timed in turns, each once more with every exchange waited for where it is started: what
that rank stood still for is what the exchanges take by themselves, and `hidden` is the share of it that the layer did
not wait for. Beside the measured winner stands the one of the planner's rule, for measured rates: of the link, by what
the exchanges take by themselves, of the layer's products, and of what else the layer computes.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_engine.bench import machine, record
from moe_engine.bench.cp_rank import DTYPES, Job, on_local_rank
from moe_engine.bench.namespaces import require
from moe_engine.bench.ranks import run_ranks
from moe_engine.bench.wire import run_over_wire
from moe_engine.config.context_rules import EXCHANGES, PAYLOADS
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import to_yaml
from moe_engine.planner.context import Cost, cost, faster_payload

LINK = re.compile(r"local|wire([1-9]\d*)")
BURST_KB = 64  # KiB that a wire lets through at once after a pause
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}  # of the difference from one rank, relative, in the Euclidean norm
FIGURES = {"sent_mib": ".2f", "formula_mib": ".2f", "exchanges_s": ".3f", "still_s": ".3f", "hidden": ".0%",
           "peak_mib": ".1f"}  # fmt: skip


@dataclass
class ContextSection:
    """Section `bench`. Sizes are the layer's, see section `model` of `moe-engine train`."""

    cp: int = 4  # local ranks
    # local: `cp` ranks on this machine, nothing limited | wireN: two hosts of a rank each, N million bits a second
    links: list[str] = field(default_factory=lambda: ["local", "wire1000", "wire200"])
    exchanges: list[str] = field(default_factory=lambda: list(EXCHANGES))
    payloads: list[str] = field(default_factory=lambda: list(PAYLOADS))
    seq_len: int = 2048
    dim: int = 256
    heads: int = 8
    kv_lora_rank: int = 64
    nope: int = 32
    rope: int = 16
    value: int = 32
    precision: str = "fp32"  # fp32 | bf16
    rounds: int = 4  # timed steps of each candidate


@dataclass
class ContextBenchConfig:
    """Options of `moe-engine bench cp`."""

    bench: ContextSection = field(default_factory=ContextSection)
    out: str = "bench/cp"


SCHEMA = ContextBenchConfig


def help_text() -> str:
    return """usage: moe-engine bench cp [section.option=value …]

Measure a latent attention layer over sequences that ranks share, by each exchange (ring, all_gather, ulysses) and
payload (kv, latent): time, bytes sent beside the planner's formula, the share of exchanges that computation hides, and
the peak of memory. Ranks are local, or one in each of two network namespaces that a wire of limited rate joins, which
needs Linux, root and iproute2.

options:
  bench.links=[local,wire200]       local ranks; wireN: a wire of N million bits a second
  bench.cp=4                    local ranks; a wire has two ends
  bench.exchanges=[ring] bench.payloads=[kv,latent]
  bench.seq_len=2048 bench.dim=256 bench.heads=8 bench.kv_lora_rank=64 bench.nope=32 bench.rope=16 bench.value=32
  bench.precision=fp32 bench.rounds=4
  out=bench/cp                  the folder of results; out= writes none

examples:
  moe-engine bench cp
  moe-engine bench cp bench.links=[local] bench.cp=2 bench.seq_len=8192"""


def run(config: ContextBenchConfig) -> int:
    """Returns 0, or 1 if a candidate computes something else than one rank does. Raises ConfigError, RuntimeError."""
    _check(config)
    results: list[record.Result] = []
    reports: list[str] = []
    for link in config.bench.links:
        rate = 0.0 if link == "local" else float(link.removeprefix("wire"))
        size = 2 if rate else config.bench.cp
        job = _job(config.bench)
        ranks = (
            run_over_wire("moe_engine.bench.cp_rank", asdict(job), rate, BURST_KB)
            if rate
            else run_ranks(size, 1, on_local_rank, size, asdict(job))
        )
        products = min(rank["products"]["flops_per_s"] for rank in ranks)
        found = [_result(config.bench, job, rate, size, way, ranks) for way in job.candidates]
        rule = _rule(config.bench, job, size, found, products)
        text = f"## {_case(rate, size)}\n\n{record.table(found, FIGURES)}\n\n{rule}"
        print(text + "\n", flush=True)
        results += found
        reports.append(text)
    if config.out:
        report = "\n\n".join(["# Attention over ranks", *reports, ""])
        record.write(Path(config.out), results, machine.describe([1]), to_yaml(config), report)
        print(f"results in {config.out}")
    return 0 if all(result.verdict.passed for result in results) else 1


def _check(config: ContextBenchConfig) -> None:
    bench, problems = config.bench, []
    for name in ("seq_len", "dim", "heads", "kv_lora_rank", "nope", "value", "rounds"):
        if getattr(bench, name) < 1:
            problems.append(f"bench.{name}={getattr(bench, name)}: must be 1 or more, for example bench.{name}=16")
    if bench.rope < 2 or bench.rope % 2:
        problems.append(f"bench.rope={bench.rope}: RoPE turns pairs, so it must be even; use bench.rope=16")
    if bench.cp < 2:
        problems.append(f"bench.cp={bench.cp}: sequences are shared by 2 ranks or more; use bench.cp=2")
    for name, given, known in (("exchanges", bench.exchanges, EXCHANGES), ("payloads", bench.payloads, PAYLOADS)):
        if not given or set(given) - set(known):
            problems.append(
                f"bench.{name}=[{','.join(given)}]: there are {', '.join(known)}; use bench.{name}=[{known[0]}]"
            )
        problems += record.named_twice(f"bench.{name}", given)
    if bench.precision not in DTYPES:
        problems.append(f"bench.precision={bench.precision}: no such choice; there are {' and '.join(DTYPES)}")
    if not bench.links or not all(LINK.fullmatch(link) for link in bench.links):
        shown = ",".join(bench.links)
        problems.append(f"bench.links=[{shown}]: local, or wireN, N the wire's Mbit/s; use bench.links=[local,wire200]")
    if not problems:
        problems = _fit(bench, math.lcm(*(bench.cp if link == "local" else 2 for link in bench.links)))
    if config.out and Path(config.out).is_file():
        problems.append(f"out={config.out}: is a file; name a folder, for example out=bench/cp")
    if problems:
        raise ConfigError("\n".join(problems))
    if set(bench.links) - {"local"}:
        require()


def _fit(bench: ContextSection, cp: int) -> list[str]:
    """What cannot be shared out over `cp` ranks, or over those of each link, of whose numbers it is a multiple."""
    problems = []
    if bench.seq_len % (2 * cp):
        problems.append(f"bench.seq_len={bench.seq_len}: must be a multiple of {2 * cp}; use bench.seq_len={512 * cp}")
    if "ulysses" in bench.exchanges and bench.heads % cp:
        problems.append(f"bench.heads={bench.heads}: ulysses needs a multiple of {cp}; use bench.heads={2 * cp}")
    return problems


def _job(bench: ContextSection) -> Job:
    candidates = [[exchange, payload] for exchange in bench.exchanges for payload in bench.payloads]
    return Job(
        candidates, bench.seq_len, bench.dim, bench.heads, bench.kv_lora_rank, bench.nope, bench.rope, bench.value,
        bench.precision, bench.rounds,
    )  # fmt: skip


def _case(rate: float, size: int) -> str:
    return f"two_hosts_{rate:g}_mbit" if rate else f"local_cp{size}"


def _formula(bench: ContextSection, job: Job, size: int, exchange: str, payload: str) -> Cost:
    numbers = DTYPES[bench.precision].itemsize
    return cost(job.model, exchange, payload, rows=1, seq_len=bench.seq_len, cp=size, size=numbers)


def _result(
    bench: ContextSection, job: Job, rate: float, size: int, way: Sequence[str], ranks: Sequence[Mapping[str, Any]]
) -> record.Result:
    """Seconds are those of the slowest rank; bytes, memory and errors of the rank with most; waits the ranks' mean."""
    own = [rank["_".join(way)] for rank in ranks]
    formula, difference = _formula(bench, job, size, *way), max(each["difference"] for each in own)
    still = statistics.mean(statistics.median(each["waits"]) for each in own)
    alone = statistics.mean(statistics.median(each["waits_alone"]) for each in own)
    passed = difference < TOLERANCE[bench.precision]
    text = f"differs from the whole sequence on one rank by {difference:.1e} ({'below' if passed else 'not below'} "
    text += f"{TOLERANCE[bench.precision]:.0e})"
    return record.Result(
        "cp",
        _case(rate, size),
        "_".join(way),
        _case(rate, size),
        [max(steps) for steps in zip(*(each["seconds"] for each in own), strict=True)] if passed else [],
        record.Verdict(passed, text, {"difference": difference}),
        {
            "sent_mib": max(each["sent"] for each in own) / 2**20,
            "formula_mib": formula.sent / 2**20,
            "exchanges_s": alone,
            "still_s": still,
            "hidden": max(0.0, 1 - still / alone) if alone else 0.0,
            "peak_mib": max(each["peak"] for each in own) / 2**20,
        },
        {**asdict(bench), "rate": rate, "ranks": size},
    )


def _rule(bench: ContextSection, job: Job, size: int, found: Sequence[record.Result], products: float) -> str:
    """Markdown: for each exchange which payload won, and which the planner's rule names for the measured rates."""
    by_name = {result.candidate: result for result in found if result.samples}
    lines = []
    for exchange in bench.exchanges:
        timed = {
            payload: by_name[f"{exchange}_{payload}"] for payload in PAYLOADS if f"{exchange}_{payload}" in by_name
        }
        if len(timed) < len(PAYLOADS):
            continue
        medians = {payload: record.summarize(result.samples).median for payload, result in timed.items()}
        kv, formula = timed["kv"].figures, _formula(bench, job, size, exchange, "kv")
        link = kv["sent_mib"] * 2**20 / kv["exchanges_s"]
        # What the layer took beside its waits and multiplying up goes to attention's core.
        up = formula.forward.up + formula.backward.up
        rest = max(medians["kv"] - kv["still_s"] - up / products, 1e-9)
        core = min((formula.flops - up) / rest, products)
        rule = faster_payload(
            job.model, exchange, seq_len=bench.seq_len, cp=size, link_bytes_per_s=link, matrix_flops_per_s=products,
            core_flops_per_s=core, size=DTYPES[bench.precision].itemsize,
        )  # fmt: skip
        winner = min(medians, key=lambda payload: medians[payload])
        lines.append(
            f"* {exchange}: {winner} is faster, {medians['kv'] / medians['latent']:.2f} times by latents; the "
            f"planner's rule says {rule} (link {link / 1e6:.0f} MB/s, products {products / 1e9:.1f} GFLOP/s, attention "
            f"{core / 1e9:.1f})"
        )
    return "\n".join(lines)
