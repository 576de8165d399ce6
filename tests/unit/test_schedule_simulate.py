"""Simulated times against published formulas, reference numbers and published bubble rates."""

from __future__ import annotations

import pytest

from moe_engine.config.errors import ConfigError
from moe_engine.schedule.action import Action, Kind
from moe_engine.schedule.check import ScheduleError, check
from moe_engine.schedule.schedules import num_stages, schedule
from moe_engine.schedule.simulate import Cost, Simulation, formula_bubble, simulate

UNIT = Cost(f=1, b=2, w=1, fb=3)


def simulated(name: str, pp: int, micro_batches: int, cost: Cost = UNIT, virtual_stages: int = 1) -> Simulation:
    lists = schedule(name, pp, micro_batches, virtual_stages)
    return simulate(lists, num_stages(name, pp, virtual_stages), cost)


@pytest.mark.parametrize(
    ("name", "pp", "micro_batches", "makespan", "idle", "activations"),
    [
        ("1f1b", 8, 20, 81, 21, 8),
        ("zb_h1", 8, 20, 67, 7, 8),
        ("dualpipe", 8, 20, 66, 6, 9),
        ("dualpipe", 4, 8, 26, 2, 5),
        ("dualpipev", 4, 10, 66, 6, 9),
        ("dualpipev", 1, 2, 12, 0, 3),
    ],
)
def test_reference_numbers(name: str, pp: int, micro_batches: int, makespan: int, idle: int, activations: int) -> None:
    simulation = simulated(name, pp, micro_batches)
    assert simulation.makespan == makespan
    assert simulation.idle == [idle] * pp
    assert simulation.bubble == [idle / makespan] * pp
    assert max(simulation.peak_activations) == activations


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("extra", [0, 1, 7])
@pytest.mark.parametrize("cost", [UNIT, Cost(f=3, b=8, w=2, fb=0)], ids=["equal parts", "unequal parts"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_fill_and_drain_cost_one_forward_and_backward_per_stage(name: str, cost: Cost, pp: int, extra: int) -> None:
    simulation = simulated(name, pp, pp + extra, cost)
    assert simulation.idle == [(pp - 1) * (cost.f + cost.b)] * pp == [formula_bubble(name, pp, cost)] * pp


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_fewer_micro_batches_than_stages_only_widen_the_bubble_fraction(micro_batches: int) -> None:
    simulation = simulated("1f1b", 4, micro_batches)
    assert simulation.idle == [9] * 4
    assert simulation.makespan == 9 + 3 * micro_batches


@pytest.mark.parametrize("virtual_stages", [1, 2, 4])
def test_interleaving_divides_the_bubble(virtual_stages: int) -> None:
    part = Cost(f=8 / virtual_stages, b=16 / virtual_stages, w=8 / virtual_stages, fb=0)
    simulation = simulated("interleaved_1f1b", 4, 8, part, virtual_stages)
    assert simulation.idle == [3 * 24 / virtual_stages] * 4
    assert formula_bubble("interleaved_1f1b", 4, part) == 3 * 24 / virtual_stages
    assert simulation.makespan == 8 * 24 + 3 * 24 / virtual_stages


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("cost", [UNIT, Cost(f=4, b=7, w=3, fb=0), Cost(f=5, b=7, w=3, fb=0)])
def test_zb_h1_hides_two_weight_gradients_per_stage(pp: int, cost: Cost) -> None:
    simulation = simulated("zb_h1", pp, 3 * pp, cost)
    assert (
        simulation.idle == [(pp - 1) * (cost.f + cost.b - 2 * cost.w)] * pp == [formula_bubble("zb_h1", pp, cost)] * pp
    )


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("extra", [-1, 0, 6])
def test_zbv_idles_only_while_the_pipeline_fills(pp: int, extra: int) -> None:
    simulation = simulated("zbv", pp, 2 * pp + extra)
    assert simulation.idle == [pp - 1] * pp
    assert [actions[0].start for actions in simulation.timeline] == list(range(pp))


@pytest.mark.parametrize(("name", "pp"), [("dualpipe", pp) for pp in (2, 4, 8, 16)] + [("dualpipev", 3)])
@pytest.mark.parametrize("extra", [0, 2, 10])
def test_dualpipe_idles_by_its_formula(name: str, pp: int, extra: int) -> None:
    stages = num_stages(name, pp)
    expected = (stages // 2 - 1) * (UNIT.fb + UNIT.b - 3 * UNIT.w)
    assert simulated(name, pp, 2 * pp + extra).idle == [expected] * pp == [formula_bubble(name, pp, UNIT)] * pp


def test_test_only_schedules_and_zbv_have_no_formula() -> None:
    assert formula_bubble("split_1f1b", 4, UNIT) is None
    assert formula_bubble("zbv", 4, UNIT) is None


# "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), rates of table 5 with the profiled times of table 6, in ms:
# stages, micro-batches, forward, input gradient, weight gradient, message, published bubble rate.
PUBLISHED = [
    ("1f1b", 8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431),
    ("1f1b", 8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985),
    ("1f1b", 8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091),
    ("1f1b", 16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082),
    ("1f1b", 32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646),
    ("zb_h1", 8, 24, 18.522, 18.086, 9.337, 0.601, 0.1585),
    ("zb_h1", 8, 32, 29.802, 29.428, 19.53, 0.577, 0.1045),
    ("zb_h1", 16, 128, 11.325, 11.308, 8.109, 0.378, 0.0576),
    ("zb_h1", 32, 96, 10.419, 10.207, 7.715, 0.408, 0.1421),
]


@pytest.mark.parametrize(("name", "pp", "micro_batches", "f", "i", "w", "communication", "rate"), PUBLISHED)
def test_published_bubble_rates(
    name: str, pp: int, micro_batches: int, f: float, i: float, w: float, communication: float, rate: float
) -> None:
    simulation = simulated(name, pp, micro_batches, Cost(f, i + w, w, 0, communication))
    assert simulation.bubble == pytest.approx([rate] * pp, abs=1e-4)


def test_a_message_delays_only_what_comes_from_another_rank() -> None:
    cost = Cost(f=1, b=2, w=1, fb=3, communication=0.5)
    ((first, *_), (second, *_)) = simulated("gpipe", 2, 1, cost).timeline
    assert (first.start, first.end, second.start, second.end) == (0, 1, 1.5, 2.5)
    on_one_rank = simulated("interleaved_1f1b", 1, 1, cost, virtual_stages=2)
    assert on_one_rank.makespan == 6


def test_the_pieces_of_a_backward_take_its_time() -> None:
    cost = Cost(f=1, b=5, w=2, fb=4)
    assert [cost.of(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.FB)] == [1, 5, 3, 2, 4]


def test_peaks_are_those_of_the_report() -> None:
    lists = schedule("dualpipe", 4, 10)
    assert simulate(lists, 4, UNIT).peak_activations == check(lists, 4, 10).peak_activations


def test_impossible_costs_are_refused() -> None:
    with pytest.raises(ConfigError, match="cost.f=-1: .* use 0 or more"):
        Cost(f=-1, b=2, w=1, fb=3)
    with pytest.raises(ConfigError, match="cost.w=3: .* cost.b=2; use cost.w=2 or less"):
        Cost(f=1, b=2, w=3, fb=3)


def test_a_deadlock_has_no_time() -> None:
    waits = [Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)]
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate([waits], 1, UNIT)
