"""In which order blocks of queries meet tiles of keys where keys are more than one tile, and which blocks go together.

On an edge blocks are small, to skip what is not seen. Elsewhere a few of them meet a tile together: products of more
rows read each key less often.

Forward takes the tile of a query's own place first, and notes that tile's greatest score. The softmax needs a number near the
greatest score only so that nothing overflows, so further tiles are not searched for a greater one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from moe_engine.ops.visible import KEY_TILE, Step, Visible

JOINED = 2  # blocks that go together


class Run(NamedTuple):
    """Neighbouring queries, at most `JOINED` blocks of them, and all steps of theirs, in the order of forward."""

    queries: slice
    steps: list[Step]


def forward_runs(visible: Visible, row: int, group: int) -> list[Run]:
    """All queries of a row that see a key, where `group` query heads share keys."""
    steps = visible.steps_of(row, group)
    return visible.once(("runs", id(steps)), lambda: list(_runs(visible, steps, JOINED * visible.query_block(group))))


def backward_steps(visible: Visible, row: int, group: int) -> list[Step]:
    """Tile by tile, so that the gradients of a tile's keys stay in the cache."""
    steps = visible.steps_of(row, group)
    by_tile = sorted(steps, key=lambda step: step.keys.start // KEY_TILE)
    most = JOINED * visible.query_block(group)
    return visible.once(("by tile", id(steps)), lambda: list(_joined(by_tile, most)))


def _runs(visible: Visible, steps: list[Step], most: int) -> Iterator[Run]:
    run: list[Step] = []
    for step in steps:
        if run and (step.queries.start > run[-1].queries.stop or step.queries.stop - run[0].queries.start > most):
            yield _run(visible, run, most)
            run = []
        run.append(step)
    if run:
        yield _run(visible, run, most)


def _run(visible: Visible, steps: list[Step], most: int) -> Run:
    begun, known = set(), set()  # the starts of blocks
    found = []
    for step in sorted(steps, key=lambda step: -(step.keys.start // KEY_TILE)):
        queries, keys = step.queries, step.keys
        found.append(step._replace(first=queries.start not in begun, known=queries.start in known))
        begun.add(queries.start)
        own = visible.each_sees_itself and keys.start <= queries.start and queries.stop <= keys.stop
        if own or step.edge is None:  # each query sees a key of these
            known.add(queries.start)
    return Run(slice(steps[0].queries.start, steps[-1].queries.stop), list(_joined(found, most)))


def _joined(steps: Iterable[Step], most: int) -> Iterator[Step]:
    """Steps of neighbouring blocks that see all of the same keys become one, of `most` queries at most."""
    last: Step | None = None
    for step in steps:
        if last is not None:
            queries = slice(last.queries.start, step.queries.stop)
            alike = step._replace(queries=queries) == last._replace(queries=queries) and step.edge is None
            if alike and last.queries.stop == step.queries.start and queries.stop - queries.start <= most:
                last = last._replace(queries=queries)
                continue
            yield last
        last = step
    if last is not None:
        yield last
