"""A small set of named parameters placed in any layout: what optimizer and checkpoint see of a model.

Values and gradients depend on a parameter's global name alone. Gradients are multiples of 2^-10 that several ranks
share out among them, so that sums are exact in any order and every layout must give the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moe_engine.config.schema import ModelConfig, OptimConfig, PrecisionConfig
from moe_engine.distributed.groups import Groups, build_groups
from moe_engine.layout import Layout, Placement, split_stages
from moe_engine.model.names import NamedParameter
from moe_engine.optim.zero import ZeroOptimizer

PRECISIONS = {
    "bf16": PrecisionConfig("bf16", "bfloat16", "float32", "float32"),
    "bf16_moments": PrecisionConfig("bf16", "bfloat16", "float32", "float32", "bfloat16"),
    "fp32": PrecisionConfig("fp32", "float32", "float32", "float32"),
    "fp32_moments": PrecisionConfig("fp32", "float32", "float32", "float32", "bfloat16"),
    "fp64": PrecisionConfig("fp64", "float64", "float64", "float64"),
}
NUM_EXPERTS = 4
DENSE = {
    "embedding.weight": (1003, 8),  # an odd vocabulary; tied head: the first and the last stage hold it
    "norm.weight": (8,),
    **{f"layers.{i}.attention.out.weight": (24, 7) for i in range(4)},
    **{f"layers.{i}.attention_norm.weight": (8,) for i in range(4)},
    **{f"layers.{i}.moe.router.weight": (NUM_EXPERTS, 8) for i in range(4)},
}
EXPERT = {
    f"layers.{i}.moe.experts.{{}}.{name}": shape
    for i in (1, 3)
    for name, shape in (("gate_up", (10, 7)), ("down", (7, 5)))
}
SHAPES = {**DENSE, **{name.format(e): shape for name, shape in EXPERT.items() for e in range(NUM_EXPERTS)}}
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())


def value(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The initial value of a named parameter."""
    return torch.randn(SHAPES[name], generator=_chance("value", name), dtype=torch.float64).to(dtype)


def gradient(name: str, step: int) -> Tensor:
    """The whole gradient of a named parameter, float64."""
    return _multiples(SHAPES[name], "gradient", name, step)


def share_of_gradient(name: str, step: int, rank: int, size: int) -> Tensor:
    """What the rank with this place among `size` sharers has of `gradient(name, step)`."""
    others = [_multiples(SHAPES[name], "share", name, step, other) for other in range(1, size)]
    return others[rank - 1] if rank > 0 else gradient(name, step) - sum(others)


def optimizer_of(
    rank: int, layout: Layout, optim: OptimConfig, precision: str
) -> tuple[list[NamedParameter], Groups, ZeroOptimizer]:
    """The parameters of one rank with their initial values, and the optimizer over them."""
    model = ModelConfig(num_layers=4, tied_head=True)
    stages_of_rank = tuple((i,) for i in range(layout.pp))
    placement = Placement(tuple(split_stages(model, layout.pp)), stages_of_rank)
    groups = build_groups(layout, placement, rank)
    named = list(_parameters(groups, getattr(torch, PRECISIONS[precision].master)))
    return named, groups, ZeroOptimizer(named, groups, optim, PRECISIONS[precision])


def _parameters(groups: Groups, dtype: torch.dtype) -> Iterable[NamedParameter]:
    place = groups.layout.coordinate(groups.rank)
    local = NUM_EXPERTS // groups.layout.ep
    for name in DENSE:
        holders = groups.placement.holders(name)
        if place.pp in holders:
            yield NamedParameter((name,), nn.Parameter(value(name, dtype)), False, holders)
    for pattern in EXPERT:
        holders = groups.placement.holders(pattern)
        names = tuple(pattern.format(e) for e in range(place.ep * local, (place.ep + 1) * local))
        if place.pp in holders:
            stacked = torch.stack([value(name, dtype) for name in names])
            yield NamedParameter(names, nn.Parameter(stacked), True, holders)


def add_gradients(named: Iterable[NamedParameter], groups: Groups, step: int) -> None:
    """Accumulate this rank's share of every gradient, as backward would."""
    for each in named:
        sharers = (groups.expert if each.expert else groups.dense)[each.holders]
        pieces = (
            zip(each.names, each.parameter.grad, strict=True) if each.expert else [(each.names[0], each.parameter.grad)]
        )
        for name, grad in pieces:
            grad += share_of_gradient(name, step, sharers.rank, sharers.size)


def take(pieces: Iterable[tuple[str, int, int, torch.Size, Tensor]]) -> dict[str, list[tuple[int, torch.Size, Tensor]]]:
    """Copies of flat pieces by name, to be sent to the test's process."""
    return {name: [(start, shape, flat.clone())] for name, start, _, shape, flat in pieces}


def take_states(optimizer: ZeroOptimizer) -> dict[str, Any]:
    """Copies of this rank's masters and moments."""
    kinds = ("master", "exp_avg", "exp_avg_sq")
    return {
        kind: take((n, a, b, shape, states[kind]) for n, a, b, shape, states in optimizer.named_shards())
        for kind in kinds
    }


def whole(parts: Iterable[dict[str, list[tuple[int, torch.Size, Tensor]]]]) -> dict[str, Tensor]:
    """Put the pieces of all ranks together; every element must come exactly once."""
    pieces: dict[str, list[tuple[int, torch.Size, Tensor]]] = {}
    for part in parts:
        for name, found in part.items():
            pieces.setdefault(name, []).extend(found)
    joined = {}
    for name, found in pieces.items():
        found.sort(key=lambda piece: piece[0])
        ends = [start + flat.numel() for start, _, flat in found]
        assert [start for start, _, _ in found] == [0, *ends[:-1]], f"{name}: pieces overlap or leave gaps"
        joined[name] = torch.cat([flat for _, _, flat in found]).view(found[0][1])
    return joined


def _multiples(shape: tuple[int, ...], *words: object) -> Tensor:
    return torch.randint(-2000, 2001, shape, generator=_chance(*words)).double() / 1024


def _chance(*words: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(words).encode()))


def name_of(layout: Layout) -> str:
    """For ids of tests and names of folders."""
    return f"pp{layout.pp}-dp{layout.dp}-ep{layout.ep}"
