"""MegaBlocks' layers over two ranks equal one process: outputs, gradients, and which tokens a capacity drops."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

from moe_engine.integrations import megablocks
from moe_engine.integrations.megablocks import Arguments, MoE, dMoE

TOKENS = (9, 14)  # of each rank


def make(kind: type[MoE], changes: dict[str, Any], **more: Any) -> MoE:
    torch.manual_seed(0)
    normal = functools.partial(nn.init.normal_, std=0.4)
    args = Arguments(
        hidden_size=12, ffn_hidden_size=10, moe_num_experts=6, moe_top_k=2, fp16=False, device="cpu",
        init_method=normal, output_layer_init_method=normal, **changes, **more,
    )  # fmt: skip
    return kind(args).double()


def step(layer: MoE, part: slice) -> dict[str, Tensor]:
    """Over a part of the batch: output, tokens of each expert, gradients of a sum over tokens."""
    x, d_out = (torch.randn(23, 12, generator=torch.Generator().manual_seed(i)).double() for i in (1, 2))
    megablocks.clear_load_balancing_loss()
    out, _ = layer(x[part, None])
    out.backward(d_out[part, None])
    ((counts, _),) = megablocks.get_load_balancing_loss()
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "counts": counts} | gradients


def _rank(rank: int, kind: type[MoE], changes: dict[str, Any]) -> dict[str, Tensor]:
    layer = make(kind, changes, moe_expert_model_parallelism=True, expert_parallel_group=dist.group.WORLD)
    assert all(megablocks.param_is_expert_model_parallel(p) for p in layer.experts.mlp.parameters())
    return step(layer, slice(0, TOKENS[0]) if rank == 0 else slice(TOKENS[0], None))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (dMoE, {"mlp_type": "glu"}),
        (MoE, {"moe_capacity_factor": 0.6}),
    ],
    ids=["dropless", "capacity"],
)
def test_two_ranks_equal_one_process(kind: type[MoE], changes: dict[str, Any]) -> None:
    ranks = run_ranks(2, _rank, kind, changes)
    whole = step(make(kind, changes), slice(None))
    torch.testing.assert_close(torch.cat([found["out"] for found in ranks]), whole["out"], rtol=1e-10, atol=1e-12)
    assert torch.equal(ranks[0]["counts"] + ranks[1]["counts"], whole["counts"])
    for name, gradient in whole.items():
        if name == "router.layer.weight":
            torch.testing.assert_close(ranks[0][name] + ranks[1][name], gradient, rtol=1e-9, atol=1e-11)
        elif name.startswith("experts.mlp"):  # as MegaBlocks has it, for ranks whose gradients are averaged
            torch.testing.assert_close(
                torch.cat([found[name] for found in ranks]) * 2, gradient, rtol=1e-9, atol=1e-11, msg=name
            )
