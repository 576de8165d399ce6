"""Proves that the lists of a schedule are legal, or says exactly what is wrong with them.

The proof is against the machine that will run them, the pipeline executor: each rank walks its list; it posts the
receives of its next action before it runs the present one; it sends an output as soon as it exists, and sending never
blocks; it waits for an input at the action that uses it. Messages travel on one channel per (directed edge between two
ranks, activation | gradient), in the order in which they were sent, and carry no name: the receiver takes the next
one. So two things can go wrong between ranks: a channel is read in another order than it is written (data of another
micro-batch, silently), or ranks wait for each other in a circle.

Inside a rank, the gradients of one stage must be summed in the order of the micro-batches: floating-point sums depend
on it, and the engine promises the same bits from every schedule.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moe_engine.schedule.action import Action, Item, Kind, Output, inputs, outputs

Lists = Sequence[Sequence[Action]]  # one list per rank


class ScheduleError(ValueError):
    """A schedule that the executor could not run correctly. The message names ranks, positions and actions."""


class Slot(NamedTuple):
    """A place in the lists."""

    rank: int
    position: int


class Channel(NamedTuple):
    """One ordered stream of messages; `output` is ACTIVATION or GRADIENT."""

    source: int
    destination: int
    output: Output

    def __str__(self) -> str:
        return f"{self.output.value} channel from rank {self.source} to rank {self.destination}"


@dataclass(frozen=True)
class Report:
    """What a legal schedule holds in memory, per rank.

    peak_activations: micro-batches and stages held between their F and their B or I; in a pair the forward adds before
    the backward frees, so both count. peak_weight_gradients: those in the queue between their I and their W.
    peak_held: the largest sum of the two; with a split backward, memory is free only after W.
    """

    peak_activations: list[int]
    peak_weight_gradients: list[int]
    peak_held: list[float]


def check(lists: Lists, num_stages: int, micro_batches: int) -> Report:
    """Prove the lists legal for `num_stages` stages and micro-batches 0 … `micro_batches`-1.

    Raises ScheduleError: an action missing, twice, or out of range; forward and backward of a micro-batch on different
    ranks; an action before what it needs on the same rank; gradients summed out of order; a channel read in another
    order than written; a deadlock.
    """
    made_at = producers(lists)
    _check_complete(lists, made_at, num_stages, micro_batches)
    _check_local_order(lists, made_at, num_stages)
    _check_sum_order(lists)
    _check_channels(lists, made_at, num_stages)
    execution_order(lists, num_stages)
    return count_memory(lists)


def producers(lists: Lists) -> dict[Item, Slot]:
    """Where each thing is made. Raises ScheduleError if something is made twice."""
    made_at: dict[Item, Slot] = {}
    for rank, actions in enumerate(lists):
        for index, action in enumerate(actions):
            for item in outputs(action):
                if item in made_at:
                    first, second = _where(lists, made_at[item]), _where(lists, Slot(rank, index))
                    raise ScheduleError(f"the {item} is made twice: by {first} and by {second}")
                made_at[item] = Slot(rank, index)
    return made_at


def rank_of_work(lists: Lists) -> dict[tuple[int, int], int]:
    """The rank whose list has the work of (stage, micro-batch); where a stage has several holders, one of them."""
    return {
        (half.stage, half.micro_batch): rank
        for rank, actions in enumerate(lists)
        for action in actions
        for half in action.halves()
    }


def sent(lists: Lists, num_stages: int) -> dict[Channel, list[Item]]:
    """The messages of each channel, in the order in which the source sends them."""
    channel_of = {item: channel for channel, items in received(lists, num_stages).items() for item in items}
    channels = defaultdict(list)
    for actions in lists:
        for action in actions:
            for item in outputs(action):
                if item in channel_of:
                    channels[channel_of[item]].append(item)
    return dict(channels)


def received(lists: Lists, num_stages: int) -> dict[Channel, list[Item]]:
    """The messages of each channel, in the order in which the destination takes them."""
    made_at = producers(lists)
    channels = defaultdict(list)
    for rank, actions in enumerate(lists):
        for action in actions:
            for item in inputs(action, num_stages):
                source = _maker(made_at, item).rank
                if source != rank:
                    channels[Channel(source, rank, item.output)].append(item)
    return dict(channels)


def execution_order(lists: Lists, num_stages: int) -> list[Slot]:
    """An order of all actions in which each comes after what it needs and after those before it on its rank.

    Raises ScheduleError, with what each stuck rank waits for, if there is none: a deadlock.
    """
    made_at = producers(lists)
    done: set[Slot] = set()
    order: list[Slot] = []
    next_index = [0] * len(lists)
    ready = deque(range(len(lists)))
    waiting: dict[Slot, list[int]] = defaultdict(list)  # ranks, by what they wait for
    while ready:
        rank = ready.popleft()
        while next_index[rank] < len(lists[rank]):
            slot = Slot(rank, next_index[rank])
            makers = [_maker(made_at, item) for item in inputs(lists[rank][slot.position], num_stages)]
            missing = next((maker for maker in makers if maker not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            done.add(slot)
            order.append(slot)
            next_index[rank] += 1
            ready.extend(waiting.pop(slot, ()))
    if len(order) < sum(len(actions) for actions in lists):
        raise ScheduleError("deadlock: " + "; ".join(_waits(lists, made_at, done, next_index, num_stages)))
    return order


def _waits(
    lists: Lists, made_at: dict[Item, Slot], done: set[Slot], next_index: list[int], num_stages: int
) -> list[str]:
    """One sentence for each rank that cannot go on."""
    sentences = []
    for rank, actions in enumerate(lists):
        if next_index[rank] < len(actions):
            slot = Slot(rank, next_index[rank])
            item = next(item for item in inputs(actions[slot.position], num_stages) if made_at[item] not in done)
            sentences.append(f"{_where(lists, slot)} waits for the {item}, made by {_where(lists, made_at[item])}")
    return sentences


def _check_complete(lists: Lists, made_at: dict[Item, Slot], num_stages: int, micro_batches: int) -> None:
    """Every micro-batch passes every stage, forward and backward, on one rank; nothing else is in the lists."""
    for item, slot in made_at.items():
        if not (0 <= item.stage < num_stages and 0 <= item.micro_batch < micro_batches):
            raise ScheduleError(
                f"{_where(lists, slot)} is out of range: stages are 0 to {num_stages - 1}, "
                f"micro-batches 0 to {micro_batches - 1}"
            )
    for micro_batch in range(micro_batches):
        for stage in range(num_stages):
            slots = [_maker(made_at, Item(output, micro_batch, stage)) for output in Output]
            if len({slot.rank for slot in slots}) > 1:
                places = ", ".join(_where(lists, slot) for slot in slots)
                raise ScheduleError(
                    f"micro-batch {micro_batch} of stage {stage} is spread over ranks, and what its forward saved "
                    f"does not travel: {places}"
                )


def _check_local_order(lists: Lists, made_at: dict[Item, Slot], num_stages: int) -> None:
    """What an action needs from its own rank stands before it (the two halves of a pair run at the same time)."""
    for rank, actions in enumerate(lists):
        for index, action in enumerate(actions):
            for item in inputs(action, num_stages):
                slot = made_at[item]
                if slot.rank == rank and slot.position >= index:
                    raise ScheduleError(
                        f"{_where(lists, Slot(rank, index))} needs the {item}, "
                        f"which is not made before {_where(lists, slot)}"
                    )


def _check_sum_order(lists: Lists) -> None:
    """Each rank makes the gradients of each stage in the order of the micro-batches."""
    for rank, actions in enumerate(lists):
        latest: dict[tuple[Output, int], int] = {}
        for index, action in enumerate(actions):
            for item in outputs(action):
                key = (item.output, item.stage)
                if item.output is not Output.ACTIVATION and latest.get(key, -1) > item.micro_batch:
                    raise ScheduleError(
                        f"{_where(lists, Slot(rank, index))} makes the {item} after that of micro-batch "
                        f"{latest[key]}: gradients are summed in the order of the micro-batches"
                    )
                latest[key] = item.micro_batch


def _check_channels(lists: Lists, made_at: dict[Item, Slot], num_stages: int) -> None:
    """The receiver takes the messages of a channel in the order in which the sender makes them."""
    in_order_sent = sent(lists, num_stages)
    for channel, taken in received(lists, num_stages).items():
        for position, (wanted, arriving) in enumerate(zip(taken, in_order_sent[channel], strict=True)):
            if wanted != arriving:
                raise ScheduleError(
                    f"{channel}, message {position}: the receiver wants the {wanted}, "
                    f"but {_where(lists, made_at[arriving])} sends the {arriving}"
                )


def count_memory(lists: Lists, activation: float = 1, weight_gradient: float = 1) -> Report:
    """The report alone, nothing proven: walk each list with two counters, of activations and of queued gradients.

    activation, weight_gradient: the sizes of one of each, for `peak_held` in bytes, say. What a W needs is held from
    its I on, recompute or not; recompute makes the activation smaller.
    """
    report = Report([], [], [])
    for actions in lists:
        live = queued = peak_live = peak_queued = 0
        peak_held: float = 0
        for action in actions:
            for half in action.halves():
                if half.kind is Kind.F:
                    live += 1
                elif half.kind is Kind.W:
                    queued -= 1
                else:
                    live -= 1
                    queued += half.kind is Kind.I
                peak_live, peak_queued = max(peak_live, live), max(peak_queued, queued)
                peak_held = max(peak_held, live * activation + queued * weight_gradient)
        report.peak_activations.append(peak_live)
        report.peak_weight_gradients.append(peak_queued)
        report.peak_held.append(peak_held)
    return report


def _maker(made_at: dict[Item, Slot], item: Item) -> Slot:
    """Where the item is made. Raises ScheduleError if nowhere."""
    if item not in made_at:
        raise ScheduleError(f"no action makes the {item}")
    return made_at[item]


def _where(lists: Lists, slot: Slot) -> str:
    """`F3@1 (rank 1, action 4)`."""
    return f"{lists[slot.rank][slot.position].text(with_stage=True)} (rank {slot.rank}, action {slot.position})"
