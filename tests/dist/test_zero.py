"""Sharded AdamW on several ranks equals torch.optim.AdamW in one process; norm and memory in every layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded import NUMEL, SHAPES, add_gradients, gradient, name_of, optimizer_of, take, take_states, value, whole
from torch import Tensor

from moe_engine.config.schema import OptimConfig
from moe_engine.distributed.collectives import Communicator
from moe_engine.layout import ALIGNMENT, Layout
from moe_engine.optim.clip import GradientNorm

OPTIM = OptimConfig(weight_decay=0.1, clip=50.0, decay_embedding=False)
LR = 3e-3
STEPS = 3
LAYOUTS = [
    Layout(),
    Layout(dp=2),
    Layout(dp=2, ep=2),
    Layout(pp=2),  # the embedding is shared out over both stages
    Layout(pp=2, dp=2),
    Layout(pp=2, dp=2, ep=2),
    Layout(dp=4, ep=2),
    Layout(dp=4, ep=4),
    Layout(pp=4),
]


def _train(rank: int, layout: Layout, precision: str) -> dict[str, Any]:
    named, groups, optimizer = optimizer_of(rank, layout, OPTIM, precision)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        add_gradients(named, groups, step)
        optimizer.reduce_gradients()
        norms.append(optimizer.step(LR).grad_norm)
    pieces = [(name, piece.detach().clone()) for each in named for name, piece in each.pieces()]
    gradients = take(optimizer.named_gradient_shards())
    return {"norms": norms, "parameters": pieces, "gradients": gradients, **take_states(optimizer)}


def _no_decay(name: str) -> bool:
    return len(SHAPES[name]) < 2 or name.endswith("router.weight") or name == "embedding.weight"


def _reference(dtype: torch.dtype, moments: torch.dtype) -> dict[str, Any]:
    """torch's fused AdamW on whole parameters, filled up to whole vectors: it updates what is left by other code.

    moments: the format that these are rounded to after each step.
    """
    parameters = {name: torch.nn.Parameter(_filled(value(name, dtype))) for name in SHAPES}
    groups = [
        {"params": [p for name, p in parameters.items() if _no_decay(name) == no_decay], "weight_decay": decay}
        for no_decay, decay in ((True, 0.0), (False, 0.1))
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, fused=True)
    norms = []
    for step in range(STEPS):
        norms.append(math.sqrt(math.fsum(float(gradient(name, step).square().sum()) for name in SHAPES)))
        scale = min(1.0, OPTIM.clip / norms[-1])
        for name, parameter in parameters.items():
            parameter.grad = _filled(gradient(name, step).to(dtype) * scale)
        adamw.step()
        for state in adamw.state.values():
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind].copy_(state[kind].to(moments))
    found: dict[str, Any] = {"norms": norms, "master": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, parameter in parameters.items():
        states = {"master": parameter.detach(), **adamw.state[parameter]}
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            found[kind][name] = states[kind][: math.prod(SHAPES[name])].view(SHAPES[name])
    return found


def _filled(x: Tensor) -> Tensor:
    """Flat, with zeros up to a multiple of ALIGNMENT elements."""
    return torch.nn.functional.pad(x.flatten(), (0, -x.numel() % ALIGNMENT))


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    return {
        "fp32": _reference(torch.float32, torch.float32),
        "fp32_moments": _reference(torch.float32, torch.bfloat16),
        "fp64": _reference(torch.float64, torch.float64),
    }


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        *((layout, "fp32") for layout in LAYOUTS),
        *((layout, "fp32_moments") for layout in (Layout(dp=4, ep=2), Layout(pp=2, dp=2, ep=2))),
    ],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_gradients_and_states_have_the_bits_of_torch_in_one_process(
    layout: Layout, precision: str, references: dict[str, dict[str, Any]]
) -> None:
    results = run_ranks(layout.world, _train, layout, precision)
    gradients = whole(result["gradients"] for result in results)
    for name in SHAPES:  # raw: before clipping
        assert torch.equal(gradients[name].double(), gradient(name, STEPS - 1)), name
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        found, right = whole(result[kind] for result in results), references[precision][kind]
        assert found.keys() == SHAPES.keys()
        narrow = precision == "fp32_moments" and kind != "master"
        for name in SHAPES:
            assert found[name].dtype == (torch.bfloat16 if narrow else torch.float32)
            assert torch.equal(found[name].float(), right[name]), (kind, name)
    for result in results:
        assert result["norms"] == references[precision]["norms"]


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(pp=2, dp=2, ep=2)], ids=name_of)
def test_float64_states_equal_torch_adamw(layout: Layout, references: dict[str, dict[str, Any]]) -> None:
    results = run_ranks(layout.world, _train, layout, "fp64")
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        found, right = whole(result[kind] for result in results), references["fp64"][kind]
        for name in SHAPES:
            assert torch.allclose(found[name], right[name], rtol=1e-12, atol=1e-15), (kind, name)


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(pp=2, dp=2)], ids=name_of)
def test_bf16_parameters_are_the_rounded_masters_on_every_rank(
    layout: Layout, references: dict[str, dict[str, Any]]
) -> None:
    results = run_ranks(layout.world, _train, layout, "bf16")
    masters = whole(result["master"] for result in results)
    seen = set()
    for result in results:
        for name, parameter in result["parameters"]:
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(parameter, masters[name].bfloat16()), name
            seen.add(name)
    assert seen == SHAPES.keys()
    for name in SHAPES:  # gradients are fp32, so masters do what they do in an fp32 run
        assert torch.equal(masters[name], references["fp32"]["master"][name]), name


def _norms(rank: int, layout: Layout) -> tuple[float, float, float, float]:
    """Norms of gradients 1, 0, of wild magnitudes, and with one NaN in the world."""
    named, groups, optimizer = optimizer_of(rank, layout, OPTIM, "fp32")
    optimizer.zero_grad()
    optimizer.reduce_gradients()
    zero = optimizer.gradient_norm()
    for shard in optimizer.named_gradient_shards():
        shard.gradient.fill_(1.0)
    ones = optimizer.gradient_norm()
    for shard in optimizer.named_gradient_shards():
        wild = value(shard.name) ** 9 * 10.0 ** (len(shard.name) % 7 * 3 - 20)
        shard.gradient.copy_(wild.view(-1)[shard.start : shard.end])
    wild_norm = optimizer.gradient_norm()
    for shard in optimizer.named_gradient_shards():
        if shard.name == "layers.3.moe.experts.2.down" and shard.start == 0:
            shard.gradient[0] = math.nan
    return ones, zero, wild_norm, optimizer.gradient_norm()


def test_norm_is_the_same_in_every_layout() -> None:
    results = [result for layout in LAYOUTS for result in run_ranks(layout.world, _norms, layout)]
    expected = math.sqrt(
        math.fsum(
            x * x
            for name in SHAPES
            for x in (value(name) ** 9 * 10.0 ** (len(name) % 7 * 3 - 20)).double().view(-1).tolist()
        )
    )
    for ones, zero, wild, poisoned in results:
        assert ones == math.sqrt(NUMEL)
        assert zero == 0.0
        assert wild == results[0][2]  # to the last bit
        assert wild == pytest.approx(expected, rel=1e-14)
        assert poisoned == math.inf


def _two_ranks_norm(rank: int) -> float:
    world = Communicator("world", (0, 1), rank, torch.distributed.group.WORLD)
    gradients = [torch.tensor([2.0, 4.0])] if rank == 0 else [torch.tensor([6.0, 8.0]), torch.zeros(3)]
    owned = [("a", 2, 2)] if rank == 0 else [("b", 2, 2), ("c", 3, 3)]
    return GradientNorm(owned, world, torch.device("cpu"))(gradients)


def test_squared_sums_of_two_ranks_add_up() -> None:
    norms = run_ranks(2, _two_ranks_norm)
    assert norms[0] == norms[1] == math.sqrt(120)  # 10.954452: squared sums 20 and 100
    assert norms[0] == pytest.approx(10.954452, abs=1e-6)


def _wrong_sharers(rank: int) -> str:
    named, groups, _ = optimizer_of(rank, Layout(dp=2, ep=2), OPTIM, "fp32")
    world, device = groups.world, torch.device("cpu")
    with pytest.raises(ValueError) as error:
        GradientNorm([("a", 2, 4)] if rank == 0 else [("a", 1, 4)], world, device)
    return str(error.value)


def test_shards_that_leave_a_gap_are_refused_on_all_ranks() -> None:
    assert all("a: 3 of 4 elements" in message for message in run_ranks(2, _wrong_sharers))


def _memory(rank: int, layout: Layout, precision: str, states: int) -> tuple[int, int, float]:
    """(bytes held, padding allowed, bytes by the formula) of one rank."""
    named, groups, optimizer = optimizer_of(rank, layout, OPTIM, precision)
    tensors = [t for each in named for t in (each.parameter.data, each.parameter.grad)]
    tensors += [t for shard in optimizer.named_shards() for t in shard.states.values()]
    tensors += [t for bucket in optimizer._buckets for t in vars(bucket).values() if isinstance(t, Tensor)]
    held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    formula = 0.0
    for each in named:
        shards = (groups.expert if each.expert else groups.dense)[each.holders].size
        formula += (6 + states / shards) * each.parameter.numel()
    padding = 18 * 64 * (len(named) + len(optimizer._buckets) * groups.world.size)
    return held, padding, formula


@pytest.mark.parametrize(
    ("layout", "precision", "states"),
    [
        (Layout(), "bf16", 12),
        (Layout(dp=2), "bf16_moments", 8),
        (Layout(pp=2, dp=2, ep=2), "bf16", 12),
    ],
)
def test_memory_is_6_bytes_and_a_share_of_12_or_8_for_each_parameter(
    layout: Layout, precision: str, states: int
) -> None:
    for held, padding, formula in run_ranks(layout.world, _memory, layout, precision, states):
        assert formula <= held <= formula + padding


def _skip(rank: int) -> tuple[bool, bool, int, list[bool]]:
    named, groups, optimizer = optimizer_of(rank, Layout(dp=2), OPTIM, "bf16")
    before = [*(each.parameter.detach().clone() for each in named), *_flat_states(optimizer)]
    optimizer.zero_grad()
    add_gradients(named, groups, 0)
    if rank == 1:  # one rank alone has a bad value
        named[0].parameter.grad.view(-1)[5] = math.inf
    optimizer.reduce_gradients()
    stats = optimizer.step(LR)
    after = [*(each.parameter.detach() for each in named), *_flat_states(optimizer)]
    unchanged = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    optimizer.zero_grad()
    add_gradients(named, groups, 0)
    optimizer.reduce_gradients()
    return stats.skipped, optimizer.step(LR).skipped, optimizer.state_steps, unchanged


def _flat_states(optimizer: Any) -> list[Tensor]:
    return [flat.clone() for shard in optimizer.named_shards() for flat in shard.states.values()]


def test_infinite_gradient_on_one_rank_skips_the_step_on_all() -> None:
    for skipped, skipped_next, steps, unchanged in run_ranks(2, _skip):
        assert skipped and not skipped_next
        assert steps == 1
        assert all(unchanged)
