"""`moe.routing`: who chooses the experts. The router does; the other ways are for measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_engine.config.errors import ConfigError

NATURAL = "natural"
EXAMPLES = "there are natural, balanced, skewed:<x> (for example skewed:2) and replay:<folder>"


@dataclass(frozen=True)
class RoutingMode:
    """kind: natural | forced | replay; skew: the most loaded expert's load over the mean; folder: a recorded step."""

    kind: str
    skew: float = 1.0
    folder: str = ""


def routing_mode(text: str) -> RoutingMode:
    """Read `natural`, `balanced` (the same as skewed:1), `skewed:<x>` or `replay:<folder>`.

    Raises ConfigError with the rule alone: whoever has the option puts its name before.
    """
    word, colon, rest = text.partition(":")
    if text == NATURAL:
        return RoutingMode(NATURAL)
    if text == "balanced":
        return RoutingMode("forced")
    if word == "replay" and rest:
        return RoutingMode("replay", folder=rest)
    if word == "skewed" and colon:
        try:
            skew = float(rest)
        except ValueError:
            raise ConfigError("skewed takes a number, for example skewed:2") from None
        if not 1 <= skew < float("inf"):
            raise ConfigError("the most loaded expert has at least the mean load, for example skewed:2")
        return RoutingMode("forced", skew=skew)
    raise ConfigError(f"no such choice; {EXAMPLES}")


def routing_problem(name: str, text: str, num_experts: int, top_k: int) -> str | None:
    """What is wrong with the option `name` as a mode for these sizes; None if nothing is."""
    try:
        mode = routing_mode(text)
    except ConfigError as error:
        return str(error)
    most = num_experts / top_k
    if mode.skew > most:
        return (
            f"an expert can have at most num_experts / top_k = {most:g} times the mean load, that of every token; "
            f"use {name}=skewed:{math.floor(100 * most) / 100:g} or less"
        )
    return None
