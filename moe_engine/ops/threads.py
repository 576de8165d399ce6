"""Independent pieces of work on a CPU, shared out over threads that run one torch operator each at a time.

Torch shares out each operator over its threads. Where work is many small operators, each too small for that, it is
better to share out the pieces. Operators let other Python threads run while they compute.

A thread starts where the one that started it runs, and a scheduler may leave both there for as long as the work takes:
where there are other processors, it is told to use one of these.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def share_out(
    work: Callable[[Sequence[T]], None], pieces: Sequence[T], alone: bool = False, short: bool = False
) -> None:
    """`work(some of the pieces)` on each of torch's threads, this one included; returns when all are done.

    Piece i goes to thread i mod n. Nothing is recorded by autograd. Inside, torch has one thread. An exception in any
    thread is raised here, when all have ended. alone: this thread does all, as it must where there is a device, to
    whose current stream other threads would not add. short: work that takes no longer than threads take to start: this
    one does all, and its operators have no others either.
    """
    if short and torch.get_num_threads() > 1:
        _alone(work, pieces)
        return
    count = 1 if alone else min(torch.get_num_threads(), len(pieces))  # asking also makes the setting this thread's own
    if count <= 1:
        with torch.no_grad():
            work(pieces)
        return
    before, inference, failures = torch.get_num_threads(), torch.is_inference_mode_enabled(), []
    here = _processor()

    def run(first: int) -> None:
        torch.set_num_threads(1)
        if first:
            _leave(here)
        try:
            with torch.inference_mode(inference), torch.no_grad():
                work(pieces[first::count])
        except BaseException as error:  # of whatever kind: it is raised again below
            failures.append(error)

    others = [threading.Thread(target=run, args=(first,)) for first in range(1, count)]
    try:
        for thread in others:
            thread.start()
        run(0)
        for thread in others:
            thread.join()
    finally:  # also where somebody interrupts the wait
        torch.set_num_threads(before)
    if failures:
        raise failures[0]


def _alone(work: Callable[[Sequence[T]], None], pieces: Sequence[T]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            work(pieces)
    finally:
        torch.set_num_threads(before)


def _processor() -> int | None:
    """The one that this thread runs on; None where the system does not tell."""
    ask = _sched_getcpu()
    return None if ask is None else int(ask())


@functools.cache
def _sched_getcpu() -> Callable[[], int] | None:
    return getattr(ctypes.CDLL(None), "sched_getcpu", None) if sys.platform == "linux" else None


def _leave(processor: int | None) -> None:
    """From now on this thread runs on other processors, if it may use any."""
    if processor is None:
        return
    with contextlib.suppress(OSError):  # some containers forbid it
        others = os.sched_getaffinity(0) - {processor}
        if others:
            os.sched_setaffinity(0, others)
