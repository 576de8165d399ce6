"""From what two ranks recorded of a step: how long each exchange took, and how long it held a rank up.

Both ranks run on one machine and read one clock. An exchange is under way once both ranks have enqueued it: before
that, a rank that waits waits for the other one, which no order of its own phases could change. That time is counted
apart, as `late`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

LABEL = re.compile(r"([FB])(\d+)@(\d+) (dispatch|combine) (\d+)")

Event = tuple[str, float, float]  # label, start, end
Spans = dict[str, tuple[float, float]]


@dataclass
class ExchangeTimes:
    """Seconds, by kind (`combine(B)` …), of one rank in one step; an entry for each exchange of that kind.

    flight: from when it was under way to the end of the wait for it; still: in which the rank stood still for it.
    Exchanges of the first forward and the last backward, which are outside pairs, are apart. late: in all, standing
    still because the other rank had not come so far.
    """

    flight: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    still: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    flight_outside: float = 0.0
    still_outside: float = 0.0
    late: float = 0.0


def exchange_times(own: Iterable[Event], peer: Iterable[Event], micro_batches: int, blocks: int) -> ExchangeTimes:
    """Of the rank with the events `own`, beside those of the other rank, in one step of `overlapped_1f1b` at pp=1."""
    mine, theirs = _spans(own), _spans(peer)
    times = ExchangeTimes()
    for label, (enqueued, end) in mine.items():
        match = LABEL.fullmatch(label)
        if match is None:
            continue
        half, micro_batch, _, phase, _ = match.groups()
        under_way = max(enqueued, theirs[label][0])
        still = late = 0.0
        for part, since in (("start", _counts_sent(match, theirs, blocks)), ("wait", under_way)):
            begin, finish = mine.get(f"{label} {part}", (0.0, 0.0))
            still += max(0.0, finish - max(begin, since))
            late += max(0.0, min(finish, since) - begin)
        times.late += late
        if int(micro_batch) > 0 if half == "F" else int(micro_batch) < micro_batches - 1:
            times.flight[f"{phase}({half})"].append(end - under_way)
            times.still[f"{phase}({half})"].append(still)
        else:
            times.flight_outside += end - under_way
            times.still_outside += still
    return times


def _spans(events: Iterable[Event]) -> Spans:
    return {label: (start, end) for label, start, end in events}


def _counts_sent(match: re.Match[str], theirs: Spans, blocks: int) -> float:
    """When the other rank sent the counts that an enqueueing may stand still for.

    Those of a dispatch(F) are its own; a dispatch(B) starts after the dispatch(F) that the pair has before it.
    """
    half, micro_batch, stage, phase, block = match.groups()
    if phase != "dispatch":
        return 0.0
    if half == "B":
        micro_batch, block = str(int(micro_batch) + 1), str(blocks - 1 - int(block))
    return theirs.get(f"F{micro_batch}@{stage} attn {block}", (0.0, 0.0))[1]


def total(times: Sequence[ExchangeTimes], what: str) -> float:
    """Seconds of `flight` or `still` in pairs, summed over a step, the mean of several."""
    return sum(sum(map(sum, getattr(each, what).values())) for each in times) / len(times)
