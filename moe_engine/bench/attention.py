"""The core attention of a CPU beside torch's own fused one: forward and backward, by length, heads and dtype.

A case is one set of heads, a length and a dtype; rows are as many as make up `tokens`, at least one. Both candidates
get the same queries, keys and values. torch's flash path wants equal head sizes, so values are padded to the size
of queries: without, it would make all scores. Results of the first key-value head of the first row are compared with
the formula in fp64 before anything is timed; then the candidates take turns, a forward and a backward each.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.bench import compare, machine, record
from moe_engine.bench.ranks import run_ranks
from moe_engine.bench.truth import BOUNDS, beside_fp64
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import to_yaml
from moe_engine.model.core_attention import fused_attention
from moe_engine.ops.attention import attention
from moe_engine.ops.visible import whole_rows

OURS = "moe_engine"
TORCH = "torch_sdpa"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FIGURES = {"gflops": ".0f"}
TRUTH_QUERIES = 512  # queries at a time in the fp64 formula


@dataclass
class AttentionBenchConfig:
    """Options of `moe-engine bench attention`."""

    lengths: list[int] = field(default_factory=lambda: [256, 512, 1024, 2048, 4096, 8192])
    # queries x keys (heads) x size of queries and keys x size of values: those of peer_33m, and grouped ones
    heads: list[str] = field(default_factory=lambda: ["16x16x192x128", "16x4x128x128"])
    dtypes: list[str] = field(default_factory=lambda: ["fp32", "bf16"])
    tokens: int = 1024
    threads: list[int] = field(default_factory=lambda: [1, 2])
    rounds: int = 6
    warmup: int = 1
    out: str = "bench/attention"


SCHEMA = AttentionBenchConfig


def help_text() -> str:
    return """usage: moe-engine bench attention [option=value …]

Time the blocked attention that a CPU uses, forward and backward, beside torch's scaled dot product attention with
values padded so that its flash path runs. Causal. Each candidate's result is checked before it is timed. Ends with a
line for each case: how many times as fast as torch, forward and backward together, with an interval, and what it shows.

options:
  lengths=[256,512,1024,2048,4096,8192]
  heads=[16x16x192x128,16x4x128x128]   query heads x key heads x size of queries and keys x size of values
  dtypes=[fp32,bf16]
  tokens=1024               rows are as many as make up this number, at least one
  threads=[1,2]             threads of the one process
  rounds=6 warmup=1         timed calls of each candidate, in turns; calls before that. Six give an interval
  out=bench/attention       the folder of results; out= writes none

examples:
  moe-engine bench attention
  moe-engine bench attention lengths=[256] dtypes=[bf16] threads=[2] rounds=20 out="""


def run(config: AttentionBenchConfig) -> int:
    """Returns 0, or 1 when a candidate's results are wrong."""
    _check(config)
    described = machine.describe(config.threads)
    print(machine.text(described), flush=True)
    results: list[record.Result] = []
    ratios: list[str] = []
    cases = itertools.product(config.threads, config.heads, config.dtypes, config.lengths)
    for threads, heads, dtype, length in cases:
        found = _run_case(config, threads, heads, dtype, length)
        shown = _shown(found)
        print(record.table(found, FIGURES), *(r.verdict.text for r in found[:2]), *shown, sep="\n", flush=True)
        results, ratios = results + found, ratios + shown
    lines = "\n".join(f"* {line}" for line in ratios)
    print(f"\n{lines}")
    if config.out:
        report = f"# Attention\n\n{machine.text(described)}\n\n{record.table(results, FIGURES)}\n\n{lines}\n"
        record.write(Path(config.out), results, described, to_yaml(config), report)
        print(f"results in {config.out}")
    return 0 if all(result.verdict.passed for result in results) else 1


def _check(config: AttentionBenchConfig) -> None:
    problems = []
    for text in config.heads:
        parts = text.split("x")
        if len(parts) != 4 or not all(part.isdecimal() and int(part) for part in parts):
            problems.append(f"heads=[{text}]: must be query heads x key heads x size x size, as in 16x16x192x128")
        elif int(parts[0]) % int(parts[1]) or int(parts[3]) > int(parts[2]):
            problems.append(
                f"heads=[{text}]: key heads must divide query heads, and values be no larger than queries, "
                "as in 16x4x128x128"
            )
    for name in config.dtypes:
        if name not in DTYPES:
            problems.append(f"dtypes=[{name}]: there are {', '.join(DTYPES)}")
    # A query that sees one key alone has no gradient that a candidate's could be held against.
    for name, numbers, least in (("lengths", config.lengths, 2), ("threads", config.threads, 1)):
        problems += [
            f"{name}=[{n}]: must be {least} or more, for example {name}=[{least}]" for n in numbers if n < least
        ]
    for name, smallest in (("tokens", 1), ("rounds", 1), ("warmup", 0)):
        if getattr(config, name) < smallest:
            problems.append(
                f"{name}={getattr(config, name)}: must be {smallest} or more, for example {name}={smallest}"
            )
    for name in ("lengths", "threads", "heads", "dtypes"):
        if not getattr(config, name):
            problems.append(f"{name}=[]: nothing to measure; use {name}={getattr(AttentionBenchConfig(), name)[:1]}")
    if config.out and Path(config.out).is_file():
        problems.append(f"out={config.out}: is a file; name a folder, for example out=bench/attention")
    if problems:
        raise ConfigError("\n".join(problems))


def _run_case(config: AttentionBenchConfig, threads: int, heads: str, dtype: str, length: int) -> list[record.Result]:
    """Forward of each candidate, then backward of each."""
    H, G, d, e = map(int, heads.split("x"))
    rows = max(1, config.tokens // length)
    sizes = [rows, length, H, G, d, e]
    (measured,) = run_ranks(1, threads, measure, sizes, dtype, config.warmup, config.rounds)
    # Of the pairs that are seen: 2 products of forward; 4 of backward, as many as cannot be done without.
    pairs = rows * H * length * (length + 1) / 2
    flops = {"forward": 2 * pairs * (d + e), "backward": 4 * pairs * (d + e)}
    results = []
    for phase, of_phase in flops.items():
        case = f"{phase} {dtype} {heads} {rows}x{length} threads={threads}"
        for name, verdict in measured["verdicts"].items():
            samples = [sample[phase] for sample in measured["samples"][name]]
            figures = {"gflops": of_phase / record.summarize(samples).median / 1e9} if samples else {}
            settings = {"heads": heads, "dtype": dtype, "length": length, "rows": rows, "threads": threads}
            results.append(
                record.Result("attention", case, name, case, samples, record.Verdict(**verdict), figures, settings)
            )
    return results


def measure(rank: int, device: torch.device, sizes: list[int], dtype: str, warmup: int, rounds: int) -> dict[str, Any]:
    """Verdicts, and for each candidate the seconds of its forwards and backwards."""
    rows, S, H, G, d, e = sizes
    chance = torch.Generator().manual_seed(S)
    shapes = (rows, S, H, d), (rows, S, G, d), (rows, S, G, e), (rows, S, H, e)
    q, k, v, d_out = (torch.randn(*shape, generator=chance).to(DTYPES[dtype]) for shape in shapes)
    visible, scale = whole_rows(S), d**-0.5
    candidates = {
        OURS: lambda q, k, v: attention(q, k, v, visible, scale),
        TORCH: lambda q, k, v: fused_attention(q, k, v, scale),
    }
    truth = _formula(q, k, v, d_out, scale)
    verdicts = {name: _verdict(name, call, (q, k, v), d_out, truth, BOUNDS[dtype]) for name, call in candidates.items()}
    right = [name for name in candidates if verdicts[name].passed]
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in candidates}
    for index, name in enumerate(record.turns(right, warmup + rounds)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        start = time.perf_counter()
        out = candidates[name](*leaves)
        middle = time.perf_counter()
        torch.autograd.grad(out, leaves, d_out)
        end = time.perf_counter()
        if index >= warmup * len(right):
            samples[name].append({"forward": middle - start, "backward": end - middle})
    return {"verdicts": {name: asdict(verdict) for name, verdict in verdicts.items()}, "samples": samples}


def _formula(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, scale: float) -> list[Tensor]:
    """Output and gradients of q, k, v of the first key head of the first row, in fp64, some queries at a time."""
    group, S = q.shape[2] // k.shape[2], q.shape[1]
    q, d_out = (x[0, :, :group].double() for x in (q, d_out))
    k, v = k[0, :, 0].double(), v[0, :, 0].double()
    out, d_q, d_k, d_v = torch.empty_like(d_out), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for head in range(group):
        for start in range(0, S, TRUTH_QUERIES):
            part, keys = slice(start, start + TRUTH_QUERIES), slice(0, min(start + TRUTH_QUERIES, S))
            scores = q[part, head] @ k[keys].T * scale
            later = torch.ones_like(scores, dtype=torch.bool).triu_(start + 1)
            p = scores.masked_fill_(later, float("-inf")).softmax(dim=1)
            out[part, head], d_p = p @ v[keys], d_out[part, head] @ v[keys].T
            d_scores = (d_p - (p * d_p).sum(dim=1, keepdim=True)) * p * scale
            d_q[part, head] = d_scores @ k[keys]
            d_k[keys] += d_scores.T @ q[part, head]
            d_v[keys] += p.T @ d_out[part, head]
    return [out, d_q, d_k, d_v]


def _verdict(
    name: str, call: Callable[..., Tensor], inputs: tuple[Tensor, ...], d_out: Tensor, truth: list[Tensor], bound: float
) -> record.Verdict:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = call(*leaves)
    d_q, d_k, d_v = torch.autograd.grad(out, leaves, d_out)
    group = inputs[0].shape[2] // inputs[1].shape[2]
    found = {
        "out": out.detach()[0, :, :group],
        "d_q": d_q[0, :, :group],
        "d_k": d_k[0, :, 0],
        "d_v": d_v[0, :, 0],
    }
    return beside_fp64(name, found, truth, bound)


def _shown(results: list[record.Result]) -> list[str]:
    """How many times as fast as torch a case of `_run_case` is: by phases, and by a call of each, with an interval."""
    if not all(result.samples for result in results):
        return []
    forward, torch_forward, backward, torch_backward = (result.samples for result in results)
    ours = [a + b for a, b in zip(forward, backward, strict=True)]
    theirs = [a + b for a, b in zip(torch_forward, torch_backward, strict=True)]
    phases = [compare.ratio_of(forward, torch_forward, True), compare.ratio_of(backward, torch_backward, True)]
    both, best = compare.ratio_of(ours, theirs, paired=True), min(theirs) / min(ours)
    enough = len(ours) >= compare.MIN_SAMPLES
    verdict = "not shown"
    if enough and both.low > 1:
        verdict = "faster"
    elif enough and both.high < 1:
        verdict = "slower"
    interval = f"95%: {both.low:.2f} … {both.high:.2f}" if enough else f"rounds={compare.MIN_SAMPLES} give an interval"
    case = results[0].case.removeprefix("forward ")
    return [
        f"{case}: {verdict}, {both.ratio:.2f}x as fast as torch ({interval}; best {best:.2f}x; "
        f"forward {phases[0].ratio:.2f}x, backward {phases[1].ratio:.2f}x)"
    ]
