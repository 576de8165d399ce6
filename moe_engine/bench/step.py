"""Whole training steps: tokens/s, MFU and peak memory of the engine, beside the same model in plain PyTorch.

A case is a number of ranks and threads. In each, the candidates start from the same parameters and train on the same
rows, and their first loss and gradient norm must agree before anything is timed; then they take turns, a step each.
The peak of memory is that of a process that runs one candidate alone.

What a step costs depends on how its tokens spread over experts and ranks, so the engine runs with the choices of its
router (`moe_engine`) and beside that with others (`moe_engine balanced`, see `config.routing`), and their loads are
told. In another routing it computes another function: its loads are checked then, not its loss. `bench.precisions` adds
the engine in other recipes (`moe_engine fp8`), against the same truth.

MFU is model FLOPs (`planner.flops`, convention `nvidia`: the causal half of attention, nothing recomputed) over the
matrix rate that this case's ranks and threads reach together in a measurement just before, in the faster of the
compute dtype and fp32. No peak is taken from a table.
"""

from __future__ import annotations

import copy
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.bench import machine, peers, record, routing
from moe_engine.bench.phases import phase_table
from moe_engine.bench.ranks import run_ranks
from moe_engine.bench.routing import ENGINE
from moe_engine.bench.step_candidates import PEERS, RECIPES, Engine, Peer, candidates, recipe_of
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import choices, to_yaml
from moe_engine.config.schema import Config
from moe_engine.config.validate import resolve, validate
from moe_engine.distributed.collectives import Communicator
from moe_engine.distributed.groups import world_communicator
from moe_engine.metrics import measure_matrix_rate
from moe_engine.planner.flops import mfu, sequence_flops
from moe_engine.trainer import Trainer

# How far first losses and gradient norms may lie apart, relatively: bf16 keeps 8 bits.
LOSS_TOLERANCE = 5e-3
NORM_TOLERANCE = 5e-2
MEMORY_STEPS = 2
FIGURES = {
    "tokens_per_s": ",.0f", "model_gflops": ".1f", "mfu": ".1%", "peak_memory_mib": ",.0f",
    "expert_load": ".2f", "rank_load": ".2f",
}  # fmt: skip


@dataclass
class BenchSection:
    """Section `bench`."""

    cases: list[str] = field(default_factory=lambda: ["threads1", "threads2", "ep2"])
    rounds: int = 12  # timed steps of each candidate
    warmup: int = 2  # steps of each before that
    # Ways of choosing experts to measure the engine with; natural is the router's own. See moe.routing.
    routing: list[str] = field(default_factory=lambda: ["natural", "balanced"])
    precisions: list[str] = field(default_factory=list)  # other recipes to measure the engine in: fp8, bf16, fp32
    peers: bool = True  # measure the plain PyTorch model too
    memory: bool = True  # measure peaks of memory, in processes of their own
    plot: bool = False  # draw plot.svg


@dataclass
class StepBenchConfig(Config):
    """A training configuration, and how to measure its step."""

    bench: BenchSection = field(default_factory=BenchSection)
    out: str = "bench/step"
    profile: bool = False  # also print where the engine's step spends its time


SCHEMA = StepBenchConfig


@dataclass(frozen=True)
class Case:
    """`threadsN`: one rank of N threads; `epN`: N ranks of one thread, which share out the experts."""

    name: str
    ranks: int
    threads: int

    @classmethod
    def parse(cls, name: str) -> Case | None:
        match = re.fullmatch(r"(threads|ep)([1-9]\d*)", name)
        if match is None:
            return None
        number = int(match[2])
        return cls(name, 1, number) if match[1] == "threads" else cls(name, number, 1)


def help_text() -> str:
    return f"""usage: moe-engine bench step [group=choice …] [section.option=value …]

Time whole training steps on random tokens, beside the same model in plain PyTorch (bf16 by autocast, and fp32), and
print tokens/s, MFU and peak memory. What each candidate computes is compared before it is timed.

groups of ready choices are those of train; experiment= {" | ".join(choices("experiment", "bench"))}

options:
  bench.cases=[threads1,threads2,ep2]   threadsN: one rank of N threads; epN: N ranks of one thread, experts shared out
  bench.rounds=12           timed steps of each candidate, in turns; bench.warmup=2 steps before
  bench.routing=[natural,balanced]      also skewed:<x> (the most loaded expert has x times the mean) and
                            replay:<folder> (as in a step recorded by moe.record_routing)
  bench.precisions=[fp8]    the engine in other recipes too: of {", ".join(RECIPES)}
  bench.peers=false         the engine alone
  bench.memory=false        no peaks of memory
  bench.plot=true           also plot.svg
  profile=true              where the engine's step spends its time
  out=bench/step            the folder of results; out= writes none
  train.micro_batch=4 train.global_batch=4   sequences: of one micro-batch, and of a rank's step
  all options of moe-engine train

examples:
  moe-engine bench step experiment=peer_33m
  moe-engine bench step experiment=peer_33m bench.cases=[threads1] profile=true out=bench/first
  moe-engine bench step experiment=quickstart parallel=single bench.cases=[threads1] bench.precisions=[fp8] \\
    bench.peers=false bench.routing=[natural] out=bench/fp8"""


def run(config: StepBenchConfig) -> int:
    """Returns 0, or 1 when a candidate's results are wrong."""
    cases, configs = _checked(config)
    described = machine.describe(sorted({case.threads for case in cases} | {1}))
    print(machine.text(described))
    results: list[record.Result] = []
    profiles: list[str] = []
    for case, case_config in zip(cases, configs, strict=True):
        found, table = _run_case(config, case, case_config)
        results += found
        profiles += [f"Where the step of {case.name} spends its time (engine):\n\n{table}"] if table else []
        print(f"\n{case.name}\n{record.table(found, FIGURES)}\n{found[0].verdict.text}", flush=True)
    print("\n".join(["", *_ratios(results), *profiles]))
    if config.out:
        report = _report(config, described, results, profiles)
        record.write(Path(config.out), results, described, to_yaml(config), report, config.bench.plot)
        print(f"results in {config.out}")
    return 0 if all(result.verdict.passed for result in results) else 1


def _checked(config: StepBenchConfig) -> tuple[list[Case], list[Config]]:
    """The cases and a resolved configuration for each. Raises ConfigError for everything that is wrong."""
    problems: list[str] = []
    cases: list[Case] = []
    for name in config.bench.cases:
        case = Case.parse(name)
        if case is None:
            problems.append(f"bench.cases=[{name}]: a case is threadsN or epN, for example bench.cases=[threads1,ep2]")
        else:
            cases.append(case)
    if not config.bench.cases:
        problems.append("bench.cases=[]: nothing to measure; use bench.cases=[threads1]")
    for name, smallest in (("rounds", 1), ("warmup", 0)):
        value = getattr(config.bench, name)
        if value < smallest:
            problems.append(f"bench.{name}={value}: must be {smallest} or more, for example bench.{name}=12")
    if config.out and Path(config.out).is_file():
        problems.append(f"out={config.out}: is a file; name a folder, for example out=bench/step")
    if config.bench.peers:
        problems += peers.lacks(config)
    resolved = []
    for recipe in config.bench.precisions:
        if recipe not in RECIPES or recipe == config.precision.name or config.bench.precisions.count(recipe) > 1:
            others = [name for name in RECIPES if name != config.precision.name]
            problems.append(
                f"bench.precisions=[{','.join(config.bench.precisions)}]: must be recipes beside "
                f"precision={config.precision.name}, each once; use bench.precisions=[{others[-1]}]"
            )
            break
    for case in cases:
        try:
            case_config = _config_of(config, case)
            validate(case_config, case.ranks)
            resolved.append(resolve(case_config, case.ranks))
        except ConfigError as error:
            problems += str(error).splitlines()
    problems += routing.problems(config.bench.routing, config, resolved)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return cases, resolved


def _config_of(config: StepBenchConfig, case: Case) -> Config:
    """The training configuration of a case: each rank keeps the batch that one rank has."""
    plain = Config(**{item.name: copy.deepcopy(getattr(config, item.name)) for item in fields(Config)})
    plain.parallel.dp, plain.parallel.ep, plain.train.threads = case.ranks, case.ranks, case.threads
    plain.train.global_batch *= case.ranks
    plain.pipeline.micro_batches = None
    return plain


def _run_case(config: StepBenchConfig, case: Case, case_config: Config) -> tuple[list[record.Result], str]:
    """Results of all candidates, and the engine's table of phases if asked for."""
    names = [routing.candidate_of(text) for text in config.bench.routing]
    names += [f"{ENGINE} {recipe}" for recipe in config.bench.precisions] + [*(PEERS if config.bench.peers else ())]
    measured = run_ranks(
        case.ranks, case.threads, measure, case_config, names, config.bench.warmup, config.bench.rounds, config.profile
    )
    first = measured[0]
    flops = case_config.train.global_batch * sequence_flops(case_config.model, case_config.train.seq_len)
    tokens = case_config.train.global_batch * case_config.train.seq_len
    results = []
    for name in names:
        samples = first["samples"][name]
        figures: dict[str, Any] = {"matrix_gflops": first["matrix_rate"] / 1e9, "mfu_convention": "nvidia"}
        figures |= first["loads"].get(name, {})
        if samples:
            seconds = record.summarize(samples).median
            figures["tokens_per_s"] = tokens / seconds
            figures["model_gflops"] = flops / seconds / 1e9
            figures["mfu"] = mfu(flops, seconds, first["matrix_rate"])
            if config.bench.memory:
                peaks = run_ranks(case.ranks, case.threads, peak_memory, case_config, name)
                figures["peak_memory_mib"] = sum(peaks) / 2**20
        verdict = record.Verdict(**first["verdicts"][name])
        session = f"{case.name} {first['started']}"
        results.append(
            record.Result("step", case.name, name, session, samples, verdict, figures, {**asdict(case_config)})
        )
    return results, first["profile"]


def measure(
    rank: int, device: torch.device, config: Config, names: list[str], warmup: int, rounds: int, profile: bool
) -> dict[str, Any]:
    """On every rank: check the candidates against one another, then time them in turns."""
    world = world_communicator(rank, config.parallel.dp or 1)
    steps = candidates(rank, device, config, names)
    firsts = {name: _first(step, world) for name, step in steps.items()}
    verdicts = {name: _verdict(name, firsts) for name in names}
    for name, step in steps.items():
        if isinstance(step, Engine) and name != ENGINE and recipe_of(name) is None:
            verdicts[name] = routing.verdict(config, routing.routing_of(name), firsts[name], step.figures)
    right = [name for name in names if verdicts[name].passed]
    for index in range(1, warmup):
        for name in right:
            steps[name](index)
    rate = measure_matrix_rate(world, getattr(torch, config.precision.compute), device)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name in record.turns(right, rounds):
        world.barrier()
        start = time.perf_counter()
        steps[name](warmup + len(samples[name]))
        world.barrier()
        samples[name].append(time.perf_counter() - start)
    loads = {name: step.figures for name, step in steps.items() if isinstance(step, Engine)}
    table = phase_table(lambda: steps[ENGINE](warmup + rounds), _trainer_of(steps[ENGINE])) if profile else ""
    return {
        "samples": samples,
        "verdicts": {name: asdict(verdict) for name, verdict in verdicts.items()},
        "matrix_rate": rate,
        "loads": loads,
        "started": time.time(),
        "profile": table,
    }


def _first(step: Callable[[int], tuple[float, float]], world: Communicator) -> tuple[float, float]:
    """Loss and gradient norm of the first step, over the rows of all ranks (a plain trainer's loss is its rank's)."""
    loss, norm = step(0)
    if isinstance(step, Peer):
        loss = float(world.all_reduce_sum(torch.tensor(loss, dtype=torch.float64), "first loss")) / world.size
    return loss, norm


def peak_memory(rank: int, device: torch.device, config: Config, name: str) -> int:
    """Bytes at the highest point of a process (a GPU: of torch's allocator) that trains one candidate alone."""
    (step,) = candidates(rank, device, config, [name]).values()
    for index in range(MEMORY_STEPS):
        step(index)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _trainer_of(step: Callable[[int], tuple[float, float]]) -> Trainer:
    assert isinstance(step, Engine)
    return step.trainer


def _verdict(name: str, firsts: dict[str, tuple[float, float]]) -> record.Verdict:
    """First loss and gradient norm against the plain fp32 model's; with no peer, another recipe's against the engine's
    own, which must be finite."""
    loss, norm = firsts[name]
    measures = {"loss": loss, "grad_norm": norm}
    truth = "plain_fp32" if "plain_fp32" in firsts else ENGINE
    if truth not in firsts or name == truth == ENGINE:
        passed = bool(Tensor([loss, norm]).isfinite().all())
        return record.Verdict(passed, "checked: first loss and gradient norm are finite (no peer to compare)", measures)
    true_loss, true_norm = firsts[truth]
    off = abs(loss / true_loss - 1), abs(norm / true_norm - 1)
    measures |= {"loss_off": off[0], "grad_norm_off": off[1]}
    passed = off[0] <= LOSS_TOLERANCE and off[1] <= NORM_TOLERANCE  # False for NaN too
    return record.Verdict(
        passed,
        f"checked against {truth}: first loss {loss:.4f} is off by {off[0]:.1e} (at most {LOSS_TOLERANCE:g}), "
        f"gradient norm {norm:.4f} by {off[1]:.1e} (at most {NORM_TOLERANCE:g})",
        measures,
    )


def _ratios(results: list[record.Result]) -> list[str]:
    """How many times faster than each peer the engine is, with intervals."""
    from moe_engine.bench.compare import MIN_SAMPLES, ratio_of

    lines = []
    by_case = {(result.case, result.candidate): result for result in results}
    for (case, candidate), result in by_case.items():
        engine = by_case[case, ENGINE]
        if candidate != ENGINE and len(engine.samples) == len(result.samples) >= MIN_SAMPLES:
            each = ratio_of(engine.samples, result.samples, paired=True)
            lines.append(f"{case}: {each.ratio:.2f}x as fast as {candidate} (95%: {each.low:.2f} … {each.high:.2f})")
    return lines


def _report(
    config: StepBenchConfig, described: dict[str, Any], results: list[record.Result], profiles: list[str]
) -> str:
    train = config.train
    rates = dict.fromkeys(f"{r.case}: {r.figures['matrix_gflops']:.0f} GFLOP/s" for r in results)
    parts = [
        f"# Training steps of {config.model.name}",
        f"{train.micro_batch} sequences of {train.seq_len} tokens a micro-batch, {train.global_batch} a rank and step, "
        f"precision {config.precision.name}.",
        machine.text(described),
        record.table(results, FIGURES),
        "MFU: model FLOPs (convention nvidia: causal half of attention, nothing recomputed) over the matrix rate that "
        f"each case's ranks and threads reached together just before ({'; '.join(rates)}).",
        "\n".join(f"* {line}" for line in _ratios(results)),
        "\n".join(f"* {r.case} {r.candidate}: {r.verdict.text}" for r in results),
        *profiles,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
