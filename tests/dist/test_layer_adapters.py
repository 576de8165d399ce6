"""Adapters on the experts (peft's LoRA, parametrizations), on 1 and 2 ranks: the same as merged weights or one rank."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils import parametrize
from wrapped_layer import Model, batch, make_layer, step

from moe_engine import MoELayer


def lora(layer: MoELayer) -> Any:
    """peft's adapters on the stacked weights of the experts."""
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.gate_up", "experts.down"])
    torch.manual_seed(0)
    model = peft.get_peft_model(Model(layer), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.double()


def mean_loss(model: Any) -> Tensor:
    x, target = batch()
    y, aux = model(x)
    return (y - target).square().mean() + aux  # type: ignore[no-any-return]


def lora_gradients(model: Any) -> dict[str, Tensor]:
    mean_loss(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def test_lora_on_the_experts_equals_the_layer_with_merged_weights() -> None:
    model = lora(make_layer())
    gradients = lora_gradients(model)
    out = model(batch()[0])[0].detach()
    assert len(gradients) == 4 and all("lora_" in name and grad.any() for name, grad in gradients.items())
    merged = Model(make_layer())
    wrapped = copy.deepcopy(model).merge_and_unload()
    merged.load_state_dict(wrapped.state_dict())
    out_merged, _ = merged(batch()[0])
    torch.testing.assert_close(out, out_merged.detach(), rtol=1e-11, atol=1e-12)
    # A small step down the adapters' gradients lowers the loss by their squared norm.
    loss = [mean_loss(model).item()]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-6 * parameter.grad
    loss.append(mean_loss(model).item())
    norm = sum(grad.square().sum().item() for grad in gradients.values())
    assert loss[0] - loss[1] == pytest.approx(1e-6 * norm, rel=1e-3)


def _of_experts(name: str, value: Tensor, experts: slice) -> Tensor:
    """The part of an adapter of all 8 experts that is theirs: peft has A [experts, r, in] and B [out, r, experts]."""
    if ".lora_A." in name:
        return value.view(8, 2, -1)[experts].reshape(-1, value.shape[1])
    return value.view(-1, 2, 8)[..., experts].reshape(len(value), -1)


def _lora_step(rank: int | None) -> dict[str, Tensor]:
    """peft's adapters after one step, and their gradients; None: one process with all tokens and experts."""
    model = lora(make_layer())
    if rank is not None:
        whole = {name: value.detach() for name, value in model.named_parameters() if "lora_" in name}
        model = lora(make_layer(ep_group=dist.group.WORLD, average_gradients=True))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(_of_experts(name, whole[name], slice(4 * rank, 4 * rank + 4)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = {"out": step(model, optimizer, slice(None) if rank is None else slice(2 * rank, 2 * rank + 2))}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found |= {f"d {name}": parameter.grad, name: parameter.detach()}
    return found


def test_lora_on_two_ranks_with_half_of_the_experts_each_steps_like_one() -> None:
    ranks, expected = run_ranks(2, _lora_step), _lora_step(None)
    torch.testing.assert_close(torch.cat([found["out"] for found in ranks]), expected["out"], rtol=1e-11, atol=1e-12)
    for rank, found in enumerate(ranks):
        assert set(found) == set(expected) and len(found) == 1 + 2 * 4
        for name in set(found) - {"out"}:
            mine = _of_experts(name, expected[name], slice(4 * rank, 4 * rank + 4))
            torch.testing.assert_close(found[name], mine, rtol=1e-10, atol=1e-12, msg=name)


class LowRank(nn.Module):
    """A matrix of each expert plus the product of two thin ones."""

    def __init__(self, shape: torch.Size, experts: list[int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        a = torch.randn(8, shape[1], 2, generator=generator, dtype=torch.float64)
        b = torch.randn(8, 2, shape[2], generator=generator, dtype=torch.float64)
        self.a, self.b = nn.Parameter(a[experts] * 0.1), nn.Parameter(b[experts] * 0.1)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def adapted_gradients(layer: MoELayer, part: slice) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, input gradient and gradients of what is not frozen, experts one by one."""
    layer.experts.requires_grad_(False)
    layer.router.requires_grad_(False)
    experts = list(layer.experts.ids)
    for name in ("gate_up", "down"):
        parametrize.register_parametrization(layer.experts, name, LowRank(getattr(layer.experts, name).shape, experts))
    x, target = (values[part] for values in batch())
    out = layer(x.requires_grad_())
    (out - target).square().sum().backward()
    found: dict[str, Tensor] = {}
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if parameter.grad is not None and name.startswith("experts."):
            found |= {f"{name} {expert}": grad for expert, grad in zip(experts, parameter.grad, strict=True)}
        elif parameter.grad is not None:
            found[name] = parameter.grad
    return out.detach(), x.grad, found


def _adapted(rank: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return adapted_gradients(make_layer(ep_group=dist.group.WORLD), slice(2 * rank, 2 * rank + 2))


def test_low_rank_adapters_on_two_ranks_with_all_else_frozen_equal_one() -> None:
    ranks, (out, d_x, expected) = run_ranks(2, _adapted), adapted_gradients(make_layer(), slice(0, 4))
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks]), out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torch.cat([rank[1] for rank in ranks]), d_x, rtol=1e-11, atol=1e-12)
    summed: dict[str, Tensor] = {}
    for _, _, found in ranks:
        for name, grad in found.items():
            assert name not in summed or not name.startswith("experts."), f"{name} is on two ranks"
            summed[name] = summed[name] + grad if name in summed else grad
    assert set(summed) == set(expected) and len(expected) == 8 * 4 + 2
    for name, grad in expected.items():
        torch.testing.assert_close(summed[name], grad, rtol=1e-10, atol=1e-12, msg=name)
