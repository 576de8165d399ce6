"""What an executor tells whoever wants to know when things really happened.

Labels name a thing and its place, and a label is open at most once at a time:

    F3@1, B3@1, I3@1, W3@1, [F4@0&B1@1]        an action: kind, micro-batch, stage
    F3@1 attn 0                                 a phase of one block of a half of a pair; `B1@1 mlp 2 W` its weight
                                                gradients; `F3@1 tail` what comes after the last block
    F3@1 dispatch 0                             an exchange, from its enqueueing to the end of the wait for it
    F3@1 dispatch 0 start                       its enqueueing by this thread, which may stand still for the counts
    F3@1 dispatch 0 wait                        the wait for it
    wait for the activation of micro-batch 3 made by stage 0      a message between stages, where it is waited for
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Recorder(Protocol):
    """Anything with these two calls; they are made when things happen, in a pair also by a second thread."""

    def start(self, label: str) -> None: ...

    def end(self, label: str) -> None: ...


@contextmanager
def recorded(recorder: Recorder | None, label: str) -> Iterator[None]:
    """Tell the recorder, if there is one, when the body starts and ends."""
    if recorder is None:
        yield
        return
    recorder.start(label)
    yield
    recorder.end(label)
