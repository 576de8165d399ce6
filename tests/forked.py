"""Run a command of the engine in a process of its own that need not load torch again: it is forked from this one.

Also whether a process, whoever started it, has ended.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

import torch

from moe_engine.__main__ import main


def run_command(folder: Path, *words: str, time_limit: float = 240.0) -> tuple[int, str]:
    """Exit code and all output of `moe-engine *words`, started in `folder`. The time limit is in seconds."""
    torch.set_num_threads(1)  # a child forked after threaded work in the parent would hang with threads of its own
    output = folder / "output.txt"
    child = os.fork()
    if child == 0:
        _run(folder, output, words)
    end = time.monotonic() + time_limit
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.02)
    if ended[0] == 0:
        os.kill(child, 9)
        ended = os.waitpid(child, 0)
    text = output.read_text()
    output.unlink()
    return os.waitstatus_to_exitcode(ended[1]), text


def _run(folder: Path, output: Path, words: tuple[str, ...]) -> None:
    code = 1
    try:
        os.chdir(folder)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for standard in (1, 2):
            os.dup2(file, standard)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115 - to the end
        code = main(list(words))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def gone(pid: int) -> bool:
    """Whether a process has ended, its parent knowing it or not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:  # it has ended meanwhile; where a system has no such files, it has not
        return Path("/proc/self").exists()
