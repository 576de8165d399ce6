"""Routed experts beside those of other libraries: forward, forward and backward, memory.

A case is a known model's layer, scaled to the device, in one dtype. All candidates get the same tokens, choices and
weights, so that routers are not compared. Each one's output and gradients are compared with a loop in fp64; then its
memory is counted; then all take turns, a slow one in fewer of the rounds. Memory is that of tensors
(`bench.live_memory`): `saved` what a forward leaves for its backward, without output, inputs and parameters; `peak` the
most at once in forward and backward, gradients of the parameters included. Beside the clock's time stand the
processor's, the system's part of it, and the pages a call touched first: what new memory costs depends on the machine.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.bench import layer_peers as peers
from moe_engine.bench import machine, record
from moe_engine.bench.live_memory import LivePeak
from moe_engine.bench.ranks import run_ranks
from moe_engine.bench.truth import BOUNDS, beside_fp64
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import to_yaml

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SPENT = {"cpu_ms": ".1f", "system_ms": ".1f", "page_faults": ".0f"}
FIGURES = {"tokens_per_s": ".0f", **SPENT, "saved_mb": ".2f", "peak_mb": ".1f"}
GRADIENTS = ("dropped", "kept")
FEWEST_ROUNDS = 2  # of a slow candidate
MULTIPLE = 32  # scaled sizes are multiples of this


@dataclass(frozen=True)
class Shape:
    """A layer of a known model: sizes of a token and within an expert, experts, experts of a token."""

    dim: int
    hidden: int
    experts: int
    top_k: int

    def scaled(self, scale: int) -> Shape:
        """Sizes divided by `scale`, experts by half of it, not below 8 or twice `top_k`."""
        if scale == 1:
            return self
        dim, hidden = (max(MULTIPLE, size // scale // MULTIPLE * MULTIPLE) for size in (self.dim, self.hidden))
        experts = max(8, 2 * self.top_k, self.experts * 2 // scale)
        return Shape(dim, hidden, min(self.experts, experts), self.top_k)

    def __str__(self) -> str:
        return f"{self.experts}e{self.top_k}k {self.dim}x{self.hidden}"


# From the models' config.json: hidden_size, size of an expert, number of routed experts, experts of a token.
SHAPES = {
    "deepseek_v3": Shape(7168, 2048, 256, 8),
    "deepseek_v2_lite": Shape(2048, 1408, 64, 6),
    "mixtral_8x7b": Shape(4096, 14336, 8, 2),
    "qwen3_30b": Shape(2048, 768, 128, 8),
    "olmoe": Shape(2048, 1024, 64, 8),
}


@dataclass
class LayerBenchConfig:
    """Options of `moe-engine bench layer`."""

    shapes: list[str] = field(default_factory=lambda: list(SHAPES))
    scale: int = 0  # divides the models' sizes; 0: 8 on a CPU, 1 on a GPU
    tokens: int = 512
    dtypes: list[str] = field(default_factory=lambda: ["fp32"])
    threads: int = 1
    gradients: str = "dropped"  # after each call, or kept and added to
    rounds: int = 15
    seconds: float = 5.0  # that a candidate's timed calls of a case may take together, by its last warm-up
    warmup: int = 1
    out: str = "bench/layer"


SCHEMA = LayerBenchConfig


def help_text() -> str:
    return f"""usage: moe-engine bench layer [option=value …]

Time routed experts, forward alone and with backward, beside other libraries' at the sizes of known models, and count
what they keep for backward. Each candidate's output and gradients are checked before it is timed.

options:
  shapes=[{",".join(SHAPES)}]
  scale=0                   divides sizes, and by half of it the number of experts; 0: 8 on a CPU, 1 on a GPU
  tokens=512                of one call
  dtypes=[fp32]             fp32, bf16
  threads=1                 threads of the one process
  gradients=dropped         dropped after each call, as zero_grad() does, or kept: the next call's are added to them
  rounds=15 warmup=1        timed calls of each candidate, in turns; calls before them
  seconds=5                 of a candidate's timed calls: a slow one has fewer, {FEWEST_ROUNDS} at least
  out=bench/layer           the folder of results; out= writes none

examples:
  moe-engine bench layer
  moe-engine bench layer shapes=[mixtral_8x7b] dtypes=[fp32,bf16] tokens=1024 threads=2 rounds=20 out="""


def run(config: LayerBenchConfig) -> int:
    """Returns 0, or 1 when a candidate's results are wrong."""
    _check(config)
    described = machine.describe([config.threads])
    print(machine.text(described), flush=True)
    results: list[record.Result] = []
    missing: dict[str, str] = {}
    for name in config.shapes:
        for dtype in config.dtypes:
            found, absent = _run_case(config, name, dtype)
            results += found
            missing |= absent
            print(record.table(found, FIGURES), *dict.fromkeys(r.verdict.text for r in found), sep="\n", flush=True)
    summary = "\n".join([*_ratios(results), "", *(f"* {peer}: {why}" for peer, why in missing.items())])
    print(f"\n{summary}")
    if config.out:
        report = f"# Experts\n\n{machine.text(described)}\n\n{record.table(results, FIGURES)}\n\n{summary}\n"
        record.write(Path(config.out), results, described, to_yaml(config), report, plot=True)
        print(f"results in {config.out}")
    return 0 if all(result.verdict.passed for result in results) else 1


def _check(config: LayerBenchConfig) -> None:
    problems = []
    for name, known in (("shapes", SHAPES), ("dtypes", DTYPES)):
        values = getattr(config, name)
        problems += [f"{name}=[{value}]: there are {', '.join(known)}" for value in values if value not in known]
        if not values:
            problems.append(f"{name}=[]: nothing to measure; use {name}=[{next(iter(known))}]")
    for name, smallest in (("scale", 0), ("tokens", 1), ("threads", 1), ("rounds", 1), ("warmup", 0)):
        value = getattr(config, name)
        if value < smallest:
            problems.append(f"{name}={value}: must be {smallest} or more, for example {name}={smallest}")
    cores = os.cpu_count() or 1
    if config.threads > cores:  # some thousands end a process
        problems.append(f"threads={config.threads}: this machine has {cores}; use threads={cores} or fewer")
    if config.gradients not in GRADIENTS:
        problems.append(f"gradients={config.gradients}: they are {' or '.join(GRADIENTS)}")
    if not config.seconds > 0:
        problems.append(f"seconds={config.seconds}: must be above 0, for example seconds=5")
    if config.out and Path(config.out).is_file():
        problems.append(f"out={config.out}: is a file; name a folder, for example out=bench/layer")
    if problems:
        raise ConfigError("\n".join(problems))


def _run_case(config: LayerBenchConfig, name: str, dtype: str) -> tuple[list[record.Result], dict[str, str]]:
    scale = config.scale or (1 if torch.cuda.is_available() else 8)
    shape = SHAPES[name].scaled(scale)
    (measured,) = run_ranks(
        1, config.threads, measure, asdict(shape), config.tokens, dtype, config.warmup, config.rounds, config.seconds,
        config.gradients == "kept",
    )  # fmt: skip
    started = time.time()
    results = []
    settings = asdict(shape) | {"shape": name, "scale": scale, "dtype": dtype, "tokens": config.tokens}
    for phase in ("forward", "both"):
        case = f"{phase} {name} {shape} {dtype}"
        for candidate, verdict in measured["verdicts"].items():
            calls = [sample[phase] for sample in measured["samples"][candidate]]
            samples = [call["seconds"] for call in calls]
            figures = dict(measured["memory"].get(candidate, {})) if phase == "both" else {}
            if samples:
                figures["tokens_per_s"] = config.tokens / record.summarize(samples).median
                figures |= _spent_by(calls)
            results.append(
                record.Result(
                    "layer", case, candidate, f"{case} {started}", samples, record.Verdict(**verdict), figures,
                    settings | {"phase": phase, "threads": config.threads, "gradients": config.gradients},
                )
            )  # fmt: skip
    return results, measured["missing"]


def measure(
    rank: int,
    device: torch.device,
    sizes: dict[str, int],
    tokens: int,
    dtype: str,
    warmup: int,
    rounds: int,
    seconds: float,
    keep: bool,
) -> dict[str, Any]:
    """Verdicts, memory, and for each right candidate what its forwards alone and with backward took (`_spent`).

    keep: gradients stay where they are, and the next call's are added.
    """
    shape = Shape(**sizes)
    inputs, d_out = make_inputs(shape, tokens, DTYPES[dtype], device)
    candidates, missing = peers.candidates(inputs)
    truth = outcome(peers.dense_loop, _wide(inputs), d_out.double())
    verdicts = {name: verdict(name, call, inputs, d_out, truth, BOUNDS[dtype]) for name, call in candidates.items()}
    del truth
    right = [name for name in candidates if verdicts[name].passed]
    memory = {name: count_memory(candidates[name], inputs, d_out) for name in right}
    samples: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in candidates}
    taken = dict.fromkeys(right, rounds)  # rounds that each takes part in
    for index, name in enumerate(record.turns(right, warmup + rounds)):
        round_of = index // len(right) - warmup
        if round_of >= 0 and not _takes_part(round_of, taken[name], rounds):
            continue
        sample = {
            "forward": _time_forward(candidates[name], inputs),
            "both": _time_both(candidates[name], inputs, d_out, keep),
        }
        if round_of >= 0:
            samples[name].append(sample)
        else:
            taken[name] = min(
                rounds, max(FEWEST_ROUNDS, int(seconds / sum(spent["seconds"] for spent in sample.values())))
            )
    return {
        "verdicts": {name: asdict(verdict) for name, verdict in verdicts.items()},
        "samples": samples,
        "memory": memory,
        "missing": missing,
    }


def _takes_part(index: int, taken: int, rounds: int) -> bool:
    """Whether round `index` is one of those, evenly spread, that a candidate of `taken` of all rounds is timed in."""
    return (index + 1) * taken // rounds > index * taken // rounds


def make_inputs(shape: Shape, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[peers.Inputs, Tensor]:
    """Random tokens, choices without favour, normalised weights and parameters; and the output's gradient."""
    chance = torch.Generator().manual_seed(0)

    def numbers(*size: int) -> Tensor:
        return torch.randn(*size, generator=chance).to(device, dtype)

    T, D, H, E, K = tokens, shape.dim, shape.hidden, shape.experts, shape.top_k
    scores = torch.rand(T, E, generator=chance).to(device)
    ids = scores.topk(K, dim=1).indices.sort(dim=1).values
    weights = scores.gather(1, ids)
    weights = (weights / weights.sum(dim=1, keepdim=True)).requires_grad_()
    gate_up = torch.nn.Parameter(numbers(E, 2 * H, D) * D**-0.5)
    down = torch.nn.Parameter(numbers(E, D, H) * H**-0.5)
    return peers.Inputs(numbers(T, D).requires_grad_(), ids, weights, gate_up, down), numbers(T, D)


def _wide(inputs: peers.Inputs) -> peers.Inputs:
    x, weights, gate_up, down = (leaf.detach().double().requires_grad_() for leaf in inputs.leaves())
    return peers.Inputs(x, inputs.ids, weights, gate_up, down)


def outcome(call: peers.Candidate, inputs: peers.Inputs, d_out: Tensor) -> list[Tensor]:
    """Output, and gradients of `Inputs.leaves`."""
    out = call(inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs.leaves(), d_out)]


def verdict(
    name: str, call: peers.Candidate, inputs: peers.Inputs, d_out: Tensor, truth: list[Tensor], bound: float
) -> record.Verdict:
    """Whether output and gradients are the truth's but for rounding."""
    names = ("out", "d_x", "d_weights", "d_gate_up", "d_down")
    return beside_fp64(name, dict(zip(names, outcome(call, inputs, d_out), strict=True)), truth, bound)


def count_memory(call: peers.Candidate, inputs: peers.Inputs, d_out: Tensor) -> dict[str, float]:
    """MB that one forward leaves for its backward, and the peak of both."""
    with LivePeak([*inputs.leaves(), inputs.ids, d_out]) as memory:
        out = call(inputs)
        saved = memory.held() - out.nbytes
        gradients = torch.autograd.grad(out, inputs.leaves(), d_out)
        del out, gradients
    return {"saved_mb": saved / 1e6, "peak_mb": memory.peak / 1e6}


def _now(inputs: peers.Inputs) -> float:
    if inputs.x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _spent(inputs: peers.Inputs, call: Callable[[], object]) -> dict[str, float]:
    """Of one call: seconds by the clock; the processor's time and the system's part of it; pages it touched first."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), _now(inputs)
    call()
    seconds, after = _now(inputs) - start, resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return {
        "seconds": seconds,
        "cpu_ms": 1e3 * (user + system),
        "system_ms": 1e3 * system,
        "page_faults": after.ru_minflt - before.ru_minflt,
    }


def _spent_by(calls: list[dict[str, float]]) -> dict[str, float]:
    """The figures of `SPENT`: medians, but the mean of the system's time, which is counted in few steps a call."""
    figures = {name: statistics.median(call[name] for call in calls) for name in SPENT}
    return figures | {"system_ms": statistics.mean(call["system_ms"] for call in calls)}


def _time_forward(call: peers.Candidate, inputs: peers.Inputs) -> dict[str, float]:
    with torch.no_grad():
        return _spent(inputs, lambda: call(inputs))


def _time_both(call: peers.Candidate, inputs: peers.Inputs, d_out: Tensor, keep: bool) -> dict[str, float]:
    if not keep:
        return _spent(inputs, lambda: torch.autograd.grad(call(inputs), inputs.leaves(), d_out))
    return _spent(inputs, lambda: torch.autograd.backward(call(inputs), d_out))


def _ratios(results: list[record.Result]) -> list[str]:
    """Ours beside the fastest peer of each case, and what it keeps beside transformers' eager experts."""
    lines = []
    for case in dict.fromkeys(result.case for result in results):
        lines += _fewer([result for result in results if result.case == case])
        timed = {r.candidate: r for r in results if r.case == case and r.samples}
        rivals = [name for name in timed if name not in (peers.OURS, peers.HOSTED)]
        if peers.OURS not in timed or not rivals:
            continue
        medians = {name: record.summarize(r.samples).median for name, r in timed.items()}
        best = min(rivals, key=lambda name: medians[name])
        by_cpu = timed[best].figures["cpu_ms"] / timed[peers.OURS].figures["cpu_ms"]
        line = f"* {case}: {medians[best] / medians[peers.OURS]:.2f}x as fast as {best}, the fastest other"
        line += f" ({by_cpu:.2f}x by processor time)"
        if peers.EAGER in timed and "saved_mb" in timed[peers.EAGER].figures:
            kept = timed[peers.OURS].figures["saved_mb"] / timed[peers.EAGER].figures["saved_mb"]
            line += f"; keeps {kept:.0%} of what eager experts keep"
        lines.append(line)
        built_in = [name for name in rivals if name.startswith("transformers_")]
        if peers.HOSTED in timed and built_in:
            best = min(built_in, key=lambda name: medians[name])
            ratio = medians[best] / medians[peers.HOSTED]
            lines.append(f"  * as experts_implementation=moe_engine {ratio:.2f}x as fast as {best}")
    return lines


def _fewer(results: list[record.Result]) -> list[str]:
    """Says who was timed less often than others in a case."""
    most = max(len(result.samples) for result in results)
    few = [f"{r.candidate} {len(r.samples)}" for r in results if 0 < len(r.samples) < most]
    return [f"* {results[0].case}: timed calls fewer than {most}, for they are slow: {', '.join(few)}"] if few else []
