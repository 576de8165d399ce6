"""Run a function on several Gloo ranks and bring back what each returns.

Ranks are forked (0.3 s for eight) and meet through a file, one thread each. A rank that raises, dies or exceeds
the time limit makes the test red within seconds, with every rank's stack in the message: a deadlock is a
failure, not a hang. The limit counts from when the ranks have met: how long that takes depends on what else the machine
does.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # noqa: F401 - torch imports it at a first backward: once, not in each rank
from torch import Tensor

from moe_engine.distributed import groups

START_LIMIT = 120.0  # seconds until all ranks have met
GRACE = 5.0  # seconds for the others, once one has failed, to fail too and leave their stacks


def run_ranks(world: int, function: Callable[..., Any], *args: Any, time_limit: float = 120.0) -> list[Any]:
    """`function(rank, *args)` on `world` ranks; the list of their results. World 1 is forked too."""
    torch.set_num_threads(1)  # a child forked after threaded work in the parent would hang with threads of its own
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        processes = [
            fork.Process(target=_rank, args=(Path(folder), rank, world, function, args, time_limit), daemon=True)
            for rank in range(world)
        ]
        gc.freeze()  # a collection in a rank would touch, and so copy, all that it shares with its parent
        for process in processes:
            process.start()
        gc.unfreeze()
        _wait(processes, Path(folder), time_limit)
        failed = [rank for rank in range(world) if processes[rank].exitcode != 0]
        if failed:
            raise AssertionError(_report(Path(folder), world, failed, time_limit))
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(world)]


def _wait(processes: list[Any], folder: Path, time_limit: float) -> None:
    """Until all end, one fails (the others get a moment to fail too), or time is up."""
    end = time.monotonic() + START_LIMIT + time_limit + GRACE
    while any(p.is_alive() for p in processes) and time.monotonic() < end:
        time.sleep(0.005)
        if any(p.exitcode not in (None, 0) for p in processes):
            end = min(end, time.monotonic() + GRACE)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _rank(folder: Path, rank: int, world: int, function: Callable[..., Any], args: Any, time_limit: float) -> None:
    errors = open(folder / f"errors{rank}", "w")  # noqa: SIM115 - faulthandler needs it open to the end
    faulthandler.enable(errors)  # a communicator's abort
    faulthandler.dump_traceback_later(START_LIMIT, exit=True, file=errors)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        torch.set_num_threads(1)
        groups.start(torch.device("cpu"), f"file://{folder}/rendezvous", timeout_s=START_LIMIT + time_limit)
        if world > 1:
            dist.barrier()  # a rank that ended before another has seen that they are connected would make that one fail
        faulthandler.dump_traceback_later(time_limit, exit=True, file=errors)
        result = function(rank, *args)
        (folder / f"result{rank}").write_bytes(_dumps(result))
        groups.stop()
    except BaseException:
        faulthandler.cancel_dump_traceback_later()  # it would cut into the traceback
        traceback.print_exc(file=errors)
        errors.flush()
        os._exit(1)
    os._exit(0)


class _Pickler(pickle.Pickler):
    """Tensors as their bytes. torch's own way, an archive for each tensor, took a quarter of a small training run."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor:
            return NotImplemented
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (bytearray(flat), value.dtype, value.shape)


def _dumps(result: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(result)
    return buffer.getvalue()


def _tensor(data: bytearray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _report(folder: Path, world: int, failed: list[int], time_limit: float) -> str:
    texts = [f"ranks {failed} of {world} failed or ran past {time_limit} s"]
    for rank in range(world):
        path = folder / f"errors{rank}"
        if path.exists() and path.read_text():
            texts.append(f"--- rank {rank}\n{path.read_text()}")
    return "\n".join(texts)
