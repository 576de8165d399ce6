"""Experts chosen by somebody else than the router: even or skewed loads for measurements, and recorded choices.

What a layer costs depends on how its tokens spread. `natural` is what the router chose; `balanced` is the best case,
`skewed:<x>` a bad one, in which the most loaded expert has x times the mean load and the first ones of a layer, which
sit on one rank at first, have most. A recorded step can be replayed. Weights come from the router's scores all the
same, so that gradients flow as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from moe_engine.config.schema import MoEConfig

ONE = 1 << 30  # probabilities are integers in units of 1/ONE: sums are exact, nobody is chosen twice
VARIANTS = 8  # tables that one size has, used in turn: made once, they cost a measurement nothing


class Choices(Protocol):
    """Stands beside a layer's router while it trains."""

    def given(self, tokens: int, device: torch.device, label: str) -> Tensor | None:
        """Expert ids [T, K] int64, ascending in each row, for the micro-batch `label`; None: the router chooses."""
        ...

    def taken(self, expert_ids: Tensor, label: str) -> None:
        """What was chosen for it."""
        ...


class SkewedLoads:
    """Random choices in which the most loaded expert gets `skew` times the mean load; 1: all experts the same.

    Loads fall with the expert's id like a power of it. A token's K experts are distinct and within `top_groups` groups.
    The tokens of one call get each expert as often as its load says, up to two more or fewer for each of its groups.
    """

    def __init__(self, config: MoEConfig, skew: float) -> None:
        limited = config.top_groups < config.num_groups
        self.groups, top_groups = (config.num_groups, config.top_groups) if limited else (1, 1)
        self.num_experts, self.top_k = config.num_experts, config.top_k
        picks = [self.top_k // top_groups + (j < self.top_k % top_groups) for j in range(top_groups)]
        self.picks = [count for count in picks if count]
        low, high = 0.0, 64.0
        for _ in range(50 if skew > 1 else 0):
            power = (low + high) / 2
            self._fall_by(power)
            low, high = (power, high) if self.largest_load() < skew else (low, power)
        self._fall_by(high if skew > 1 else 0.0)

    def _fall_by(self, power: float) -> None:
        weights = torch.arange(1, self.num_experts + 1, dtype=torch.float64).pow(-power).view(self.groups, -1)
        self.group_chances = _chances(weights.sum(dim=1), len(self.picks))  # [G], of being one of a token's groups
        self.expert_chances = {  # by how many experts of its group a token takes: [G, E/G]
            count: torch.stack([_chances(row, count) for row in weights]) for count in set(self.picks)
        }

    def largest_load(self) -> float:
        """The most loaded expert's load over the mean, as expected."""
        inside = torch.stack([self.expert_chances[count].double() for count in self.picks]).mean(dim=0)
        chosen = self.group_chances[:, None].double() * inside / ONE**2
        return float(chosen.max()) * self.num_experts / self.top_k

    def draw(self, tokens: int, seed: int) -> Tensor:
        """Expert ids [T, K] of one call, ascending in each row.

        Systematic sampling: experts lie on a line, each as long as its probability, and one point in each unit of the
        line, all at the same place u of their units, chooses. First so for groups; where in a group's stretch the
        point fell is the u for the experts inside. The tokens' u are evenly spread.
        """
        chance = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.groups, generator=chance)
        within = torch.stack([torch.randperm(self.num_experts // self.groups, generator=chance) for _ in order])
        turn = torch.randperm(tokens, generator=chance)
        u = (turn * 2 + 1) * ONE // max(2 * tokens, 1)  # [T]
        place, rest = _pick(self.group_chances[order].expand(tokens, -1), u, len(self.picks))  # [T, M]
        # Where the groups' shares of K differ, they take turns.
        turned = (turn[:, None] + torch.arange(len(self.picks))) % len(self.picks)
        group, rest = order[place.gather(1, turned)], rest.gather(1, turned)
        found = []
        for j, count in enumerate(self.picks):
            mine = group[:, j]
            lengths = self.expert_chances[count].gather(1, within)[mine]  # [T, E/G]
            picked, _ = _pick(lengths, rest[:, j] * ONE // self.group_chances[mine], count)
            found.append(mine[:, None] * within.shape[1] + within[mine].gather(1, picked))
        return torch.cat(found, dim=1).sort(dim=1).values


class ForcedChoices:
    """The choices of one layer on one rank, by `seed`, with these loads: another table for each call, in turns."""

    def __init__(self, loads: SkewedLoads, seed: int) -> None:
        self.loads, self.seed = loads, seed
        self._tables: dict[tuple[int, torch.device], list[Tensor]] = {}
        self._calls = 0

    def given(self, tokens: int, device: torch.device, label: str) -> Tensor:
        tables = self._tables.setdefault((tokens, device), [])
        if len(tables) < VARIANTS:
            tables.append(self.loads.draw(tokens, self.seed * VARIANTS + len(tables)).to(device))
            return tables[-1]
        self._calls += 1
        return tables[self._calls % VARIANTS]

    def taken(self, expert_ids: Tensor, label: str) -> None:
        """Nobody needs to know."""


def _chances(weights: Tensor, k: int) -> Tensor:
    """Probabilities as near to proportional to `weights` [n] as can be with a sum of k and none above 1; int64."""
    chances = torch.zeros_like(weights)
    full = torch.zeros_like(weights, dtype=torch.bool)
    while True:
        rest = weights.masked_fill(full, 0)
        chances = (rest / rest.sum().clamp(min=1e-300) * (k - int(full.sum()))).masked_fill(full, 1)
        above = (chances > 1) & ~full
        if not bool(above.any()):
            break
        full |= above
    units = (chances * ONE).long().clamp(max=ONE)
    missing = k * ONE - int(units.sum())
    for i in (units < ONE).nonzero().flatten().tolist():  # what rounding left, to the first that have room
        more = min(missing, ONE - int(units[i]))
        units[i] += more
        missing -= more
    return units


def _pick(lengths: Tensor, u: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k stretches that the points u, u+ONE, … fall in, and how far into them: lengths [T, n] with sums k*ONE."""
    ends = lengths.cumsum(dim=1)
    points = u[:, None] + torch.arange(k) * ONE
    place = torch.searchsorted(ends, points, right=True)
    return place, points - (ends - lengths).gather(1, place)


def micro_batch_of(label: str) -> int:
    """The engine's labels end in the number of the micro-batch on its data-parallel rank."""
    return int(label.rpartition(" ")[2])


class RecordedChoices:
    """Those of a recorded step: ids [T, K] by the number of the micro-batch."""

    def __init__(self, by_micro_batch: Sequence[Tensor]) -> None:
        self.by_micro_batch = by_micro_batch

    def given(self, tokens: int, device: torch.device, label: str) -> Tensor:
        return self.by_micro_batch[micro_batch_of(label)].to(device)

    def taken(self, expert_ids: Tensor, label: str) -> None:
        """They are known."""


class Recorder:
    """Keeps what is chosen, by the number of the micro-batch, whoever chooses."""

    def __init__(self, choices: Choices | None) -> None:
        self.choices = choices
        self.by_micro_batch: dict[int, Tensor] = {}

    def given(self, tokens: int, device: torch.device, label: str) -> Tensor | None:
        return None if self.choices is None else self.choices.given(tokens, device, label)

    def taken(self, expert_ids: Tensor, label: str) -> None:
        self.by_micro_batch[micro_batch_of(label)] = expert_ids.to("cpu", torch.int32)
