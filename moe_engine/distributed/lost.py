"""Who is missing when an exchange fails.

A rank that dies takes the others' exchanges with it, and a backend's error names a socket at best. So whoever sees an
exchange fail says so in the store where the ranks once met, and looks who else did: a living rank's own exchanges fail
within moments too, and it comes as well. Who does not come is named.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

ROLL_CALL_S = 5.0  # how long the others have to come
TIME_LIMIT_S = 600.0  # of an exchange


class RankLostError(RuntimeError):
    """An exchange failed; the message names it, and the ranks that no longer answer.

    timed_out: nothing was lost that a backend could see; somebody stands still.
    """

    def __init__(self, message: str, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


def wait_until(done: Callable[[], bool], what: str, ranks: Sequence[int], limit_s: float = TIME_LIMIT_S) -> None:
    """Stand still until `done()`, for an exchange `what` among `ranks` that no backend watches.

    Raises RankLostError if that takes longer than the limit.
    """
    end = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end:
            raise explain(what, ranks, TimeoutError(f"not done after {limit_s:g} s"))
        time.sleep(1e-4)


def explain(what: str, ranks: Sequence[int], error: Exception) -> RankLostError:
    """The error to raise for a failed exchange `what` among `ranks`."""
    reason = str(error).partition("\n")[0]
    timed_out = isinstance(error, TimeoutError) or re.search("time(d )?out", reason, re.IGNORECASE) is not None
    try:
        silent = _roll_call(ranks)
    except (RuntimeError, ValueError) as failure:
        return RankLostError(
            f"{what}: {reason}; nor does the place where the ranks met ({str(failure).splitlines()[0]})",
            timed_out,
        )
    if silent:
        who = f"rank {silent[0]} no longer answers" if len(silent) == 1 else f"ranks {silent} no longer answer"
        return RankLostError(f"{what}: {who} ({reason})", timed_out)
    return RankLostError(f"{what}: {reason}; all of its ranks still answer", timed_out)


def _roll_call(ranks: Sequence[int]) -> list[int]:
    """Those of `ranks` that have not come in time."""
    store: Any = getattr(dist.distributed_c10d, "_get_default_store")()  # noqa: B009 - torch types it as its own
    store.set(f"roll call {dist.get_rank()}", "here")
    silent, end = list(ranks), time.monotonic() + ROLL_CALL_S
    while True:  # once at least, however long this process has stood still meanwhile
        silent = [rank for rank in silent if not store.check([f"roll call {rank}"])]
        if not silent or time.monotonic() > end:
            return silent
        time.sleep(0.05)
