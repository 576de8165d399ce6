"""The layer in DDP, FSDP2 and checkpointing, on 1 and 2 ranks: gradients and a step equal the bare layer's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
from torch.utils.checkpoint import checkpoint
from wrapped_layer import MOE, Model, assert_equal_bare, bare, batch, in_ddp, make_layer, results, step, wrapped_step

from moe_engine import MoELayer


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


def _checkpointed(model: Model, ep: bool) -> nn.Module:
    model.run = functools.partial(checkpoint, model.moe, use_reentrant=False)
    return in_ddp(model, ep)


WRAPPERS = {"ddp": in_ddp, "fsdp2": _fsdp, "meta, fsdp2": _meta_fsdp, "checkpoint": _checkpointed}


@pytest.mark.parametrize("ep", [False, True], ids=["dp2", "ep2"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_two_ranks_equal_the_bare_layer(name: str, ep: bool) -> None:
    assert_equal_bare(run_ranks(2, wrapped_step, WRAPPERS[name], ep, 1), bare())


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
    ranks = run_ranks(2, wrapped_step, in_ddp, False, 2)
    expected = bare()
    for found in ranks:
        assert torch.equal(found["bias"], expected["bias"])


def test_one_checkpointed_process_equals_the_bare_layer() -> None:
    model = Model(make_layer())
    model.run = functools.partial(checkpoint, model.moe, use_reentrant=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.moe.update_balance_after(optimizer)
    assert_equal_bare([results(model, step(model, optimizer, slice(0, 4)))], bare())


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
    assert all(torch.equal(found, alone) and alone[0] > 0 for found, alone in ranks)
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
