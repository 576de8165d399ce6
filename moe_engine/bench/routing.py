"""The engine under several ways of choosing experts: candidates of a benchmark, their rules, and what is checked.

`natural` is the router's own choice; the others (`config.routing`) compute another function, so that no loss tells
whether they are right: the loads that they ask for do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_engine.bench.record import Verdict, named_twice
from moe_engine.checkpoint.choices import check_choices
from moe_engine.config.errors import ConfigError
from moe_engine.config.routing import NATURAL, routing_mode, routing_problem
from moe_engine.config.schema import Config
from moe_engine.trainer import StepResult

ENGINE = "moe_engine"


def candidate_of(routing: str) -> str:
    """The name of the engine as a candidate with this routing."""
    return ENGINE if routing == NATURAL else f"{ENGINE} {routing}"


def routing_of(candidate: str) -> str:
    """The inverse."""
    return candidate.removeprefix(ENGINE).strip() or NATURAL


def problems(routing: Sequence[str], config: Config, resolved: Sequence[Config]) -> list[str]:
    """What is wrong with `bench.routing` for a configuration, resolved for each case; a line each."""
    shown = f"bench.routing=[{','.join(routing)}]"
    found = []
    if NATURAL not in routing:
        found.append(f"{shown}: natural is measured beside every other; use bench.routing=[natural,balanced]")
    found += named_twice("bench.routing", routing)
    if config.moe.routing != NATURAL:
        found.append(f"moe.routing={config.moe.routing}: use bench.routing=[natural,{config.moe.routing}]")
    for text in routing:
        problem = routing_problem("bench.routing", text, config.model.num_experts, config.model.top_k)
        if problem:
            found.append(f"{shown}: {problem}")
            continue
        mode = routing_mode(text)
        for case in resolved if mode.kind == "replay" else ():
            try:
                check_choices(Path(mode.folder), case)
            except ConfigError as error:
                found += error.lines
    return found


def load_figures(config: Config, result: StepResult) -> dict[str, Any]:
    """How experts were chosen, and the step's load over the mean, of the most loaded expert and rank."""
    loads = result.expert_loads
    return {
        "routing": config.moe.routing,
        "expert_load": loads.expert_max_over_mean,
        "rank_load": loads.rank_max_over_mean,
    }


def verdict(config: Config, routing: str, first: tuple[float, float], figures: dict[str, Any]) -> Verdict:
    """Of a first step in another than the natural routing: (loss, gradient norm) finite, loads as asked."""
    mode, model, train = routing_mode(routing), config.model, config.train
    measures = {"loss": first[0], "grad_norm": first[1], "expert_load": figures["expert_load"]}
    passed = all(map(math.isfinite, first))
    if mode.kind != "forced":
        return Verdict(passed, "checked: first loss and gradient norm are finite", measures)
    # Each call gives an expert its share up to two tokens for each group.
    mean = train.micro_batch * train.seq_len * model.top_k / model.num_experts
    off = abs(figures["expert_load"] - mode.skew)
    most = 2 * model.num_groups / mean
    text = (
        f"checked: first loss is finite, the most loaded expert has {figures['expert_load']:.3f} times the mean "
        f"(asked: {mode.skew:g}, at most {most:.3f} off)"
    )
    return Verdict(passed and off <= most, text, measures)
