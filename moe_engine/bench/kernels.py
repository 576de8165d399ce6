"""The kernels one by one: TFLOPS and GB/s beside torch's and DeepGEMM's, as shares of what the device reaches itself.

A case is an op at a shape. Its candidates see the same operands, fresh random numbers in every round; each candidate's
first result is compared with a product in fp32 (or with the reference) before it is timed, and those that fail get no
timing. The two ceilings are measured just before: a large dense product of torch in the operands' format, and a copy.
On a CPU the candidates are the reference and torch: that exercises everything but says nothing about a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.bench import machine, record
from moe_engine.bench.kernel_ops import OPS, OURS, Candidates, Op, Operands, Shape
from moe_engine.bench.truth import calc_diff
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import to_yaml

FIGURES = {"tflops": ".4g", "gb_per_s": ".4g", "share_of_ceiling": ".1%"}
# calc_diff of a right result: rounding of the format against the same operands in fp32; and of fp8 sums.
ROUNDING = {"bf16": 1e-4, "fp8": 2e-3}
# DeepGEMM's published shapes, torchao's; groups x rows of each x columns x depth.
PUBLISHED = ["4x8192x4096x7168", "4x8192x7168x2048", "8x4096x2048x7168"]
SMALL = ["3x160x256x384"]


@dataclass
class KernelsBenchConfig:
    """Options of `moe-engine bench kernels`."""

    ops: list[str] = field(default_factory=list)  # empty: all
    shapes: list[str] = field(default_factory=list)  # empty: the published ones, on a CPU one small shape
    device: str = "cuda"
    balanced: bool = True  # groups of equal size; false: sizes drawn at random with the same sum
    rounds: int = 30
    warmup: int = 3
    plot: bool = False
    out: str = "bench/kernels"


SCHEMA = KernelsBenchConfig


def help_text() -> str:
    return f"""usage: moe-engine bench kernels [option=value …]

Time single kernels on a GPU beside torch's and, where it is installed, DeepGEMM's. Each candidate's result is checked
before it is timed.

options:
  ops=[]                    of {", ".join(OPS)}; empty: all
  shapes=[{PUBLISHED[0]}]   groups x rows of a group x columns x depth; empty: the published shapes
  balanced=false            group sizes at random instead of equal
  rounds=30 warmup=3        timed calls of each candidate, in turns, each with fresh data; calls before that
  device=cpu                the reference instead of the kernels: exercises the benchmark, says nothing about a GPU
  plot=true                 also plot.svg
  out=bench/kernels         the folder of results; out= writes none

examples:
  moe-engine bench kernels
  moe-engine bench kernels ops=[fprop_fp8] shapes=[4x8192x4096x7168] rounds=100
  moe-engine bench kernels device=cpu rounds=3 out="""


def run(config: KernelsBenchConfig) -> int:
    """Returns 0, or 1 when a kernel of ours gives a wrong result."""
    shapes = _checked(config)
    described = machine.describe([1])  # forks: before anything touches the device
    device = torch.device(config.device)
    ceilings = _ceilings(device)
    described["kernel_ceilings"] = ceilings
    shown = ", ".join(f"{name} {rate / 1e12:.2f} T/s" for name, rate in ceilings.items())
    print(f"{machine.text(described)}\n* measured ceilings of {device.type}: {shown}", flush=True)
    results: list[record.Result] = []
    for text in shapes:
        for op in config.ops or OPS:
            found = _run_case(config, op, _shape(text, config.balanced, device), ceilings)
            results += found
            print(record.table(found, FIGURES), *(r.verdict.text for r in found), sep="\n", flush=True)
    if config.out:
        report = f"# Kernels\n\n{machine.text(described)}\n\n{record.table(results, FIGURES)}\n"
        record.write(Path(config.out), results, described, to_yaml(config), report, config.plot)
        print(f"results in {config.out}")
    return 0 if all(r.verdict.passed for r in results if r.candidate.startswith(OURS)) else 1


def _checked(config: KernelsBenchConfig) -> list[str]:
    """The shapes to run. Raises ConfigError for everything that is wrong."""
    problems = []
    if config.device not in ("cuda", "cpu"):
        problems.append(f"device={config.device}: must be cuda or cpu")
    elif config.device == "cuda" and not torch.cuda.is_available():
        problems.append(
            "device=cuda: there is no CUDA device here; device=cpu times the reference, and "
            "python -m moe_kernels.aot shows what the kernels compile to without a GPU"
        )
    for op in config.ops:
        if op not in OPS:
            problems.append(f"ops=[{op}]: there are {', '.join(OPS)}")
    shapes = config.shapes or (PUBLISHED if config.device == "cuda" else SMALL)
    for text in shapes:
        parts = text.split("x")
        if len(parts) != 4 or not all(part.isdecimal() and int(part) for part in parts):
            problems.append(f"shapes=[{text}]: must be groups x rows x columns x depth, for example {PUBLISHED[0]}")
        elif int(parts[2]) % 256 or int(parts[3]) % 128:
            problems.append(
                f"shapes=[{text}]: columns must be a multiple of 256 and depth of 128, for example {PUBLISHED[0]}"
            )
    for name, smallest in (("rounds", 1), ("warmup", 0)):
        if getattr(config, name) < smallest:
            problems.append(f"{name}={getattr(config, name)}: must be {smallest} or more, for example {name}=30")
    if config.out and Path(config.out).is_file():
        problems.append(f"out={config.out}: is a file; name a folder, for example out=bench/kernels")
    if problems:
        raise ConfigError("\n".join(problems))
    return shapes


def _shape(text: str, balanced: bool, device: torch.device) -> Shape:
    groups, rows, columns, depth = map(int, text.split("x"))
    counts = torch.full((groups,), rows)
    if not balanced:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.multinomial(torch.rand(groups, generator=generator), groups * rows, True, generator=generator)
        counts = torch.bincount(drawn, minlength=groups)
    return Shape(text, groups, groups * rows, columns, depth, counts.to(torch.int32).to(device))


def _operands(shape: Shape, seed: int) -> Operands:
    device = shape.counts.device
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.float32).bfloat16()

    sizes = (shape.rows, shape.depth), (shape.groups, shape.columns, shape.depth), (shape.rows, shape.columns)
    return Operands(shape, *(randn(*size) for size in sizes))


def _ceilings(device: torch.device) -> dict[str, float]:
    """FLOP/s of large dense products of torch by format, and bytes/s of a copy (read and written)."""
    size = 8192 if device.type == "cuda" else 512
    a = torch.randn(size, size, device=device).bfloat16()
    products = {"bf16": lambda: a @ a.T}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        codes, one = a.to(torch.float8_e4m3fn), torch.ones((), device=device)
        products["fp8"] = lambda: torch._scaled_mm(
            codes, codes.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    else:
        wide = a.float()
        products["fp8"] = lambda: wide @ wide.T  # codes are widened to fp32 there
    ceilings = {name: 2.0 * size**3 / min(_times(call, device, 10)) for name, call in products.items()}
    source = torch.ones((1 << 30 if device.type == "cuda" else 1 << 26) // 4, device=device)
    target = torch.empty_like(source)
    moved = 2.0 * source.numel() * 4
    return ceilings | {"copy": moved / min(_times(lambda: target.copy_(source), device, 10))}


def _run_case(config: KernelsBenchConfig, name: str, shape: Shape, ceilings: dict[str, float]) -> list[record.Result]:
    op = OPS[name]
    operands = _operands(shape, seed=0)
    exact = op.exact(operands)
    names, verdicts = [], {}
    for candidate, call in op.candidates(operands).items():
        verdicts[candidate] = _verdict(candidate, call, exact, ROUNDING["fp8" if "fp8" in name else "bf16"])
        if verdicts[candidate].passed:
            names.append(candidate)
    samples: dict[str, list[float]] = {candidate: [] for candidate in verdicts}
    for index, (candidate, call) in enumerate(_calls(op, shape, names, config.warmup + config.rounds)):
        seconds = _times(call, shape.counts.device, 1)[0]
        if index >= config.warmup * len(names):
            samples[candidate].append(seconds)
    settings = {"op": name, "shape": shape.text, "balanced": config.balanced, "device": config.device}
    return [
        record.Result(
            "kernels",
            f"{name} {shape.text}",
            candidate,
            f"{name} {shape.text}",
            samples[candidate],
            verdict,
            _figures(op, shape, samples[candidate], ceilings),
            settings,
        )  # fmt: skip
        for candidate, verdict in verdicts.items()
    ]


def _calls(op: Op, shape: Shape, names: list[str], rounds: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Candidates in turns; every round on fresh data."""
    calls: Candidates = {}
    for index, name in enumerate(record.turns(names, rounds)):
        if index % len(names) == 0:
            calls = op.candidates(_operands(shape, seed=1 + index))
        yield name, calls[name]


def _verdict(name: str, call: Callable[[], Tensor], exact: Tensor, bound: float) -> record.Verdict:
    try:
        result = call().float()
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return record.Verdict(False, f"{name}: {reason}")
    difference = calc_diff(result.double(), exact.double())
    passed = difference < bound  # NaN fails
    return record.Verdict(passed, f"{name}: calc_diff {difference:.1e}, bound {bound:.0e}", {"calc_diff": difference})


def _figures(op: Op, shape: Shape, samples: list[float], ceilings: dict[str, float]) -> dict[str, float]:
    if not samples:
        return {}
    median = record.summarize(samples).median
    if op.bytes_moved is None:
        rate = shape.flops / median
        return {"tflops": rate / 1e12, "share_of_ceiling": rate / ceilings[op.ceiling]}
    rate = op.bytes_moved(shape) / median
    return {"gb_per_s": rate / 1e9, "share_of_ceiling": rate / ceilings[op.ceiling]}


def _times(call: Callable[[], Any], device: torch.device, count: int) -> list[float]:
    """Seconds of `count` calls one by one; on a GPU by its own clock, after one call to warm up where count > 1."""
    if count > 1:
        call()
    seconds = []
    for _ in range(count):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize(device)
            seconds.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
    return seconds
