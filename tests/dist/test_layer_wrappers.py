"""The layer inside other people's wrappers, on 1 and 2 ranks: gradients and an optimizer step equal the bare layer's.

The bare layer is one process with all tokens. Its loss is a mean over tokens, and so is that of each rank over its
half, so that ranks that average their gradients get the same.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from dense_moe import make_config
from measures import calc_diff
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

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


def _ddp(model: Model, ep: bool) -> nn.Module:
    if ep:  # the exchange has summed what experts need; they are on one rank each
        names = [f"moe.experts.{name}" for name, _ in model.moe.experts.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


def _fsdp(model: Model, ep: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    ignored = set(model.moe.experts.parameters()) if ep else None
    fully_shard(model.moe, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    return model


def _meta_fsdp(model: Model, ep: bool) -> nn.Module:
    """Made on the meta device, sharded there, and only then filled."""
    options = dict(ep_group=dist.group.WORLD, average_gradients=True) if ep else {}
    model.moe = MoELayer(MOE, dtype=torch.float64, device="meta", **options)
    wrapped = _fsdp(model, ep)
    model.moe.to_empty(device="cpu")
    model.moe.reset_parameters()
    model.moe.router.expert_bias.copy_(torch.arange(8) * 0.01)
    return wrapped


def _compiled(model: Model, ep: bool) -> nn.Module:
    model.run = torch.compile(model.moe.forward, fullgraph=True, backend="aot_eager")
    return _ddp(model, ep)


def _checkpointed(model: Model, ep: bool) -> nn.Module:
    model.run = functools.partial(checkpoint, model.moe, use_reentrant=False)
    return _ddp(model, ep)


WRAPPERS = {"ddp": _ddp, "fsdp2": _fsdp, "meta, fsdp2": _meta_fsdp, "checkpoint": _checkpointed}


def _wrapped(
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


@pytest.mark.parametrize("ep", [False, True], ids=["dp2", "ep2"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_two_ranks_equal_the_bare_layer(name: str, ep: bool) -> None:
    assert_equal_bare(run_ranks(2, _wrapped, WRAPPERS[name], ep, 1), bare())


def _sharded_in_fp8(rank: int) -> None:
    config = make_config()
    options: dict[str, Any] = dict(precision="fp8", dtype=torch.bfloat16)
    layer, twin = MoELayer(config, **options), MoELayer(config, **options)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    x = batch()[0].bfloat16()
    before = layer(x)
    before.square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=1e-3).step()
    twin.load_state_dict({name: value.full_tensor() if isinstance(value, DTensor) else value
                          for name, value in layer.state_dict().items()})  # fmt: skip
    after = layer(x)
    assert torch.equal(after, twin(x)) and not torch.equal(after, before)


def test_weights_gathered_by_fsdp2_are_quantised_anew() -> None:
    """It writes them into tensors of the step before, whose version stays."""
    run_ranks(2, _sharded_in_fp8)


def test_ddp_counts_every_micro_batch() -> None:
    """DDP sends the first rank's buffers to all before each forward: loads that others have counted must outlive it."""
    ranks = run_ranks(2, _wrapped, _ddp, False, 2)
    expected = bare()
    for found in ranks:
        assert torch.equal(found["bias"], expected["bias"])


@pytest.mark.slow
@pytest.mark.parametrize("ep", [False, True], ids=["dp2", "ep2"])
def test_two_compiled_ranks_equal_the_bare_layer(ep: bool) -> None:
    assert_equal_bare(run_ranks(2, _wrapped, _compiled, ep, 1, time_limit=300), bare())


@pytest.mark.slow
@pytest.mark.parametrize("ep", [False, True], ids=["dp2", "ep2"])
def test_two_compiled_ranks_with_a_capacity_equal_two_that_are_not_compiled(ep: bool) -> None:
    """What an expert drops depends on a rank's tokens, so the bare layer is the same on two ranks, by DDP."""
    config = make_config(expert_biases=True, aux_loss_weight=0.1, capacity_factor=0.75)
    compiled, plain = (run_ranks(2, _wrapped, wrapper, ep, 1, config, time_limit=300) for wrapper in (_compiled, _ddp))
    for found, expected in zip(compiled, plain, strict=True):
        assert set(found) == set(expected)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=name)
    dropless = run_ranks(2, _wrapped, _ddp, ep, 1)
    assert not torch.allclose(plain[0]["out"], dropless[0]["out"])


def test_one_checkpointed_process_equals_the_bare_layer() -> None:
    model = Model(make_layer())
    model.run = functools.partial(checkpoint, model.moe, use_reentrant=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.moe.update_balance_after(optimizer)
    assert_equal_bare([results(model, step(model, optimizer, slice(0, 4)))], bare())


@pytest.mark.slow
def test_one_compiled_graph_equals_the_bare_layer_by_inductor() -> None:
    model = Model(make_layer())
    model.run = torch.compile(model.moe.forward, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.moe.update_balance_after(optimizer)
    assert_equal_bare([results(model, step(model, optimizer, slice(0, 4)))], bare())


def lora(layer: MoELayer) -> Any:
    """peft's adapters on the stacked weights of the experts."""
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.gate_up", "experts.down"])
    torch.manual_seed(0)
    model = peft.get_peft_model(Model(layer), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.double()


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
    x, target = (values[slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)] for values in batch())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    y, aux = model(x)
    ((y - target).square().mean() + aux).backward()
    optimizer.step()
    found = {"out": y.detach()}
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


def mean_loss(model: Any) -> Tensor:
    x, target = batch()
    y, aux = model(x)
    return (y - target).square().mean() + aux  # type: ignore[no-any-return]


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


def _limited(rank: int) -> list[Tensor]:
    """Choices that DDP's layer and a bare one drop in two micro-batches of this rank's tokens."""
    counts = []
    for wrap in (DistributedDataParallel, nn.Sequential):
        layer = MoELayer(make_config(capacity_factor=0.5), dtype=torch.float64)
        wrapped = wrap(layer)
        for x in batch()[0][2 * rank : 2 * rank + 2].split(1):
            wrapped(x).sum().backward()
        counts.append(layer.dropped_choices)
    return counts


def test_ddp_leaves_each_rank_its_own_count_of_dropped_choices() -> None:
    ranks = run_ranks(2, _limited)
    assert all(torch.equal(in_ddp, bare) and bare[0] > 0 for in_ddp, bare in ranks)
    assert not torch.equal(ranks[0][0], ranks[1][0])


def _in_bf16(rank: int | None, wrapper: Callable[[Model, bool], nn.Module] | None, ep: bool) -> dict[str, Tensor]:
    """fp32 parameters under autocast; None: one process with all tokens and no wrapper."""
    options = dict(ep_group=dist.group.WORLD, average_gradients=True) if ep else {}
    model = Model(MoELayer(make_config(aux_loss_weight=0.1, num_groups=1, top_groups=1, top_k=8), **options)).float()
    wrapped = model if wrapper is None else wrapper(model, ep)
    x, target = (values.float()[slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)] for values in batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, aux = wrapped(x)
    ((y.float() - target).square().mean() + aux).backward()
    return results(model, y.detach().float())


@pytest.mark.parametrize("ep", [False, True], ids=["dp2", "ep2"])
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "checkpoint"])
def test_two_ranks_under_autocast_equal_the_bare_layer_under_it(name: str, ep: bool) -> None:
    """All experts of each token: rounding then moves no choice."""
    ranks, expected = run_ranks(2, _in_bf16, WRAPPERS[name], ep), _in_bf16(None, None, False)
    expected_out = expected.pop("out")
    assert calc_diff(torch.cat([found.pop("out") for found in ranks]), expected_out) < 1e-5
    for found in ranks:
        for key, value in found.items():
            assert value.dtype == torch.float32 and calc_diff(value, expected[key]) < 1e-3, key
