"""How evenly tokens lie over experts and ranks: the figures of a step, their history, and its picture.

The picture has a panel for each MoE layer: experts upwards, steps to the right, colour the expert's load over the
mean. What it is drawn from has bounded size: neighbouring steps are joined once there are more than COLUMNS columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_engine.moe.placement import ExpertPlacement
from moe_engine.planner.eplb import max_over_mean

COLUMNS = 256
PANELS_A_ROW = 4


@dataclass(frozen=True)
class LoadFigures:
    """One MoE layer in one step.

    max_over_mean: the most loaded expert's tokens over the mean; rank_max_over_mean: the same of ranks, each with the
    tokens of its experts; entropy: of the experts' shares, over that of equal shares (1: even, 0: one expert has all);
    dead_experts: how many got no token.
    """

    max_over_mean: float
    rank_max_over_mean: float
    entropy: float
    dead_experts: int


def load_figures(counts: Sequence[int], placement: ExpertPlacement) -> LoadFigures:
    """Figures of one layer from its experts' tokens [E]. Without any token it is as even as can be."""
    total = sum(counts)
    shares = [count / total for count in counts if count] if total else []
    even = math.log(len(counts))
    entropy = -sum(share * math.log(share) for share in shares) / even if total and even else 1.0
    return LoadFigures(
        max_over_mean=max_over_mean(counts),
        rank_max_over_mean=max_over_mean(placement.loads(counts)),
        entropy=entropy,
        dead_experts=sum(count == 0 for count in counts),
    )


@dataclass(frozen=True)
class ExpertLoads:
    """Tokens by MoE layer and expert in one step over the whole job: counts [L, E] int64, and each layer's figures."""

    layers: tuple[str, ...]
    counts: Tensor
    figures: tuple[LoadFigures, ...]

    @property
    def expert_max_over_mean(self) -> float:
        """Of the layer where it is largest; 0 for a model without experts."""
        return max((each.max_over_mean for each in self.figures), default=0.0)

    @property
    def rank_max_over_mean(self) -> float:
        """Of the layer where it is largest; 0 for a model without experts."""
        return max((each.rank_max_over_mean for each in self.figures), default=0.0)

    @property
    def entropy(self) -> float:
        """Of the layer where it is smallest; 1 for a model without experts."""
        return min((each.entropy for each in self.figures), default=1.0)

    @property
    def dead_experts(self) -> int:
        """Over all layers."""
        return sum(each.dead_experts for each in self.figures)


class LoadHistory:
    """Tokens by layer and expert over a run's steps, in at most COLUMNS columns of equally many steps.

    Kept in the file `path`, which a resumed run goes on with.
    """

    def __init__(self, path: Path, layers: Sequence[str], num_experts: int) -> None:
        self.path, self.layers = path, tuple(layers)
        self.steps_a_column, self.first_step = 1, 0
        self.columns = torch.zeros(0, len(self.layers), num_experts, dtype=torch.int64)

    def begin(self, first_step: int) -> None:
        """Take up what an earlier try left; columns that reach to `first_step` or beyond are dropped."""
        self.first_step = first_step
        if not self.path.exists():
            return
        with safe_open(str(self.path), framework="pt") as file:
            meta, columns = file.metadata() or {}, file.get_tensor("tokens")
        if meta.get("layers") != ",".join(self.layers) or columns.shape[1:] != self.columns.shape[1:]:
            return
        self.first_step, self.steps_a_column = int(meta["first_step"]), int(meta["steps_a_column"])
        self.columns = columns[: max(first_step - self.first_step, 0) // self.steps_a_column]

    def add(self, step: int, counts: Tensor) -> None:
        """Count a step's tokens [L, E]; steps come in order, one may be left out."""
        column = (step - self.first_step) // self.steps_a_column
        if column >= COLUMNS:
            pairs = torch.cat([self.columns, self.columns.new_zeros(-len(self.columns) % 2, *self.columns.shape[1:])])
            self.columns = pairs.view(-1, 2, *self.columns.shape[1:]).sum(dim=1)
            self.steps_a_column *= 2
            self.add(step, counts)
            return
        if column >= len(self.columns):
            missing = column + 1 - len(self.columns)
            self.columns = torch.cat([self.columns, self.columns.new_zeros(missing, *self.columns.shape[1:])])
        self.columns[column] += counts

    def save(self) -> None:
        meta = {
            "layers": ",".join(self.layers),
            "first_step": str(self.first_step),
            "steps_a_column": str(self.steps_a_column),
        }
        temporary = self.path.with_suffix(".tmp")
        save_file({"tokens": self.columns.contiguous()}, str(temporary), meta)
        temporary.replace(self.path)

    def over_mean(self) -> Tensor:
        """Load over the mean of its layer, [L, E, columns]; NaN where nothing was counted."""
        tokens = self.columns.double()
        return (tokens / tokens.mean(dim=2, keepdim=True)).permute(1, 2, 0)

    def draw(self, path: Path) -> None:
        """The heat map, as a picture. Nothing where there are no experts or no steps."""
        if not self.columns.numel():
            return
        from matplotlib.figure import Figure

        across = min(len(self.layers), PANELS_A_ROW)
        down = -(-len(self.layers) // across)
        figure = Figure(figsize=(3.2 * across + 1.2, 2.2 * down + 0.6), layout="constrained")
        panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        last = self.first_step + len(self.columns) * self.steps_a_column
        pictures = []
        for axes, name, layer in zip(panels.flat, self.layers, self.over_mean(), strict=False):
            picture = axes.imshow(
                layer.numpy(), aspect="auto", origin="lower", interpolation="nearest", cmap="coolwarm", vmin=0, vmax=2,
                extent=(self.first_step, last, -0.5, layer.shape[0] - 0.5),
            )  # fmt: skip
            pictures.append(picture)
            axes.set_title(name.removesuffix(".moe").removesuffix(".block"), fontsize=9)
        for axes in panels.flat[len(self.layers) :]:
            axes.set_axis_off()
        figure.supxlabel("step")
        figure.supylabel("expert")
        figure.colorbar(pictures[0], ax=panels, label="load over the mean", extend="max")
        figure.savefig(path, dpi=120)
