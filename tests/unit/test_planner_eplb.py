"""EPLB: published values, optimality on small sizes, and experts that move only where it helps."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from moe_engine.config.errors import ConfigError
from moe_engine.planner.eplb import max_over_mean, pack, place_copies, rearrange, replicate

# The example of EPLB's README: 12 experts, 16 copies, 4 groups, 2 nodes, 8 GPUs.
PUBLISHED = [
    (
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        1.2081,
    ),
    (
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
        1.2422,
    ),
]


@pytest.mark.parametrize(("weights", "experts", "ratio"), PUBLISHED)
def test_published_values(weights: list[int], experts: list[int], ratio: float) -> None:
    found = place_copies(weights, copies=16, groups=4, nodes=2, gpus=8)
    assert list(found.experts) == experts
    assert found.max_over_mean == pytest.approx(ratio, abs=5e-5)
    assert sum(found.loads) == pytest.approx(sum(weights))


@pytest.mark.parametrize("sizes", [(256, 288, 8, 4, 32), (256, 320, 8, 1, 320), (60, 64, 6, 4, 16), (8, 8, 1, 1, 8)])
def test_every_expert_has_a_slot_and_groups_stay_on_their_node(sizes: tuple[int, int, int, int, int]) -> None:
    experts, copies, groups, nodes, gpus = sizes
    chance = random.Random(experts)
    weights = [chance.expovariate(1.0) for _ in range(experts)]
    found = place_copies(weights, copies, groups, nodes, gpus)
    assert len(found.experts) == copies and set(found.experts) == set(range(experts))
    assert found.slots_of(3) == [slot for slot in range(copies) if found.experts[slot] == 3]
    if groups % nodes == 0:
        node_of = {e: slot // (copies // nodes) for slot, e in enumerate(found.experts)}
        for slot, expert in enumerate(found.experts):
            assert slot // (copies // nodes) == node_of[expert]
        for group in range(groups):
            size = experts // groups
            assert len({node_of[e] for e in range(group * size, (group + 1) * size)}) == 1
    assert found.max_over_mean < max_over_mean([sum(weights[i::gpus]) for i in range(gpus)]) or copies == gpus


def test_copies_go_to_the_largest_load_per_copy() -> None:
    assert replicate([10, 4, 9], 3) == [0, 1, 2]
    assert replicate([10, 4, 9], 6) == [0, 1, 2, 0, 2, 0]  # 10, 9, then 10/2 before 9/2 and 4
    assert replicate([5, 5], 3) == [0, 1, 0]


def test_packing_is_heaviest_first_with_ties_to_the_lower_index() -> None:
    assert pack([1, 5, 3, 3], 2) == [[1, 0], [2, 3]]
    assert pack([2, 2, 2, 2], 2) == [[0, 2], [1, 3]]
    assert pack([9, 1, 5], 3) == [[0], [1], [2]]


def test_wrong_sizes_are_told_together() -> None:
    with pytest.raises(ConfigError) as told:
        place_copies([1.0] * 12, copies=13, groups=5, nodes=3, gpus=8)
    assert str(told.value).splitlines() == [
        "groups=5: must divide the 12 experts; use groups=1",
        "nodes=3: must divide the 8 GPUs; use nodes=1",
        "copies=13: must be 12 or more and a multiple of the 8 GPUs; use copies=16",
    ]


def loads_of(ranks: list[int], weights: list[float], size: int) -> list[float]:
    return [sum(w for w, r in zip(weights, ranks, strict=True) if r == rank) for rank in range(size)]


@pytest.mark.parametrize("seed", range(20))
def test_rearranged_ranks_hold_equal_numbers_and_are_never_less_even(seed: int) -> None:
    chance = random.Random(seed)
    weights = [chance.expovariate(1.0) for _ in range(24)]
    now = [i // 6 for i in range(24)]
    chance.shuffle(now)
    found = rearrange(weights, now, ranks=4)
    assert sorted(found) == sorted(now)
    assert max(loads_of(found, weights, 4)) <= max(loads_of(now, weights, 4))
    # Either nearly even, or the heaviest expert is alone with the lightest ones.
    lightest = sorted(weights)
    assert max(loads_of(found, weights, 4)) <= max(1.15 * sum(weights) / 4, lightest[-1] + sum(lightest[:5]) + 1e-9)
    assert rearrange(weights, found, ranks=4) == found  # nothing moves twice


def test_small_sizes_come_near_the_best_there_is() -> None:
    chance = random.Random(5)
    for _ in range(20):
        weights = [chance.expovariate(1.0) for _ in range(6)]
        found = rearrange(weights, [0, 0, 0, 1, 1, 1], ranks=2)
        best = min(max(loads_of(list(p), weights, 2)) for p in permutations([0, 0, 0, 1, 1, 1]))
        assert max(loads_of(found, weights, 2)) <= 1.25 * best


def test_few_experts_move() -> None:
    weights = [8.0, 7.0, 2.0, 1.0, 3.0, 3.0, 6.0, 6.0]
    now = [0, 0, 1, 1, 2, 2, 3, 3]
    found = rearrange(weights, now, ranks=4)
    assert loads_of(found, weights, 4) == [9.0, 9.0, 9.0, 9.0]
    assert sum(a != b for a, b in zip(now, found, strict=True)) == 4
    even = [1.0] * 8
    assert rearrange(even, now, ranks=4) == now


def test_groups_stay_together_on_a_node() -> None:
    chance = random.Random(1)
    weights = [chance.expovariate(1.0) for _ in range(32)]
    found = rearrange(weights, [i // 4 for i in range(32)], ranks=8, groups=4, nodes=2)
    nodes = [{found[e] // 4 for e in range(8 * g, 8 * g + 8)} for g in range(4)]
    assert all(len(each) == 1 for each in nodes)
    anywhere = rearrange(weights, [i // 4 for i in range(32)], ranks=8, groups=1, nodes=2)
    assert sorted(anywhere) == sorted(found)
    assert max(loads_of(anywhere, weights, 8)) <= max(loads_of(found, weights, 8))
