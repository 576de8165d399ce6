"""The layer in somebody else's model: an ordinary PyTorch loop, no process group, no engine configuration."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_moe import make_config
from torch import Tensor, nn

from moe_engine.config.schema import MoEConfig
from moe_engine.moe.layer import MoELayer


class Model(nn.Module):
    """Classifies sequences by their tokens' mean, with two MoE layers in the middle."""

    def __init__(self) -> None:
        super().__init__()
        config = MoEConfig(
            dim=16, expert_hidden=24, num_experts=8, top_k=2, num_shared_experts=1, init_std=0.2, aux_loss_weight=1e-2
        )
        self.inner = nn.Linear(6, 16)
        self.moe = nn.ModuleList(MoELayer(config, name=f"moe.{i}", seed=1) for i in range(2))
        self.outer = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, aux_sum = self.inner(x), x.new_zeros(())
        for layer in self.moe:
            y, aux = layer(x, return_aux=True)
            x, aux_sum = x + y, aux_sum + aux
        return self.outer(x.float().mean(dim=1).to(x.dtype)), aux_sum


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 10, 6, generator=generator)
    return x, (x[..., 0].sum(dim=1) > 0).long() + (x[..., 1].sum(dim=1) > 0).long()


def train(model: Model, steps: int, autocast: bool = False) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, (x, labels) = [], data()
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits, aux = model(x)
            loss = nn.functional.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        (loss + aux).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for layer in model.moe:
            layer.update_balance()
        losses.append(loss.item())
    return losses


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_an_ordinary_loop_learns_and_every_gradient_and_hook_arrives() -> None:
    assert not dist.is_initialized()
    model, fired = make_model(), set()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.add(name))
    losses = train(model, 40)
    assert losses[0] > 0.8 and losses[-1] < 0.35
    assert fired == {name for name, _ in model.named_parameters()}
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(layer.router.expert_bias.abs().max() > 0 for layer in model.moe)


def test_runs_are_bit_equal() -> None:
    assert train(make_model(), 5) == train(make_model(), 5)


def test_autocast_trains_like_fp32() -> None:
    model = make_model()
    losses, plain = train(model, 30, autocast=True), train(make_model(), 30)
    assert losses[-1] < 0.5 and abs(losses[0] - plain[0]) < 0.02
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_bf16_model_trains() -> None:
    model = make_model().bfloat16()
    x, labels = data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        logits, aux = model(x.bfloat16())
        loss = nn.functional.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        (loss + aux).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
    for layer in model.moe:
        assert layer.router.expert_bias.dtype == torch.float32 and layer.experts.down.dtype == torch.bfloat16


def test_state_dict_round_trip_and_deepcopy_continue_identically() -> None:
    model = make_model()
    train(model, 5)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = make_model()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    bias = model.moe[0].router.expert_bias.clone()
    assert bias.abs().max() > 0 and torch.equal(loaded.moe[0].router.expert_bias, bias)
    losses = train(model, 3)
    assert train(twin, 3) == losses and train(loaded, 3) == losses


def test_frozen_experts_and_frozen_router_are_left_alone() -> None:
    model = make_model()
    for layer in model.moe:
        layer.experts.requires_grad_(False)
        layer.router.requires_grad_(False)
    logits, aux = model(data()[0])
    (logits.square().sum() + aux).backward()
    assert model.inner.weight.grad.any()
    assert all(p.grad is None for layer in model.moe for p in layer.experts.parameters())
    assert all(layer.router.weight.grad is None for layer in model.moe)
    assert all(layer.shared.down.weight.grad.any() for layer in model.moe)


def test_a_compiled_layer_drops_what_an_ordinary_one_drops() -> None:
    layer, x = (
        MoELayer(make_config(capacity_factor=0.7)),
        torch.randn(2, 20, 24, generator=torch.Generator().manual_seed(0)),
    )
    out = layer(x)
    out.sum().backward()
    dropped = layer.dropped_choices.clone()
    layer.dropped_choices.zero_()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(compiled, out) and torch.equal(layer.dropped_choices, dropped) and dropped[0] > 0


def test_bf16_goes_into_one_graph() -> None:
    """A shared expert's products, too: whether this CPU has instructions for them is asked outside the graph."""
    layer = MoELayer(make_config(num_shared_experts=1), dtype=torch.bfloat16)
    x = torch.randn(2, 20, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    compiled, gradients = torch.compile(layer, fullgraph=True, backend="aot_eager"), []
    for module in (layer, compiled):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        out.sum().backward()
        gradients.append((out, leaf.grad))
    assert all(torch.equal(*both) for both in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "gelu", "gated": False, "expert_biases": True},
        {"activation": "relu_squared"},
        {"swiglu_limit": 0.5},
    ],
    ids=["plain", "gated", "clamped"],
)
def test_every_kind_of_activation_goes_into_one_graph(changes: dict[str, Any]) -> None:
    layer, x = MoELayer(make_config(**changes)), torch.randn(20, 24, generator=torch.Generator().manual_seed(0))
    found = []
    for module in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        out.square().sum().backward()
        found.append([out, leaf.grad, *(p.grad.clone() for p in layer.parameters())])
    for mine, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, mine)
