"""`moe-engine train` starts local ranks for real: they meet, and their failures and Ctrl-C end all of them.

The job that the ranks run is replaced (a `sitecustomize` on PYTHONPATH puts a stand-in for moe_engine.job into each
of them), so that a rank can be made to fail at will; everything before and around the job is real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import gone

JOB = """
import os, sys, time, types

def train(config):
    from moe_engine.config.errors import ConfigError
    rank, mode = int(os.environ["RANK"]), os.environ["MODE"]
    print("rank", rank, "of", os.environ["WORLD_SIZE"], "threads", os.environ["OMP_NUM_THREADS"], flush=True)
    marks = [os.path.join(os.environ["MARKS"], f"started{r}") for r in range(2)]
    with open(marks[rank], "w") as file:
        file.write(str(os.getpid()))
    while not all(os.path.exists(mark) for mark in marks):  # both run before one fails
        time.sleep(0.05)
    if mode == "meet":
        import torch.distributed as dist
        dist.init_process_group("gloo")
        everyone = [None] * 2
        dist.all_gather_object(everyone, rank)
        print("met", everyone, flush=True)
        dist.destroy_process_group()
    if mode == "mistake":
        raise ConfigError("run.resume=true: nothing to go on from; use run.resume=false")
    if mode == "one fails":
        if rank == 1:
            raise ZeroDivisionError("seeded")
        time.sleep(1000)
    if mode == "one is killed":
        print("last words of", rank, file=sys.stderr, flush=True)
        if rank == 1:
            os.kill(os.getpid(), 9)
        time.sleep(1000)
    if mode == "one is killed while another waits for it":
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), 9)
        dist.all_reduce(torch.ones(1))
    if mode == "wait":
        time.sleep(1000)

job = types.ModuleType("moe_engine.job")
job.train = train
sys.modules["moe_engine.job"] = job
"""


THREADS = min(3, os.cpu_count() or 1)


class Started:
    """A `moe-engine train` of two ranks, in a process group and a temporary folder of its own."""

    def __init__(self, folder: Path, mode: str) -> None:
        (folder / "sitecustomize.py").write_text(JOB)
        self.marks = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        given = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in given}
        environment |= {"PYTHONPATH": str(folder), "MODE": mode, "MARKS": str(folder), "TMPDIR": str(self.temporary)}
        words = ["train", "parallel.dp=2", "parallel.ep=2", f"train.threads={THREADS}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moe_engine", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        try:
            out, err = self.process.communicate(timeout=240)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.returncode, out, err

    def pids(self) -> list[int]:
        """The ranks' process ids, once both run."""
        end = time.monotonic() + 240
        files = [self.marks / f"started{rank}" for rank in range(2)]
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < end and self.process.poll() is None, "the ranks did not start"
            time.sleep(0.05)
        return [int(file.read_text()) for file in files]


def test_ranks_meet_and_only_rank_0_writes_to_the_terminal(tmp_path: Path) -> None:
    started = Started(tmp_path, "meet")
    assert started.wait() == (0, f"rank 0 of 2 threads {THREADS}\nmet [0, 1]\n", "")
    assert list(started.temporary.iterdir()) == []


def test_a_mistake_found_by_the_ranks_is_told_once(tmp_path: Path) -> None:
    started = Started(tmp_path, "mistake")
    code, _, err = started.wait()
    assert code == 2
    assert err == "run.resume=true: nothing to go on from; use run.resume=false\n"
    assert list(started.temporary.iterdir()) == []


def test_the_failure_of_one_rank_ends_all(tmp_path: Path) -> None:
    started = Started(tmp_path, "one fails")
    pids = started.pids()
    code, _, err = started.wait()
    assert code == 1
    assert err.startswith("rank 1 failed first:\nTraceback")
    assert err.count("Traceback") == 1 and "ZeroDivisionError: seeded\n" in err
    assert all(gone(pid) for pid in pids)


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_is_told_with_its_last_words(tmp_path: Path) -> None:
    started = Started(tmp_path, "one is killed")
    pids = started.pids()
    code, _, err = started.wait()
    assert code == 1
    assert "rank 1 was killed by SIGKILL: often because memory ran out\nlast words of 1\n" in err
    assert "rank 0 was killed" not in err and "Traceback" not in err
    assert all(gone(pid) for pid in pids)


def test_a_killed_rank_is_told_and_not_those_that_lost_it(tmp_path: Path) -> None:
    """As when memory runs out in a step: the others fail in their communication, sooner than the launcher looks."""
    started = Started(tmp_path, "one is killed while another waits for it")
    pids = started.pids()
    code, _, err = started.wait()
    assert code == 1
    assert err.startswith("rank 1 was killed by SIGKILL: often because memory ran out\n")
    assert "rank 0" not in err and "Traceback" not in err
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_an_interrupt_ends_all_ranks_quietly(tmp_path: Path, number: signal.Signals, code: int) -> None:
    started = Started(tmp_path, "wait")
    pids = started.pids()
    if number == signal.SIGINT:
        os.killpg(started.process.pid, number)  # as Ctrl-C does
    else:
        started.process.send_signal(number)
    assert started.wait() == (code, f"rank 0 of 2 threads {THREADS}\n", "interrupted: all ranks have ended\n")
    assert all(gone(pid) for pid in pids)
    assert list(started.temporary.iterdir()) == []
