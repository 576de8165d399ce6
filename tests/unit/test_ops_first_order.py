"""A second derivative through an op that has none is an error, never a number without that op's part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_moe import make_config
from torch import Tensor

from moe_engine import MoELayer, Router
from moe_engine.moe.dispatch import exchange
from moe_engine.moe.dispatch.further import further_rows
from moe_engine.ops.attention import attention
from moe_engine.ops.expert_mlp import expert_mlp
from moe_engine.ops.permute import order_by_expert
from moe_engine.ops.visible import whole_rows


def _attention(x: Tensor) -> Tensor:
    q = x.view(1, -1, 1, 4)
    return attention(q, q, q, whole_rows(q.shape[1]), 0.5)


def _experts(x: Tensor) -> Tensor:
    x = x.view(-1, 8)
    order = order_by_expert(torch.arange(len(x), dtype=torch.int32)[:, None] % 2, 2)
    return expert_mlp(x, x[:8].expand(2, 8, 8), x[:4].T.expand(2, 8, 4), torch.ones(len(x)), order)


def _combined(x: Tensor) -> Tensor:
    done: Any = SimpleNamespace(wait=lambda: x.detach() * 2)
    return exchange.combine_arrive(exchange.PendingCombine(x, SimpleNamespace(), done))  # type: ignore[arg-type]


def _further(x: Tensor) -> Tensor:
    handle: Any = SimpleNamespace(sent=SimpleNamespace(splits=[len(x)]))
    handle.rounds, handle.num_rounds = SimpleNamespace(start=lambda number: handle), 2
    rows = further_rows(x, x, x[:1], handle, lambda handle, x, weights: (x, x * x + weights), [])
    assert rows is not None
    return rows


@pytest.mark.parametrize("function", [_attention, _experts, _combined, _further])
@pytest.mark.parametrize("numbers", [64, 2400])
@pytest.mark.parametrize("linear", [True, False])
def test_second_derivatives_are_refused(
    function: Any, numbers: int, linear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "combine_backward_start", lambda d, handle: SimpleNamespace(wait=lambda: d * 2))
    x = torch.randn(numbers, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = function(x)
    loss = out.sum() if linear else out.square().sum()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(grad, expected)
    with pytest.raises(RuntimeError, match="twice"):
        (grad.square().sum() + out.sum()).backward()


LAYERS: list[dict[str, Any]] = [
    {},
    {"num_shared_experts": 0, "dim": 32, "expert_hidden": 32},
    {"num_shared_experts": 0, "gated": False, "activation": "gelu", "expert_biases": True},
    {"shared_gate": True, "swiglu_limit": 1.0, "capacity_factor": 1.0},
]


@pytest.mark.parametrize("changes", LAYERS)
def test_no_part_of_a_layers_second_derivative_is_left_out_in_silence(changes: dict[str, Any]) -> None:
    """Also where autograd is asked for inputs alone, and so walks to them alone."""
    layer = MoELayer(make_config(**changes), dtype=torch.float64)
    x = torch.randn(6, layer.config.dim, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    for inputs in ([x], list(layer.parameters())):
        with pytest.raises(RuntimeError, match="twice"):
            torch.autograd.grad(grad.square().sum(), inputs, allow_unused=True, retain_graph=True)


def test_the_second_derivative_of_a_routers_weights_is_refused() -> None:
    router, x = Router(make_config(), dtype=torch.float64), torch.randn(6, 24, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(router(x).expert_weights.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        torch.autograd.grad(grad.sum(), x)
