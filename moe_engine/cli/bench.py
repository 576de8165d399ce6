"""`moe-engine bench <benchmark>`: measure, with a record of what was measured where; and compare two records.

A benchmark is a module with a `SCHEMA` (a dataclass of options that has `out`, its folder), `help_text()` and
`run(config) -> exit code`. To add one, name it in `BENCHMARKS`; it is imported when it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass, field
from typing import NamedTuple

from moe_engine.cli import out_file
from moe_engine.config.errors import ConfigError, there_are
from moe_engine.config.load import load


class Entry(NamedTuple):
    module: str
    root: str  # the file in conf/ with this benchmark's default choices
    summary: str


BENCHMARKS = {
    "step": Entry("moe_engine.bench.step", "bench", "whole training steps against the same model in plain PyTorch"),
    "schedule": Entry("moe_engine.bench.schedule", "bench_schedule", "schedules with sleeping stages, as simulated?"),
    "kernels": Entry(
        "moe_engine.bench.kernels", "bench_kernels", "single kernels on a GPU against torch's and DeepGEMM's"
    ),
    "comm": Entry("moe_engine.bench.comm", "bench_comm", "rows to the experts and back, by every way and payload"),
    "cp": Entry("moe_engine.bench.cp", "bench_cp", "attention over sequences that ranks share, by each exchange"),
    "attention": Entry(
        "moe_engine.bench.attention", "bench_attention", "a CPU's attention, forward and backward, against torch's"
    ),
    "layer": Entry(
        "moe_engine.bench.layer", "bench_layer", "routed experts against other libraries', speed and memory"
    ),
    "overlap": Entry(
        "moe_engine.bench.overlap", "bench_overlap", "what the overlapped pair hides of exchanges over a slow wire"
    ),
}

SUMMARY = "measure speed, and compare two measurements"


@dataclass
class CompareConfig:
    """Options of `moe-engine bench compare=[a,b]`."""

    compare: list[str] = field(default_factory=list)  # two results: folder, or folder@candidate
    bound: float = 1.05  # a slowdown up to this ratio is let through


def help_text() -> str:
    listed = "\n".join(f"  {name:<10} {entry.summary}" for name, entry in BENCHMARKS.items())
    return f"""usage: moe-engine bench <benchmark> [group=choice …] [section.option=value …]
       moe-engine bench compare=[first,second] [bound=1.05]

Measure, and write results.jsonl (every sample), machine.json (with measured ceilings), config.yaml and report.md into
the folder out=…; what is measured is first checked to be right.

benchmarks:
{listed}

moe-engine bench <benchmark> --help explains one.

compare=[first,second] says whether the second is slower. Each is a benchmark's folder, or folder@candidate. Exit code
1 if in any case the ratio of times is above bound= and its confidence interval (95% over all cases together) lies
above 1; else 0.

examples:
  moe-engine bench step experiment=peer_33m out=bench/before
  moe-engine bench compare=[bench/before,bench/after] bound=1.05
  moe-engine bench compare=[bench/after@plain_bf16,bench/after@moe_engine]"""


def help_of(words: list[str]) -> str:
    """The help of the benchmark that the words name, or of this command."""
    named = [word for word in words if word in BENCHMARKS]
    if not named:
        return help_text()
    return str(importlib.import_module(BENCHMARKS[named[0]].module).help_text())


def run(words: list[str]) -> int:
    if not words:
        raise ConfigError(f"bench: which benchmark? There are {', '.join(BENCHMARKS)}; see moe-engine bench --help")
    if "=" in words[0] and words[0].partition("=")[0] in ("compare", "bound"):
        return _compare(words)
    name, *rest = words
    if name not in BENCHMARKS:
        raise ConfigError(_unknown(name))
    entry = BENCHMARKS[name]
    module = importlib.import_module(entry.module)
    config = load(entry.root, rest, module.SCHEMA)
    problem = out_file.above_problem(config.out) if config.out else None
    if problem:
        raise ConfigError(problem)
    return int(module.run(config))


def _unknown(name: str) -> str:
    if "=" in name:
        return f"{name}: the benchmark comes first, as in: moe-engine bench {next(iter(BENCHMARKS))} {name}"
    known = there_are(BENCHMARKS, difflib.get_close_matches(name, BENCHMARKS, n=1))
    return f"{name}: no such benchmark; {known}; see moe-engine bench --help"


def _compare(words: list[str]) -> int:
    config = load("compare", words, CompareConfig)
    problems = []
    if len(config.compare) != 2:
        problems.append(
            f"compare=[{','.join(config.compare)}]: two results are compared, as in compare=[bench/before,bench/after]"
        )
    if config.bound < 1:
        problems.append(f"bound={config.bound:g}: a ratio of times, 1 or more, for example bound=1.05")
    if problems:
        raise ConfigError("\n".join(problems))
    from moe_engine.bench import compare

    comparisons = compare.compare(*config.compare)
    print(compare.table(comparisons, config.bound))
    return 1 if any(each.is_regression(config.bound) for each in comparisons) else 0
