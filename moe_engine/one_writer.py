"""One run at a time writes a folder: whoever writes it holds a lock on the folder itself.

The lock is the system's (flock) and ends with the process, however that ends; nothing lies in the folder for it. Where
a file system has no locks, all may write.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def hold(folder: Path) -> int | None:
    """A descriptor that holds the folder until it is closed; None where another holds it. The folder must be there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # a file system without locks
        pass
    return descriptor


def is_held(folder: Path) -> bool:
    """Whether a run that goes on writes the folder."""
    descriptor = hold(folder) if folder.is_dir() else -1
    if descriptor is not None and descriptor >= 0:
        os.close(descriptor)
    return descriptor is None
