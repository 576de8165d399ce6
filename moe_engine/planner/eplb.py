"""Experts to GPUs by their loads, hot ones in several copies: the EPLB algorithm of DeepSeek-V3's deployment.

The report (arXiv 2412.19437, section 3.4) serves with redundant experts; the published algorithm is greedy in three
steps. Groups of experts go to nodes, since node-limited routing sends a token to few groups; within a node, copies are
given one at a time to the expert with the largest load per copy; and the copies go to the node's GPUs. Both packings
are heaviest first, into the lightest pack that has room; the lower index wins a tie.

Copies are for serving and for planning it. Training moves experts without copying them: the same with as many copies
as experts (`rearrange`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_engine.config.errors import ConfigError


@dataclass(frozen=True)
class ExpertCopies:
    """Where the copies of one layer's experts sit.

    experts: the expert in each physical slot, the slots of a GPU one after the other, as many on each;
    loads: what each GPU computes, in the unit of the given weights, when an expert's load is shared by its copies.
    """

    experts: tuple[int, ...]
    loads: tuple[float, ...]

    @property
    def max_over_mean(self) -> float:
        """The busiest GPU's load over the mean; 1 without any load."""
        return max_over_mean(self.loads)

    def slots_of(self, expert: int) -> list[int]:
        """The physical slots that hold a copy of this expert, ascending."""
        return [slot for slot, held in enumerate(self.experts) if held == expert]


def max_over_mean(loads: Sequence[float]) -> float:
    """The largest load over the mean; 1 without any load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def place_copies(weights: Sequence[float], copies: int, groups: int, nodes: int, gpus: int) -> ExpertCopies:
    """Slots for `copies` copies in all, at least one of each expert, of one layer with loads `weights` [E].

    groups: of experts, contiguous, as in the router; where `nodes` does not divide them, experts go to any GPU.
    Raises ConfigError for sizes that do not fit together.
    """
    _check(len(weights), copies, groups, nodes, gpus)
    if groups % nodes:
        groups = nodes = 1
    per_group, per_node, per_gpu = len(weights) // groups, copies // nodes, copies // gpus
    group_loads = [sum(weights[g * per_group : (g + 1) * per_group]) for g in range(groups)]
    slots: list[int] = []
    for held in pack(group_loads, nodes):
        experts = [group * per_group + i for group in held for i in range(per_group)]
        slots_of_node = replicate([weights[expert] for expert in experts], per_node)
        share = [weights[experts[i]] / slots_of_node.count(i) for i in slots_of_node]
        for on_gpu in pack(share, gpus // nodes):
            slots += [experts[slots_of_node[slot]] for slot in on_gpu]
    count = {expert: slots.count(expert) for expert in set(slots)}
    loads = [sum(weights[e] / count[e] for e in slots[g * per_gpu : (g + 1) * per_gpu]) for g in range(gpus)]
    return ExpertCopies(tuple(slots), tuple(loads))


def pack(weights: Sequence[float], packs: int) -> list[list[int]]:
    """Items to packs of equal size, heaviest first, each to the lightest pack with room: the items of each pack.

    Packs of one item keep the items' order. The number of packs must divide that of items.
    """
    room = len(weights) // packs
    if room == 1:
        return [[item] for item in range(packs)]
    found: list[list[int]] = [[] for _ in range(packs)]
    loads = [0.0] * packs
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        lightest = min((p for p in range(packs) if len(found[p]) < room), key=lambda p: loads[p])
        found[lightest].append(item)
        loads[lightest] += weights[item]
    return found


def replicate(weights: Sequence[float], copies: int) -> list[int]:
    """Which expert each copy is of: every expert once, in order, then those with the largest load per copy."""
    found, count = list(range(len(weights))), [1] * len(weights)
    for _ in range(copies - len(weights)):
        busiest = max(range(len(weights)), key=lambda i: weights[i] / count[i])
        found.append(busiest)
        count[busiest] += 1
    return found


def rearrange(loads: Sequence[float], now: Sequence[int], ranks: int, groups: int = 1, nodes: int = 1) -> list[int]:
    """A rank for each expert, as many on each, so that the ranks' loads even out.

    loads [E]; now [E]: the rank where each expert is. The ranks of a node are contiguous, and with `groups` that
    `nodes` divides a group's experts stay together on one node. Where ranks hold equal numbers their names are free
    (within a node; with one group to a node also nodes'): they are given so that many experts stay where they are.
    The answer is `now` where that is already as even.
    """
    if groups % nodes:
        groups = nodes = 1
    copies = place_copies(loads, len(loads), groups, nodes, ranks)
    per_rank, per_node = len(loads) // ranks, ranks // nodes
    packs = [set(copies.experts[r * per_rank : (r + 1) * per_rank]) for r in range(ranks)]
    held = [{expert for expert, rank in enumerate(now) if rank == r} for r in range(ranks)]
    on_nodes = [set().union(*packs[n * per_node : (n + 1) * per_node]) for n in range(nodes)]
    held_by_nodes = [set().union(*held[n * per_node : (n + 1) * per_node]) for n in range(nodes)]
    found = [0] * len(loads)
    for source, target in enumerate(_names(on_nodes, held_by_nodes)):
        theirs = packs[source * per_node : (source + 1) * per_node]
        for pack_, rank in enumerate(_names(theirs, held[target * per_node : (target + 1) * per_node])):
            for expert in theirs[pack_]:
                found[expert] = target * per_node + rank
    before = [sum(load for load, rank in zip(loads, now, strict=True) if rank == r) for r in range(ranks)]
    return found if max(copies.loads) < max(before) else list(now)


def _names(packs: Sequence[set[int]], held: Sequence[set[int]]) -> list[int]:
    """A name for each pack, none twice, those with the most in common with what `held[name]` has first."""
    common = [(-len(pack_ & there), p, name) for p, pack_ in enumerate(packs) for name, there in enumerate(held)]
    names: dict[int, int] = {}
    for _, p, name in sorted(common):
        if p not in names and name not in names.values():
            names[p] = name
    return [names[p] for p in range(len(packs))]


def _check(experts: int, copies: int, groups: int, nodes: int, gpus: int) -> None:
    problems = []
    if experts % groups:
        problems.append(f"groups={groups}: must divide the {experts} experts; use groups=1")
    if gpus % nodes:
        problems.append(f"nodes={nodes}: must divide the {gpus} GPUs; use nodes=1")
    if copies % gpus or copies < experts:
        enough = -(-max(experts, copies) // gpus) * gpus
        problems.append(
            f"copies={copies}: must be {experts} or more and a multiple of the {gpus} GPUs; use copies={enough}"
        )
    if problems:
        raise ConfigError("\n".join(problems))
