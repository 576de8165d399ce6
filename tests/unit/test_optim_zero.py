"""The optimizer on one rank: which parameters decay, where gradients go, when a step is refused."""

from __future__ import annotations

import math

import pytest
import torch
from sharded import PRECISIONS, SHAPES, add_gradients, gradient, optimizer_of, value
from torch import nn

from moe_engine.config.schema import OptimConfig
from moe_engine.layout import Layout
from moe_engine.model.names import NamedParameter
from moe_engine.optim import zero
from moe_engine.optim.zero import decays

OPTIM = OptimConfig(clip=0.0)


def named(name: str, *shape: int, expert: bool = False) -> NamedParameter:
    return NamedParameter((name,), nn.Parameter(torch.zeros(shape)), expert, (0,))


def test_only_matrices_decay_and_the_router_does_not() -> None:
    assert decays(named("layers.0.attention.out.weight", 4, 4), OPTIM)
    assert decays(named("layers.1.moe.experts.0.gate_up", 2, 4, 4, expert=True), OPTIM)
    assert decays(named("head.weight", 9, 4), OPTIM)
    assert not decays(named("layers.1.moe.router.weight", 4, 4), OPTIM)
    assert not decays(named("mtp.0.block.moe.router.weight", 4, 4), OPTIM)
    assert not decays(named("norm.weight", 4), OPTIM)
    assert not decays(named("layers.0.attention.out.bias", 4), OPTIM)
    assert not decays(named("layers.1.moe.experts.0.bias", 2, 4, expert=True), OPTIM)


def test_embedding_decays_by_option() -> None:
    embedding = named("embedding.weight", 9, 4)
    assert decays(embedding, OptimConfig(decay_embedding=True))
    assert not decays(embedding, OptimConfig(decay_embedding=False))


def test_masters_keep_the_values_that_bf16_parameters_round() -> None:
    parameters, _, optimizer = optimizer_of(0, Layout(), OPTIM, "bf16")
    masters = {shard.name: shard.states["master"].view(shard.shape) for shard in optimizer.named_shards()}
    assert masters.keys() == SHAPES.keys()
    for each in parameters:
        for name, piece in each.pieces():
            assert torch.equal(masters[name], value(name))
            assert piece.dtype == torch.bfloat16
            assert torch.equal(piece, value(name).bfloat16())
    assert not torch.equal(value("embedding.weight"), value("embedding.weight").bfloat16().float())


def test_fill_masters_sets_masters_and_the_rounded_parameters() -> None:
    parameters, _, optimizer = optimizer_of(0, Layout(), OPTIM, "bf16")
    optimizer.fill_masters(lambda name, start, end, shape: -value(name).view(-1)[start:end])
    for shard in optimizer.named_shards():
        assert torch.equal(shard.states["master"].view(shard.shape), -value(shard.name))
    for each in parameters:
        for name, piece in each.pieces():
            assert torch.equal(piece, -value(name).bfloat16())


def test_backward_of_bf16_parameters_accumulates_in_fp32_in_the_flat_buffer() -> None:
    weight = nn.Parameter(torch.randn(8, 3))
    _, groups, _ = optimizer_of(0, Layout(), OPTIM, "bf16")
    optimizer = zero.ZeroOptimizer([NamedParameter(("w",), weight, False, (0,))], groups, OPTIM, PRECISIONS["bf16"])
    optimizer.zero_grad()
    x = torch.randn(5, 3, dtype=torch.bfloat16)
    total = torch.zeros(8, 3)
    for scale in (1.0, 2.0**-9, 2.0**-9):  # the small ones would be lost in bf16
        torch.nn.functional.linear(x, weight).sum().mul(scale).backward()
        total += (torch.ones(8, 5, dtype=torch.bfloat16) @ x * scale).float()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, total)
    optimizer.reduce_gradients()
    (shard,) = optimizer.named_gradient_shards()
    assert shard.gradient.data_ptr() == weight.grad.data_ptr()  # nothing was copied
    assert torch.equal(shard.gradient.view(8, 3), total)


def test_idle_parameters_have_zero_gradients() -> None:
    parameters, _, optimizer = optimizer_of(0, Layout(), OPTIM, "fp32")
    optimizer.zero_grad()
    optimizer.reduce_gradients()
    assert all(each.parameter.grad is not None and not each.parameter.grad.any() for each in parameters)
    assert optimizer.gradient_norm() == 0.0
    before = [shard.states["master"].clone() for shard in optimizer.named_shards() if shard.name == "norm.weight"]
    stats = optimizer.step(0.1)
    after = [shard.states["master"] for shard in optimizer.named_shards() if shard.name == "norm.weight"]
    assert not stats.skipped
    assert torch.equal(before[0], after[0])


def test_gradients_of_a_step_do_not_reach_the_next() -> None:
    parameters, groups, optimizer = optimizer_of(0, Layout(), OPTIM, "fp32")
    for step in range(2):
        optimizer.zero_grad()
        add_gradients(parameters, groups, step)
        optimizer.reduce_gradients()
        for shard in optimizer.named_gradient_shards():
            assert torch.equal(shard.gradient.double().view(shard.shape), gradient(shard.name, step))


def test_gradients_are_reduced_once_and_used_only_then() -> None:
    _, _, optimizer = optimizer_of(0, Layout(), OPTIM, "fp32")
    for use in (optimizer.gradient_norm, lambda: optimizer.step(0.1), lambda: list(optimizer.named_gradient_shards())):
        with pytest.raises(RuntimeError, match="not reduced"):
            use()
    optimizer.zero_grad()
    optimizer.reduce_gradients()
    with pytest.raises(RuntimeError, match="already reduced"):
        optimizer.reduce_gradients()
    optimizer.zero_grad()
    optimizer.reduce_gradients()


def test_replaced_gradient_is_an_error_and_zero_grad_repairs_it() -> None:
    parameters, _, optimizer = optimizer_of(0, Layout(), OPTIM, "fp32")
    optimizer.zero_grad()
    parameters[0].parameter.grad = torch.ones_like(parameters[0].parameter)
    with pytest.raises(RuntimeError, match="embedding.weight"):
        optimizer.reduce_gradients()
    parameters[0].parameter.grad = None
    optimizer.zero_grad()
    optimizer.reduce_gradients()


def test_clipping_scales_the_update_and_not_the_raw_gradients() -> None:
    states = {}
    for clip in (0.0, 0.5):
        parameters, groups, optimizer = optimizer_of(0, Layout(), OptimConfig(clip=clip), "fp64")
        optimizer.zero_grad()
        add_gradients(parameters, groups, 0)
        optimizer.reduce_gradients()
        stats = optimizer.step(1e-3)
        assert stats.clip_scale == (0.5 / stats.grad_norm if clip else 1.0)
        for shard in optimizer.named_gradient_shards():
            assert torch.equal(shard.gradient.view(shard.shape), gradient(shard.name, 0))
        states[clip] = {shard.name: shard.states["exp_avg"].clone() for shard in optimizer.named_shards()}
    for name, moment in states[0.0].items():
        assert torch.allclose(states[0.5][name], moment * stats.clip_scale, rtol=1e-13, atol=0)


def test_nan_gradient_skips_the_step() -> None:
    parameters, groups, optimizer = optimizer_of(0, Layout(), OPTIM, "fp32")
    optimizer.zero_grad()
    add_gradients(parameters, groups, 0)
    assert parameters[2].parameter.grad is not None
    parameters[2].parameter.grad[0] = math.nan
    optimizer.reduce_gradients()
    stats = optimizer.step(1e-3)
    assert stats.skipped and stats.grad_norm == math.inf and optimizer.state_steps == 0
    for shard in optimizer.named_shards():
        assert torch.equal(shard.states["master"].view(shard.shape), value(shard.name))
        assert not shard.states["exp_avg"].any()


def test_work_in_blocks_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    masters = []
    for block in (zero.BLOCK, 128):
        monkeypatch.setattr(zero, "BLOCK", block)
        monkeypatch.setattr(zero, "UPDATE_BLOCK", block)
        parameters, groups, optimizer = optimizer_of(0, Layout(), OptimConfig(), "bf16")
        optimizer.zero_grad()
        add_gradients(parameters, groups, 0)
        optimizer.reduce_gradients()
        optimizer.step(1e-3)
        masters.append({shard.name: shard.states["master"].clone() for shard in optimizer.named_shards()})
        for each in parameters:
            for name, piece in each.pieces():
                assert torch.equal(piece.view(-1), masters[-1][name].bfloat16())
    assert all(torch.equal(masters[0][name], masters[1][name]) for name in SHAPES)
