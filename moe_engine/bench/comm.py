"""Rows on their way to the experts and back: time and bytes of every way and payload, beside what other engines send.

The baseline sends a row in bf16 for each (token, expert) by one `all_to_all_single`, undeduplicated. Every candidate
packs its rows (in fp8: quantises them), sends them with their slots, and unpacks; the layout of rows, which all of them
need, is made before. Rows in fp8 are delivered as experts in fp8 take them, as codes and scales, or decoded for those
that compute in bf16. Each is first held against its definition: untouched rows, there and back, are rows x token.

bytes: what the fullest rank put into its exchanges, its own share included; limit: bytes a second that a rank sends to
its neighbour while all ranks do the same, measured in the same run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_engine.bench import machine, record
from moe_engine.bench.comm_rank import PLAIN, Job, on_rank, runnable, timed
from moe_engine.bench.ranks import run_ranks
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import to_yaml
from moe_engine.config.routing import routing_problem

CANDIDATES = (
    PLAIN, "all-to-all_bf16", "all-to-all_fp8", "all-to-all_fp8-decoded", "hierarchical_bf16", "hierarchical_fp8",
    "hierarchical_fp8-decoded", "nvshmem_bf16", "nvshmem_fp8",
)  # fmt: skip
FIGURES = {"mib": ".2f", "gb_per_s": ".2f", "share_of_limit": ".0%", "of_undeduplicated": ".2f"}


@dataclass
class CommSection:
    """Section `bench`."""

    ranks: int = 4  # of the expert-parallel group, on this machine
    ranks_per_node: int = 2  # of hierarchical
    tokens: list[int] = field(default_factory=lambda: [1024])  # of each rank
    routings: list[str] = field(default_factory=lambda: ["natural", "balanced", "skewed:4"])  # as in moe.routing
    candidates: list[str] = field(default_factory=lambda: list(CANDIDATES))
    dim: int = 2048
    num_experts: int = 64
    top_k: int = 8
    rounds: int = 10  # timed exchanges of each candidate


@dataclass
class CommBenchConfig:
    """Options of `moe-engine bench comm`."""

    bench: CommSection = field(default_factory=CommSection)
    out: str = "bench/comm"


SCHEMA = CommBenchConfig


def help_text() -> str:
    return f"""usage: moe-engine bench comm [section.option=value …]

Time dispatch and combine over local ranks, by way (all-to-all, hierarchical, with GPUs nvshmem) and payload (bf16; fp8,
delivered as codes to experts in fp8; fp8-decoded, delivered as numbers), beside the rows that other engines send:
undeduplicated, in bf16, by torch's all_to_all_single. Bytes, GB/s, and the share of what two neighbours can send each
other.

options:
  bench.ranks=4 bench.ranks_per_node=2
  bench.tokens=[1024]           of each rank
  bench.routings=[natural,balanced,skewed:4]   who chooses experts: random scores, evenly, or with one expert at 4 times
                                the mean load
  bench.candidates=[{",".join(CANDIDATES[:3])}]   also {", ".join(CANDIDATES[3:6])},
                                {", ".join(CANDIDATES[6:])}
  bench.dim=2048 bench.num_experts=64 bench.top_k=8 bench.rounds=10
  out=bench/comm                the folder of results; out= writes none

examples:
  moe-engine bench comm
  moe-engine bench comm bench.ranks=8 bench.tokens=[256,1024] bench.dim=7168 bench.num_experts=256"""


def run(config: CommBenchConfig) -> int:
    """Returns 0, or 1 if a candidate brings back something else than it should. Raises ConfigError."""
    _check(config)
    bench = config.bench
    job = Job(**asdict(bench))
    ranks = run_ranks(bench.ranks, 1, on_rank, asdict(job))
    limit = min(rank["limit"] for rank in ranks if rank["limit"])
    results = [
        result
        for routing in bench.routings
        for tokens in bench.tokens
        for direction in ("dispatch", "combine")
        for result in _results(bench, f"{direction} {routing} {tokens}", ranks, limit)
    ]
    report = f"# Rows to the experts and back\n\n{record.table(results, FIGURES)}\n\n"
    left_out = [name for name in bench.candidates if name not in runnable(bench.candidates, ranks[0]["device"])]
    if left_out:
        report += f"Not run, since GPUs put their rows and there is none here: {', '.join(left_out)}.\n"
    report += f"{bench.ranks} ranks on this machine; two neighbours send each other {limit / 1e9:.2f} GB/s at once.\n"
    print(report, flush=True)
    if config.out:
        record.write(Path(config.out), results, machine.describe([1]), to_yaml(config), report)
        print(f"results in {config.out}")
    return 0 if all(result.verdict.passed for result in results) else 1


def _results(bench: CommSection, case: str, ranks: Sequence[Mapping[str, Any]], limit: float) -> list[record.Result]:
    """Seconds are those of the slowest rank, bytes those of the rank with most."""
    found, plain = [], None
    config = {**asdict(bench), "case": case}
    able = runnable(bench.candidates, ranks[0]["device"])
    for name in timed(bench.candidates, case.partition(" ")[0]):
        if name not in able:
            verdict = record.Verdict(True, "not run: GPUs put these rows, and there is none here")
            found.append(record.Result("comm", case, name, case, [], verdict, {}, config))
            continue
        own = [rank[f"{case} {name}"] for rank in ranks]
        wrong = next((each["wrong"] for each in own if each["wrong"]), "")
        samples = [max(seconds) for seconds in zip(*(each["seconds"] for each in own), strict=True)]
        median, size = record.summarize(samples).median, max(each["bytes"] for each in own)
        plain = median if name == PLAIN else plain
        figures = {"mib": size / 2**20, "gb_per_s": size / median / 1e9, "share_of_limit": size / median / limit}
        if plain is not None:
            figures["of_undeduplicated"] = median / plain
        verdict = record.Verdict(not wrong, wrong or "untouched rows, there and back, are rows x token, bit by bit")
        found.append(record.Result("comm", case, name, case, samples if not wrong else [], verdict, figures, config))
    return found


def _check(config: CommBenchConfig) -> None:
    bench, problems = config.bench, []
    for name in ("dim", "num_experts", "top_k", "rounds", "ranks_per_node"):
        if getattr(bench, name) < 1:
            problems.append(f"bench.{name}={getattr(bench, name)}: must be 1 or more, for example bench.{name}=8")
    if bench.ranks < 2:
        problems.append(f"bench.ranks={bench.ranks}: rows travel between 2 ranks or more; use bench.ranks=4")
    if not bench.tokens or min(bench.tokens) < 1:
        problems.append(f"bench.tokens={bench.tokens}: numbers of 1 or more are needed; use bench.tokens=[1024]")
    if not bench.candidates or set(bench.candidates) - set(CANDIDATES):
        shown = ",".join(bench.candidates)
        problems.append(
            f"bench.candidates=[{shown}]: there are {', '.join(CANDIDATES)}; use bench.candidates=[{PLAIN}]"
        )
    if not bench.routings:
        problems.append("bench.routings=[]: nothing to measure; use bench.routings=[natural]")
    problems += record.named_twice("bench.candidates", bench.candidates)
    if not problems:
        problems = _fit(bench)
    if config.out and Path(config.out).is_file():
        problems.append(f"out={config.out}: is a file; name a folder, for example out=bench/comm")
    if problems:
        raise ConfigError("\n".join(problems))


def _fit(bench: CommSection) -> list[str]:
    """What does not go together."""
    problems = []
    if bench.num_experts % bench.ranks:
        problems.append(
            f"bench.num_experts={bench.num_experts}: bench.ranks={bench.ranks} must divide it; "
            f"use bench.num_experts={8 * bench.ranks}"
        )
    if bench.ranks % bench.ranks_per_node:
        problems.append(
            f"bench.ranks_per_node={bench.ranks_per_node}: must divide bench.ranks={bench.ranks}; "
            "use bench.ranks_per_node=1"
        )
    if bench.top_k > bench.num_experts:
        problems.append(f"bench.top_k={bench.top_k}: there are {bench.num_experts} experts; use bench.top_k=1")
    for routing in bench.routings if not problems else []:
        wrong = routing_problem("bench.routings", routing, bench.num_experts, bench.top_k)
        if wrong is None and routing.startswith("replay"):
            wrong = "a recording has a model's sizes; use natural, balanced or skewed:2"
        problems += [f"bench.routings={routing}: {wrong}"] if wrong else []
    return problems
