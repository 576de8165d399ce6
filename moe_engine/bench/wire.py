"""A benchmark's two ranks, one at each end of a wire of known rate, and what each has found.

Each is a process of its own in a network namespace (`namespaces`), `python -m MODULE job.json`, and calls `on_rank`.
The job goes to it, and what it found comes back, as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from moe_engine.bench.namespaces import TwoHosts
from moe_engine.distributed import groups

PORT = "29511"  # of a namespace: nobody else's
TIME_LIMIT_S = 900.0


def run_over_wire(module: str, job: Mapping[str, Any], rate_mbit: float, burst_kb: int) -> list[Any]:
    """What both ranks found, in rank order. Raises RuntimeError where one fails, ConfigError as `TwoHosts`."""
    with (
        tempfile.TemporaryDirectory(prefix="moe-engine-bench-") as folder,
        TwoHosts(rate_mbit, burst_kb=burst_kb) as hosts,
    ):
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        ranks = []
        for rank in (0, 1):
            env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
            env |= {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": PORT, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            ranks.append(hosts.run(rank, [sys.executable, "-m", module, str(path)], env))
        codes = [rank.wait(TIME_LIMIT_S) for rank in ranks]
        if any(codes):
            raise RuntimeError(f"the ranks ended with exit codes {codes}; what they wrote is above")
        return [json.loads(Path(f"{path}.rank{rank}").read_text()) for rank in (0, 1)]


def on_rank(path: str, measure: Callable[[int, dict[str, Any]], Any]) -> None:
    """In a rank that `run_over_wire` has started with `path`: `measure(rank, job)`, and tell it what that gives."""
    torch.set_num_threads(1)
    job = json.loads(Path(path).read_text())
    rank = groups.start(torch.device("cpu"), timeout_s=120.0)
    try:
        result = measure(rank, job)
    finally:
        groups.stop()
    Path(f"{path}.rank{rank}").write_text(json.dumps(result))
