"""Routed experts of one rank, stacked in two tensors, as a module and as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_engine.config.schema import MoEConfig
from moe_engine.config.validate import validate_activation
from moe_engine.moe.dispatch import Rows
from moe_engine.ops.attach import scale_gradient
from moe_engine.ops.backend import check_backend
from moe_engine.ops.bias import add_bias
from moe_engine.ops.expert_activation import Activation, expert_activation
from moe_engine.ops.expert_mlp import expert_mlp
from moe_engine.ops.fp8 import Fp8
from moe_engine.ops.fp8_linear import Grouped, fp8_grouped_linear, fp8_mlp
from moe_engine.ops.grouped_linear import grouped_linear
from moe_engine.ops.linear import narrowed, widened
from moe_engine.ops.permute import order_by_expert, permute, take, unpermute
from moe_engine.ops.recompute import Segments, segment
from moe_engine.ops.wgrad_queue import WgradQueue


def activation_of(config: MoEConfig) -> Activation:
    """The activation that a configuration names."""
    return Activation(config.activation, config.gated, config.swiglu_limit)


@dataclass(frozen=True)
class ExpertWeights:
    """up [e, 2F, D] (gate rows first) or [e, F, D], down [e, D, F], their biases [e, 2F] or [e, F], and [e, D]."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Experts(nn.Module):
    """Experts with these global ids, ascending.

    Gated: gate_up [e, 2F, D] (gate rows first), else up [e, F, D]; down [e, D, F]; with `biases` also gate_up_bias
    [e, 2F] (or up_bias [e, F]) and down_bias [e, D]. Gradients of all are multiplied by the attribute `gradient_scale`.
    """

    def __init__(
        self,
        ids: Sequence[int],
        dim: int,
        hidden: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        activation: Activation = Activation(),  # noqa: B008 - it is frozen
        biases: bool = False,
    ) -> None:
        super().__init__()
        self.ids, self.activation, self.gradient_scale = tuple(ids), activation, 1.0
        self.backend = "auto"  # whose kernels compute them (`ops.backend`)
        self.wide = False  # see `through_experts`; a block of the engine sets it
        self.fp8: Fp8 | None = None  # how they compute in fp8 (`ops.fp8.use_fp8` sets it)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(len(self.ids), *shape, dtype=dtype, device=device))

        width = activation.width(hidden)
        self.up_name = "gate_up" if activation.gated else "up"
        self.register_parameter(self.up_name, parameter(width, dim))
        self.down = parameter(dim, hidden)
        if biases:
            self.register_parameter(f"{self.up_name}_bias", parameter(width))
            self.down_bias = parameter(dim)

    def expert_names(self, prefix: str, name: str) -> list[str]:
        """Global names of the slices of parameter `name`, for a module that sits at `prefix`."""
        return [f"{prefix}.{expert}.{name}" for expert in self.ids]

    def weights(self) -> ExpertWeights:
        """What the projections multiply with now: under a parametrization not the parameters themselves."""
        up_bias, down_bias = getattr(self, f"{self.up_name}_bias", None), getattr(self, "down_bias", None)
        found: tuple[Any, ...] = getattr(self, self.up_name), self.down, up_bias, down_bias
        if self.gradient_scale != 1:
            found = tuple(w if w is None else scale_gradient(w, self.gradient_scale) for w in found)
        return ExpertWeights(*found)

    def forward(self, rows: Rows, queue: WgradQueue | None = None, segments: Segments | None = None) -> Tensor:
        """See `through_experts`."""
        return through_experts(
            rows, self.weights(), self.activation, queue, segments, self.fp8, self.backend, self.wide
        )


def through_experts(
    rows: Rows,
    experts: ExpertWeights,
    activation: Activation,
    queue: WgradQueue | None = None,
    segments: Segments | None = None,
    fp8: Fp8 | None = None,
    backend: str = "auto",
    wide: bool = False,
) -> Tensor:
    """Each row through the experts in its slots, weighted and summed in slot order: [R, D].

    The weight multiplies inside the activation, before the down projection; that projection's bias is weighted after.
    SwiGLU experts without biases keep their input and the first projection alone, without a queue and outside segments
    (`ops.expert_mlp`), unless `wide`; in fp8 always, as codes. Others keep what their operations keep. A `backend` that
    is not auto (`ops.backend`) has the first kind alone. wide: what stands between two projections of the others is
    kept in the format in which products are computed (`ops.linear.widened`): faster, and more memory.
    """
    order = order_by_expert(rows.local_ids, experts.down.shape[0], rows.most_choices)
    weights = take(rows.weights, order.slots, order.rows.places)
    plain = activation == Activation() and experts.up_bias is None and experts.down_bias is None
    if fp8 is not None and plain:
        grouped = Grouped(order.rows, order.counts, rows.codes, rows.gradient)
        return fp8_mlp(rows.x, experts.up, experts.down, fp8, queue, weights, grouped)
    x = rows.numbers()
    alone = plain and not wide and queue is None and segments is None and not torch.compiler.is_compiling()
    if alone or backend != "auto":
        return expert_mlp(x, experts.up, experts.down, weights, order, backend)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        if fp8 is not None:
            return fp8_grouped_linear(x, weight, order.counts, fp8, queue)
        return grouped_linear(x, weight, order.counts, queue)

    inner = permute(x, order.rows)
    up = product(widened(inner) if wide and fp8 is None else inner, experts.up)  # [N, 2F]
    if experts.up_bias is not None:
        up = add_bias(up, None, experts.up_bias, order.counts)
    hidden = segment(segments, "swiglu", _activate(activation), up, weights)  # [N, F]
    out = narrowed(product(hidden, experts.down), experts.down)  # each row rounded, as where it travels alone
    if experts.down_bias is not None:
        out = add_bias(out, weights, experts.down_bias, order.counts)
    return unpermute(out, order.rows)


def _activate(activation: Activation) -> Callable[[Tensor, Tensor], Tensor]:
    def function(up: Tensor, weights: Tensor) -> Tensor:
        return expert_activation(up, weights, activation)

    return function


def experts_forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    swiglu_limit: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Tokens through the experts that somebody else's router chose: x [..., D] -> [..., D].

    ids, weights [..., K]: each token's experts in any order, and their weights; an id outside 0 … e-1 is no expert.
    gate_up [e, 2F, D], gate rows first (gated=False: [e, F, D]); down [e, D, F]; the biases [e, 2F] and [e, D].
    activation, gated, swiglu_limit: as in `MoEConfig`; backend: as in `MoELayer`. A token's experts are summed
    in fp32 in the order of `ids`.
    Differentiable in everything but ids. Raises ValueError where shapes or kinds of numbers do not fit, ConfigError for
    an activation or a backend that there is not.
    """
    kind = Activation(activation, gated, swiglu_limit)
    if kind != Activation():
        validate_activation(activation, gated, swiglu_limit)
    _check_shapes(x, ids, weights, gate_up, down, kind)
    _check_biases(gate_up_bias, down_bias, gate_up, down)
    if backend != "auto":
        check_backend(backend, kind == Activation() and gate_up_bias is None and down_bias is None, None)
    K = ids.shape[-1]
    rows = rows_of_choices(x.reshape(-1, x.shape[-1]), ids.reshape(-1, K), weights.reshape(-1, K), down.shape[0])
    out = through_experts(rows, ExpertWeights(gate_up, down, gate_up_bias, down_bias), kind, backend=backend)
    return out.view(x.shape)


def rows_of_choices(x: Tensor, ids: Tensor, weights: Tensor, num_experts: int) -> Rows:
    """Tokens x [T, D] as rows, with experts that somebody else's router chose: ids, weights [T, K].

    Ids outside 0 … num_experts - 1 are no experts; weights become fp32 (fp64 for fp64 tokens).
    """
    known = (ids >= 0) & (ids < num_experts)
    wide = torch.promote_types(x.dtype, torch.float32)
    return Rows(x, ids.to(torch.int32).masked_fill(~known, -1), weights.to(wide).masked_fill(~known, 0))


def _check_shapes(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, kind: Activation) -> None:
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if not whole or not x.is_floating_point() or not ids.dim() or not ids.shape[-1]:
        raise ValueError(
            f"ids {list(ids.shape)} {ids.dtype}, x {x.dtype}: ids must be whole numbers, at least one for a token, as "
            "torch.topk gives them, and x floating-point numbers"
        )
    if ids.shape != weights.shape or ids.shape[:-1] != x.shape[:-1]:
        found = f"x {list(x.shape)}, ids {list(ids.shape)}, weights {list(weights.shape)}"
        raise ValueError(f"{found}: x must be [..., D], ids and weights [..., K] with the same leading dimensions")
    if down.dim() != 3 or gate_up.shape != (down.shape[0], kind.width(down.shape[2]), x.shape[-1]):
        width = "2F" if kind.gated else "F"
        raise ValueError(
            f"gate_up {list(gate_up.shape)}, down {list(down.shape)}, x {list(x.shape)}: gate_up must be "
            f"[e, {width}, D] and down [e, D, F]"
        )


def _check_biases(gate_up_bias: Tensor | None, down_bias: Tensor | None, gate_up: Tensor, down: Tensor) -> None:
    for name, bias, matrix in (("gate_up_bias", gate_up_bias, gate_up), ("down_bias", down_bias, down)):
        if bias is not None and bias.shape != matrix.shape[:2]:
            raise ValueError(f"{name} {list(bias.shape)}: must be {list(matrix.shape[:2])}, a number for each output")
