"""Text and picture show every action at its place in time."""

from __future__ import annotations

from xml.etree import ElementTree

from moe_engine.schedule.action import Kind
from moe_engine.schedule.draw import Panel, svg, timetable
from moe_engine.schedule.schedules import num_stages, schedule
from moe_engine.schedule.simulate import Cost, Simulation, simulate

SVG = "{http://www.w3.org/2000/svg}"


def simulated(name: str, pp: int, micro_batches: int, cost: Cost) -> Simulation:
    return simulate(schedule(name, pp, micro_batches), num_stages(name, pp), cost)


def test_text_is_to_scale_with_dots_for_idle_time() -> None:
    simulation = simulated("1f1b", 2, 2, Cost(f=1, b=2, w=1, fb=3))
    assert timetable(simulation).splitlines() == [
        "rank 0 |F0 F1 ......B0    ...B1    |",
        "rank 1 |...F0 B0    F1 B1    ......|",
    ]


def test_text_names_the_stage_where_a_rank_has_several() -> None:
    text = timetable(simulated("dualpipev", 1, 2, Cost(f=1, b=2, w=1, fb=3))).split("|")[1]
    assert text.split() == ["F0@0", "F0@1", "F1@0", "B0@1", "[F1@1&B0@0]", "B1@1", "I1@0", "W1@0"]


def test_text_fits_every_label_at_odd_times() -> None:
    simulation = simulated("zb_h1", 4, 13, Cost(f=0.3, b=1.7, w=0.61, fb=0, communication=0.05))
    lines = timetable(simulation).splitlines()
    assert len({len(line) for line in lines}) == 1
    for line, actions in zip(lines, simulation.timeline, strict=True):
        words = [word for part in line.split("|")[1].split() for word in part.split(".") if word]
        assert words == [str(timed.action) for timed in actions]


def test_actions_without_duration_are_left_out_of_the_text() -> None:
    simulation = simulated("1f1b", 1, 2, Cost(f=1, b=0, w=0, fb=0))
    assert timetable(simulation) == "rank 0 |F0 F1 |"
    assert timetable(simulated("1f1b", 1, 1, Cost(f=0, b=0, w=0, fb=0))) == "rank 0 ||"


def test_picture_has_a_box_for_every_half_at_its_time() -> None:
    cost = Cost(f=1, b=2, w=1, fb=3)
    simulation = simulated("dualpipe", 4, 8, cost)
    root = ElementTree.fromstring(svg([Panel("dualpipe <4 & 8>", simulation.timeline)], width=1000))
    groups = root.findall(f"{SVG}g")
    timed = [timed for actions in simulation.timeline for timed in actions]
    assert len(groups) == len(timed)
    scale = (1000 - 64 - 8) / simulation.makespan
    for group, shown in zip(groups, timed, strict=True):
        title, boxes = group.find(f"{SVG}title"), group.findall(f"{SVG}rect")
        assert title is not None
        assert title.text == f"{shown.action.text(with_stage=True)}: {shown.start:g} to {shown.end:g}"
        assert len(boxes) == (2 if shown.action.kind is Kind.FB else 1)
        for box in boxes:
            assert abs(float(box.attrib["x"]) - (64 + shown.start * scale)) < 0.01
            assert abs(float(box.attrib["width"]) - (shown.end - shown.start) * scale) < 0.01
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "dualpipe <4 & 8>"
    assert {"rank 0", "rank 3", "F forward", "whole step 26"} <= set(texts)


def test_picture_tells_stages_of_a_rank_apart() -> None:
    simulation = simulated("dualpipe", 4, 8, Cost(f=1, b=2, w=1, fb=3))
    fills: dict[str, set[str]] = {}
    for group in ElementTree.fromstring(svg([Panel("", simulation.timeline)])).findall(f"{SVG}g"):
        title, boxes = group.find(f"{SVG}title"), group.findall(f"{SVG}rect")
        if title is not None and len(boxes) == 1:
            action = (title.text or "").split(":")[0]
            fills.setdefault(action[0] + action[action.index("@") :], set()).add(boxes[0].attrib["fill"])
    assert all(len(colours) == 1 for colours in fills.values())
    shown = [fills[word] for word in ("F@1", "F@2", "B@1", "B@2", "I@2", "W@2")]  # stage 2 is a rank's second
    assert len(set.union(*shown)) == len(shown)


def test_panels_share_one_scale_of_time() -> None:
    fast, slow = (simulated("1f1b", 2, 3, Cost(f=t, b=2 * t, w=t, fb=0)) for t in (1, 2))
    root = ElementTree.fromstring(svg([Panel("fast", fast.timeline), Panel("slow", slow.timeline)], width=1000))
    groups = root.findall(f"{SVG}g")
    assert len(groups) == 2 * len([timed for actions in fast.timeline for timed in actions])
    ends = []
    for half in (groups[: len(groups) // 2], groups[len(groups) // 2 :]):
        boxes = [box for group in half for box in group.findall(f"{SVG}rect")]
        ends.append(max(float(box.attrib["x"]) + float(box.attrib["width"]) for box in boxes))
    assert ends[1] == 1000 - 8 and abs((ends[1] - 64) - 2 * (ends[0] - 64)) < 0.01
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"fast", "slow", "whole step 12", "whole step 24"} <= set(texts)
