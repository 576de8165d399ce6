"""The layer between two projections, alone and in other people's wrappers: one step, and what it gave.

The bare layer is one process with all tokens. Its loss is a mean over tokens, and so is that of each rank over its
half, so that ranks that average their gradients get the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from dense_moe import make_config
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moe_engine import MoEConfig, MoELayer

MOE = make_config(expert_biases=True, aux_loss_weight=0.1)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(4, 6, 24, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, target


def make_layer(config: MoEConfig = MOE, **options: Any) -> MoELayer:
    layer = MoELayer(config, dtype=torch.float64, **options)
    layer.router.expert_bias.copy_(torch.arange(8) * 0.01)
    return layer


class Model(nn.Module):
    """The layer between two projections, so that wrappers find a model around it."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24, dtype=torch.float64)
        nn.init.eye_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)
        self.moe = layer
        self.run: Callable[..., Any] | None = None  # in place of the layer's own forward

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        run = self.run or self.moe
        y, aux = run(self.inner(x), return_aux=True)
        return y, aux


def step(model: Callable[..., Any], optimizer: torch.optim.Optimizer, part: slice, micro_batches: int = 1) -> Tensor:
    """Gradients over `part` of the batch and one optimizer step; the output."""
    x, target = (values[part] for values in batch())
    outs = []
    for x_part, target_part in zip(x.chunk(micro_batches), target.chunk(micro_batches), strict=True):
        y, aux = model(x_part)
        (((y - target_part).square().mean() + aux) / micro_batches).backward()
        outs.append(y.detach())
    optimizer.step()
    return torch.cat(outs)


def results(model: Model, out: Tensor) -> dict[str, Tensor]:
    """Parameters and gradients by global name, DTensors gathered."""
    for parameter in model.parameters():
        assert parameter.grad is not None
    whole = {}
    for gradients in (False, True):
        values = {}
        for name, parameter in model.named_parameters():
            value = parameter.grad if gradients else parameter.detach()
            values[name] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in values.items():
            key = f"{'d ' if gradients else ''}{name}"
            if ".experts." in name:
                for i, expert in enumerate(model.moe.experts.ids):
                    whole[f"{key} {expert}"] = value[i]
            else:
                whole[key] = value
    return whole | {"out": out, "bias": model.moe.router.expert_bias.clone()}


def bare() -> dict[str, Tensor]:
    model = Model(make_layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.moe.update_balance_after(optimizer)
    return results(model, step(model, optimizer, slice(0, 4)))


def in_ddp(model: Model, ep: bool) -> nn.Module:
    if ep:  # the exchange has summed what experts need; they are on one rank each
        names = [f"moe.experts.{name}" for name, _ in model.moe.experts.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


def wrapped_step(
    rank: int,
    wrapper: Callable[[Model, bool], nn.Module],
    ep: bool,
    micro_batches: int,
    config: MoEConfig = MOE,
) -> dict[str, Tensor]:
    options = dict(ep_group=init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))["ep"], average_gradients=True)
    model = Model(make_layer(config, **(options if ep else {})))
    wrapped = wrapper(model, ep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.moe.update_balance_after(optimizer, dist.group.WORLD)
    out = step(wrapped, optimizer, slice(2 * rank, 2 * rank + 2), micro_batches)
    return results(model, out)


def assert_equal_bare(ranks: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(torch.cat([rank["out"] for rank in ranks]), expected["out"], rtol=1e-11, atol=1e-12)
    seen = {"out"}
    for found in ranks:
        for name, value in found.items():
            if name != "out":
                torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=name)
                seen.add(name)
    assert seen == set(expected)
