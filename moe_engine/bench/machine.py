"""The machine a benchmark ran on, and what it can do at best, measured there and then.

No peak is taken from a table: a share of a ceiling in a report is a share of these measurements. Rates are the best
of several repetitions, since whatever else runs on the machine can only make one slower.

    matrix_flops      FLOP/s of a square matrix product, by dtype and number of threads
    copy_bytes        bytes/s of a copy between two buffers larger than any cache, read and written counted
    send_bytes        bytes/s from one local process to another, one message at a time
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_engine.bench.ranks import run_ranks
from moe_engine.distributed.collectives import Communicator
from moe_engine.distributed.groups import world_communicator
from moe_engine.metrics import environment

MATRIX_SIZE = 1024
COPY_BYTES = 1 << 28
SEND_BYTES = 1 << 25
REPETITIONS = 8
DTYPES = ("float32", "bfloat16", "float64")


def describe(threads: Sequence[int] | None = None) -> dict[str, Any]:
    """Versions, processor and measured ceilings, for each number of threads (default: 1 and all cores)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ceilings: dict[str, Any] = {"matrix_flops": {}, "copy_bytes": {}}
    for number in sorted(set(threads or (1, cores))):
        (rates,) = run_ranks(1, number, _rates)
        ceilings["matrix_flops"][str(number)] = rates["matrix_flops"]
        ceilings["copy_bytes"][str(number)] = rates["copy_bytes"]
    ceilings["send_bytes"] = run_ranks(2, 1, _send_rate)[0]
    return {**environment(), "cpu": _processor(), "cores": cores, "memory_bytes": _memory(), "ceilings": ceilings}


def text(machine: dict[str, Any]) -> str:
    """The description as Markdown lines."""
    ceilings = machine["ceilings"]
    lines = [
        f"* {machine['cpu']}, {machine['cores']} cores, {machine['cpu_capability']}, torch {machine['torch']}, "
        f"{machine['platform']}" + (f", {machine['gpu']}" if machine["gpu"] else "")
    ]
    for threads, rates in ceilings["matrix_flops"].items():
        shown = ", ".join(f"{dtype} {rate / 1e9:.0f}" for dtype, rate in rates.items())
        copied = ceilings["copy_bytes"][threads] / 1e9
        lines.append(f"* {threads} thread(s): {shown} GFLOP/s in matrix products; copy {copied:.1f} GB/s")
    lines.append(f"* between two local processes: {ceilings['send_bytes'] / 1e9:.2f} GB/s")
    return "\n".join(lines)


def _rates(rank: int, device: torch.device) -> dict[str, Any]:
    flops = {}
    for dtype in DTYPES:
        a = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device).to(getattr(torch, dtype))
        b, out = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device).to(a.dtype), torch.empty_like(a)
        flops[dtype] = 2.0 * MATRIX_SIZE**3 / _best(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device)  # type: ignore[misc]
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.zeros_like(source)
    return {"matrix_flops": flops, "copy_bytes": 2.0 * COPY_BYTES / _best(lambda: target.copy_(source), device)}


def _send_rate(rank: int, device: torch.device) -> float:
    world = world_communicator(rank, 2)
    payload = torch.zeros(SEND_BYTES // 4, device=device)

    def send() -> None:
        """There, and one number back: the way back is the proof of arrival."""
        receipt = payload[:1]
        if rank == 0:
            world.send(payload, 1, tag=0).wait()
            world.receive(receipt.clone(), 1, tag=1).wait()
        else:
            world.receive(payload, 0, tag=0).wait()
            world.send(receipt, 0, tag=1).wait()

    return SEND_BYTES / _best(send, device, world)


def _best(function: Callable[[], Any], device: torch.device, world: Communicator | None = None) -> float:
    """Seconds of the fastest of some repetitions, after one to warm up."""
    best = float("inf")
    for _ in range(REPETITIONS + 1):
        if world is not None:
            world.barrier()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _processor() -> str:
    """The processor's name, which Python's own `platform` does not tell on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> int | None:
    """Bytes of main memory; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
