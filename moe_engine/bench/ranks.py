"""Run a function on fresh local ranks with a given number of threads each, and bring back what each returns.

Fresh processes, because the number of threads, the peak of memory and the state of allocators belong to a process.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from moe_engine.config.threads import thread_variables
from moe_engine.distributed import groups
from moe_engine.distributed.device import device_of_rank


def run_ranks(world: int, threads: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, device, *args)` on `world` new processes; their results (what JSON can hold) in rank order.

    `function` must be importable by name. An exception in a rank ends all of them and is raised here.
    """
    with tempfile.TemporaryDirectory(prefix="moe-engine-bench-") as name, _threads(threads):
        folder = Path(name)
        start_processes(_rank, (folder, world, threads, function, args), world, start_method="spawn")
        return [json.loads((folder / f"result{rank}").read_text()) for rank in range(world)]


@contextmanager
def _threads(threads: int) -> Iterator[None]:
    """`thread_variables` for the processes started inside."""
    variables = thread_variables(threads)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _rank(rank: int, folder: Path, world: int, threads: int, function: Callable[..., Any], args: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(threads)
    device = device_of_rank()
    groups.start(device, f"file://{folder}/rendezvous")
    try:
        result = function(rank, device, *args)
        (folder / f"result{rank}").write_text(json.dumps(result))
    finally:
        groups.stop()
