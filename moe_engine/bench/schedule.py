"""Schedules as they run, beside what the simulator says: the real executor and messages, computation replaced by sleep.

For each number of ranks and each schedule, local ranks run whole passes over the action lists (see `timed_stage`). All
schedules cut the same model: `cost` are the times of 1/pp of it, in units of `unit_s` seconds, and a schedule with
finer stages gets its share. The delay of one message, a thing of the machine and its load, is measured just before
and given to the simulator. A step lasts from the first rank's start to the last one's end. Before anything is timed,
one pass is checked: every stage must have seen every micro-batch's backward once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from moe_engine.bench import machine, record
from moe_engine.bench.ranks import run_ranks
from moe_engine.bench.timed_stage import Sleep, timed_stages
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import to_yaml
from moe_engine.distributed.groups import Groups, build_groups
from moe_engine.layout import Layout, Placement, StageSpec
from moe_engine.model.batch import Batch, ItemCounts
from moe_engine.model.transformer import LossRule, Stage
from moe_engine.pipeline.executor import Executor
from moe_engine.schedule import schedules
from moe_engine.schedule.check import Lists
from moe_engine.schedule.compare import TEST_ONLY, share_of_cost
from moe_engine.schedule.simulate import Cost, simulate

ROW_FLOATS = 256  # a message is rows of this many fp32 numbers
PINGS = 21
FIGURES = {
    "message_ms": ".2f",
    "simulated_s": ".3f",
    "over_simulated": "+.1%",
    "bubble_simulated": ".1%",
    "over_1f1b": "+.1%",
}


@dataclass
class ScheduleBenchConfig:
    """Options of `moe-engine bench schedule`."""

    compute: str = "timed"  # timed: sleeps in place of computation
    ranks: list[int] = field(default_factory=lambda: [2, 4, 8])
    schedules: list[str] = field(default_factory=list)  # empty: all
    micro_batches: int = 0  # 0: twice the ranks
    cost: Cost = field(default_factory=lambda: Cost(f=1.0, b=2.0, w=1.0, fb=3.0))  # of 1/pp of the model
    unit_s: float = 0.06  # seconds that a cost of 1 takes
    message_kib: int = 64  # size of what crosses a stage border
    rounds: int = 3  # timed passes of each schedule
    within: float = 0.05  # how far a step may be from the simulated one
    out: str = "bench/schedule"


SCHEMA = ScheduleBenchConfig


def help_text() -> str:
    return f"""usage: moe-engine bench schedule [option=value …]

Run every schedule's real executor and messages on local ranks, with computation replaced by calibrated sleeps, and
compare the time of a step with the simulator's. (With real computation, ranks that share cores give idle time away.)

options:
  compute=timed             sleeps in place of computation
  ranks=[2,4,8]             numbers of pipeline ranks
  schedules=[1f1b,dualpipe] which; left out: {", ".join(_all_names())}
  micro_batches=0           micro-batches of a step; 0: twice the ranks
  cost.f=1 cost.b=2 cost.w=1   forward, full backward, its weight gradient: of 1/pp of the model, in units
  unit_s=0.06               seconds of a unit
  message_kib=64            size of a message between stages
  rounds=3                  timed steps of each
  within=0.05               exit code 1 if a median step is further than this from the simulated one
  out=bench/schedule        the folder of results; out= writes none

examples:
  moe-engine bench schedule compute=timed
  moe-engine bench schedule ranks=[8] schedules=[1f1b,zbv,dualpipe] micro_batches=24"""


def run(config: ScheduleBenchConfig) -> int:
    """Returns 0, or 1 where a schedule ran wrongly or a step is not `within` of its simulation."""
    _check_options(config)
    described = machine.describe([1])
    print(machine.text(described))
    results: list[record.Result] = []
    for pp in config.ranks:
        found = run_case(config, pp)
        results += found
        print(f"\n{record.table(found, FIGURES)}", flush=True)
    off = [
        each
        for each in results
        if not each.verdict.passed or abs(each.figures.get("over_simulated", 0.0)) > config.within
    ]
    largest = max((abs(each.figures["over_simulated"]) for each in results if each.samples), default=0.0)
    line = f"steps are within {largest:.1%} of the simulated ones"
    line += f"; too far or wrong: {', '.join(f'{each.candidate} {each.case}' for each in off)}" if off else ""
    print(f"\n{line}")
    if config.out:
        report = f"# Schedules with sleeping stages\n\n{record.table(results, FIGURES)}\n\n{line}\n"
        record.write(Path(config.out), results, described, to_yaml(config), report)
        print(f"results in {config.out}")
    return 1 if off else 0


def _all_names() -> list[str]:
    return [name for name in schedules.names() if name not in TEST_ONLY]


def _check_options(config: ScheduleBenchConfig) -> None:
    problems = []
    if config.compute != "timed":
        problems.append(f"compute={config.compute}: no such choice; there is timed")
    for name in ("unit_s", "within"):
        if not getattr(config, name) > 0:
            problems.append(f"{name}={getattr(config, name)}: must be larger than 0, for example {name}=0.05")
    for name in ("message_kib", "rounds"):
        if getattr(config, name) < 1:
            problems.append(f"{name}={getattr(config, name)}: must be 1 or more, for example {name}=3")
    if config.micro_batches < 0:
        problems.append(f"micro_batches={config.micro_batches}: must be 0 or more; 0 is twice the ranks")
    problems += [f"ranks={config.ranks}: each must be 1 or more, for example ranks=[2,4]"] * (
        not config.ranks or min(config.ranks) < 1
    )
    for name in config.schedules:
        if name not in schedules.names():
            problems.append(f"schedules=[{name}]: no such schedule; there are {', '.join(schedules.names())}")
    if problems:
        raise ConfigError("\n".join(problems))
    for pp in config.ranks:
        for name in config.schedules:  # one asked for by name must run; of all, those that cannot are left out
            schedules.schedule(name, pp, _micro_batches(config, pp), _virtual_stages(name))


def _micro_batches(config: ScheduleBenchConfig, pp: int) -> int:
    return config.micro_batches or 2 * pp


def _virtual_stages(name: str) -> int:
    return 2 if name == "interleaved_1f1b" else 1


def run_case(config: ScheduleBenchConfig, pp: int) -> list[record.Result]:
    """Every schedule on `pp` ranks."""
    micro_batches = _micro_batches(config, pp)
    names = []
    for name in config.schedules or _all_names():
        try:
            schedules.schedule(name, pp, micro_batches, _virtual_stages(name))
            names.append(name)
        except ConfigError as error:
            print(f"not at this size: {error.lines[0]}")
    cost = config.cost
    seconds = Cost(*(config.unit_s * each for each in (cost.f, cost.b, cost.w, cost.f + cost.b)))
    rows = max(1, config.message_kib * 1024 // (4 * ROW_FLOATS))
    settings = [names, pp, micro_batches, [seconds.f, seconds.b, seconds.w, seconds.fb], rows, config.rounds]
    ranks = run_ranks(pp, 1, timed_rank, settings)
    case = f"{pp} ranks, {micro_batches} micro-batches"
    results = [_result(case, name, number, ranks, pp, micro_batches, seconds) for number, name in enumerate(names)]
    plain = next((each for each in results if each.candidate == "1f1b" and each.samples), None)
    for each in results if plain else []:
        assert plain is not None
        each.figures["over_1f1b"] = _median(each) / _median(plain) - 1
    return results


def _result(
    case: str, name: str, number: int, ranks: Sequence[Any], pp: int, micro_batches: int, seconds: Cost
) -> record.Result:
    """One schedule's samples from what its ranks brought back."""
    lists, num_stages, _ = _layout(name, pp, micro_batches)
    own = [rank[number] for rank in ranks]
    cost = replace(share_of_cost(seconds, pp, num_stages), communication=own[0]["message"])
    simulation = simulate(lists, num_stages, cost)
    passed = all(each["right"] for each in own)
    verdict = record.Verdict(passed, "every stage saw every micro-batch's backward once" if passed else "wrong counts")
    passes = zip(*(each["passes"] for each in own), strict=True)
    samples = [max(end for _, end in each) - min(start for start, _ in each) for each in passes] if passed else []
    result = record.Result("schedule", case, name, case, samples, verdict)
    result.figures.update(message_ms=1e3 * cost.communication, simulated_s=simulation.makespan)
    if samples:
        result.figures["over_simulated"] = _median(result) / simulation.makespan - 1
        result.figures["bubble_simulated"] = max(simulation.bubble)
    return result


def _median(result: record.Result) -> float:
    return record.summarize(result.samples).median


def timed_rank(rank: int, device: torch.device, settings: Sequence[Any]) -> list[dict[str, Any]]:
    """One rank of all passes: for each schedule whether it ran right, start and end of each timed pass, and the
    seconds that a message took (on ranks 0 and 1)."""
    names, pp, micro_batches, seconds, rows, rounds = settings
    sleep = Sleep.calibrated()
    runners = []
    for name in names:
        lists, num_stages, placement = _layout(name, pp, micro_batches)
        groups = build_groups(Layout(pp=pp), placement, rank)
        cost = share_of_cost(Cost(*seconds), pp, num_stages)
        stages = timed_stages(groups, placement.stages_of_rank[rank], cost, sleep, ROW_FLOATS)
        # a TimedStage is all that an executor asks of a stage
        executor = Executor(cast(dict[int, Stage], stages), groups)
        runners.append(_Runner(executor, groups, lists, _batches(micro_batches, rows)))
    right = [runner.right() for runner in runners]
    message = _message_seconds(runners[0].groups, rows) if runners else 0.0
    found: list[dict[str, Any]] = [{"right": each, "passes": [], "message": message} for each in right]
    for number in record.turns([str(each) for each in range(len(names))], rounds):
        found[int(number)]["passes"].append(runners[int(number)].timed())
    return found


def _message_seconds(groups: Groups, rows: int) -> float:
    """The median way of a message from rank 0 to a waiting rank 1: half of there and back. Others: 0."""
    there, back = (groups.edges.get(edge) for edge in ((0, 1, "activation"), (1, 0, "gradient")))
    if there is None or back is None:
        return 0.0
    x, seconds = torch.zeros(rows, ROW_FLOATS), []
    for tag in range(PINGS):
        start = time.perf_counter()
        out, home = (there, back) if groups.rank == 0 else (back, there)
        if groups.rank == 0:
            out.send(x, 1 - out.rank, tag).wait()
        home.receive(x.clone(), 1 - home.rank, tag).wait()
        if groups.rank == 1:
            out.send(x, 1 - out.rank, tag).wait()
        seconds.append((time.perf_counter() - start) / 2)
    return statistics.median(seconds)


@dataclass
class _Runner:
    """One schedule on one rank."""

    executor: Executor
    groups: Groups
    lists: Lists
    batches: list[Batch]

    def timed(self) -> tuple[float, float]:
        """Start and end of a pass, on this machine's clock."""
        self.groups.world.barrier()
        start = time.perf_counter()
        self.executor.run(self.lists, self.batches, LossRule(ItemCounts(1, (), 1, 1), 0.0))
        return start, time.perf_counter()

    def right(self) -> bool:
        """Run once; whether each stage's weight has as much gradient as micro-batches came back through it here."""
        self.timed()
        work: dict[int, int] = {}
        for action in self.lists[self.executor.here]:
            for half in action.halves():
                if half.kind.value in ("B", "I"):
                    work[half.stage] = work.get(half.stage, 0) + 1
        counted = {}
        for index, stage in self.executor.stages.items():
            (weight,) = stage.parameters()
            counted[index] = 0 if weight.grad is None else int(weight.grad)
            weight.grad = None
        return counted == work


def _layout(name: str, pp: int, micro_batches: int) -> tuple[Lists, int, Placement]:
    virtual_stages = _virtual_stages(name)
    held = schedules.stage_of_rank(name, pp, virtual_stages)
    num_stages = 1 + max(map(max, held))
    specs = tuple(StageSpec(index, num_stages, (index,), embedding=False, head=False) for index in range(num_stages))
    lists = schedules.schedule(name, pp, micro_batches, virtual_stages)
    return lists, num_stages, Placement(specs, tuple(map(tuple, held)))


def _batches(micro_batches: int, rows: int) -> list[Batch]:
    tokens = torch.zeros(1, 1, rows, dtype=torch.int64)
    place = torch.arange(rows)[None]
    return [Batch(tokens, tokens, place, torch.zeros(1, rows, dtype=torch.int32), None)] * micro_batches
