"""What stands between an expert's two projections, with the routing weight inside, for every kind of expert.

Gated experts multiply the activation of one half of the first projection with the other half (GLU, Shazeer, arXiv
2002.05202); plain ones only activate. SwiGLU, which most models use, has a kernel of its own (`ops.activation`). The
others keep their input alone and calculate again in backward. All are built from operations whose CPU code gives a
number the same bits wherever it stands in a tensor (torch's own sigmoid, silu and tanh-gelu do not).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.ops.activation import sigmoid, swiglu
from moe_engine.ops.first_order import first_order

CLAMPED_SLOPE = 1.702  # gpt-oss: gate * sigmoid(1.702 gate), close to gelu


@dataclass(frozen=True)
class Activation:
    """The activation of experts, as in `MoEConfig`.

    name: silu | gelu | gelu_tanh | relu | relu_squared; gated: act(gate) * up, else act(up);
    limit: above 0, gpt-oss's clamped SwiGLU in place of `name`: with gate at most `limit` and up within -limit … limit,
    gate * sigmoid(1.702 gate) * (up + 1). function: somebody else's, of the first projection's rows, in place of all.
    """

    name: str = "silu"
    gated: bool = True
    limit: float = 0.0
    function: Callable[[Tensor], Tensor] | None = None

    def width(self, hidden: int) -> int:
        """Rows of the first projection of an expert with `hidden` inner features."""
        return 2 * hidden if self.gated else hidden


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of gelu: 1 + tanh(u) is 2 sigmoid(2u)."""
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def relu_squared(x: Tensor) -> Tensor:
    """relu(x)^2 (Primer, arXiv 2109.08668)."""
    return x.relu().square()


def _function(name: str) -> Callable[[Tensor], Tensor]:
    functions = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": torch.relu, "relu_squared": relu_squared}
    return functions[name]


def _calculate(up: Tensor, weight: Tensor | None, activation: Activation) -> Tensor:
    """In fp32 (fp64 for fp64), rounded once."""
    wide = up.to(torch.promote_types(up.dtype, torch.float32))
    if activation.limit > 0:
        gate, linear = wide.chunk(2, dim=1)
        gate, linear = gate.clamp(max=activation.limit), linear.clamp(-activation.limit, activation.limit)
        out = gate * sigmoid(CLAMPED_SLOPE * gate) * (linear + 1)
    elif activation.gated:
        gate, linear = wide.chunk(2, dim=1)
        out = _function(activation.name)(gate) * linear
    else:
        out = _function(activation.name)(wide)
    return (out if weight is None else out * weight[:, None]).to(up.dtype)


def _clamped_backward(d_out: Tensor, up: Tensor, weight: Tensor | None, limit: float) -> tuple[Tensor, Tensor | None]:
    """Gradients of the clamped SwiGLU's input and of the weight; where a number is clamped its gradient is 0."""
    wide = up.to(torch.promote_types(up.dtype, torch.float32))
    whole_gate, whole_linear = wide.chunk(2, dim=1)
    gate, linear = whole_gate.clamp(max=limit), whole_linear.clamp(-limit, limit) + 1
    slope = sigmoid(CLAMPED_SLOPE * gate)
    activated, d_out = gate * slope, d_out.to(wide.dtype)
    d_weight = None if weight is None else (d_out * activated * linear).sum(dim=1)
    if weight is not None:
        d_out = d_out * weight[:, None]
    d_gate = d_out * linear * (slope + CLAMPED_SLOPE * activated * (1 - slope)) * (whole_gate <= limit)
    d_linear = d_out * activated * (whole_linear.abs() <= limit)
    return torch.cat((d_gate, d_linear), dim=1).to(up.dtype), d_weight


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor, weight: Tensor | None, activation: Activation) -> Tensor:
        ctx.save_for_backward(up, weight)
        ctx.activation = activation
        return _calculate(up, weight, activation)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        up, weight = ctx.saved_tensors
        if ctx.activation.limit > 0:
            return *_clamped_backward(grads[0], up, weight, ctx.activation.limit), None
        up = up.detach().requires_grad_()
        weight = None if weight is None else weight.detach().requires_grad_()
        with torch.enable_grad():
            out = _calculate(up, weight, ctx.activation)
        inputs = [up] if weight is None else [up, weight]
        d_up, *d_weight = torch.autograd.grad(out, inputs, grads[0])
        return d_up, d_weight[0] if d_weight else None, None


def expert_activation(up: Tensor, weight: Tensor | None, activation: Activation) -> Tensor:
    """Rows of the first projection to rows for the second: [N, 2F] (gate first) or [N, F] -> [N, F].

    weight [N] multiplies the result, so that the second projection's output is needed neither for the weight's gradient
    nor row by row. Calculated in fp32 and rounded once.
    """
    if activation.function is not None:
        out = activation.function(up)
        return out if weight is None else (out * weight[:, None]).to(up.dtype)
    if activation.gated and activation.name == "silu" and not activation.limit:
        return swiglu(up, weight)
    flat = up.reshape(-1, up.shape[-1])
    weight = None if weight is None else weight.reshape(-1)
    if torch.compiler.is_compiling() and not activation.limit:  # a graph differentiates what it holds
        out = _calculate(flat, weight, activation)
    else:
        out = _Activate.apply(flat, weight, activation)
    return out.view(*up.shape[:-1], out.shape[-1])
