"""Global names: what a parameter is called in every layout, and who else holds it.

Optimizer shards, checkpoints, initial values and the gradient norm all go by global names. An expert has names
of its own although a rank keeps its experts stacked in one tensor, so that expert 7 is expert 7 wherever it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from moe_engine.config.schema import ModelConfig
from moe_engine.layout import Placement


@dataclass(frozen=True)
class NamedParameter:
    """One local parameter tensor and its place in the whole model."""

    names: tuple[str, ...]  # one global name; or, for stacked experts, names[i] is that of parameter[i]
    parameter: nn.Parameter
    expert: bool  # replicated over edp only, not over all of dp*cp
    holders: tuple[int, ...]  # pipeline ranks that hold it

    def pieces(self) -> Iterable[tuple[str, Tensor]]:
        """(global name, tensor) of each named piece; a view of the parameter."""
        if not self.expert:
            yield self.names[0], self.parameter
        else:
            yield from zip(self.names, self.parameter, strict=True)

    @property
    def is_matrix(self) -> bool:
        """A weight matrix (as opposed to a norm's scale)."""
        return self.parameter.dim() - self.expert >= 2


def moe_layer_names(model: ModelConfig) -> list[str]:
    """The global names of all MoE layers of a model, in its order."""
    layers = [f"layers.{i}.moe" for i in model.all_moe_layers()]
    return layers + [f"mtp.{k}.block.moe" for k in range(model.mtp_depth)]


def named_parameters(modules: Iterable[nn.Module], placement: Placement) -> list[NamedParameter]:
    """Every parameter of the stages on one rank, shared ones once, in the order of global names.

    A module with stacked experts says so by `expert_names(prefix, name)`, which gives their global names.
    """
    found: dict[int, NamedParameter] = {}
    for module in modules:
        for prefix, owner in module.named_modules():
            for name, parameter in owner.named_parameters(recurse=False):
                expert_names = getattr(owner, "expert_names", None)
                names = expert_names(prefix, name) if expert_names else (f"{prefix}.{name}",)
                holders = placement.holders(names[0])
                found[id(parameter)] = NamedParameter(tuple(names), parameter, expert_names is not None, holders)
    return sorted(found.values(), key=lambda named: named.names)
