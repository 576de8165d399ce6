"""What a process must find in its environment when it loads torch, to compute with a number of threads."""

from __future__ import annotations

import os

SPINS = 3000  # about a tenth of a millisecond: operators of a step follow one another faster


def thread_variables(threads: int) -> dict[str, str]:
    """The variables, by name; how long threads wait only where nobody has said it.

    An idle thread of GNU's OpenMP looks for work some milliseconds before it sleeps. So long it holds a core against
    work that `ops.threads` shares out, and against other processes that one of its own threads waits for.
    """
    found = {"OMP_NUM_THREADS": str(threads)}
    if threads > 1 and "OMP_WAIT_POLICY" not in os.environ:
        found["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", str(SPINS))
    return found
