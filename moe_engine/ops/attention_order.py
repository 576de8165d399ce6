"""In which order blocks of queries meet tiles of keys where keys are more than one tile, and which blocks go together.

On an edge blocks are small, to skip what is not seen. Elsewhere a few of them meet a tile together: products of more
rows read each key less often, and less time goes into calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from moe_engine.ops.visible import KEY_TILE, Step, Visible


class Run(NamedTuple):
    """Neighbouring queries and all steps of theirs."""

    queries: slice
    steps: list[Step]


def runs_of(visible: Visible, row: int, group: int) -> list[Run]:
    """All queries of a row that see a key, where `group` query heads share keys."""
    steps, most = visible.steps_of(row, group), visible.run_length(group)
    return visible.once(("runs", id(steps)), lambda: list(_runs(steps, most)))


def _runs(steps: list[Step], most: int) -> Iterator[Run]:
    run: list[Step] = []
    for step in steps:
        if run and (step.queries.start > run[-1].queries.stop or step.queries.stop - run[0].queries.start > most):
            yield _run(run, most)
            run = []
        run.append(step)
    if run:
        yield _run(run, most)


def _run(steps: list[Step], most: int) -> Run:
    found, begun = [], set()
    for step in sorted(steps, key=lambda step: step.keys.start // KEY_TILE):
        found.append(step._replace(first=step.queries.start not in begun))
        begun.add(step.queries.start)
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
