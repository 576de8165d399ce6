"""AdamW has the bits of torch.optim.AdamW's fused kernel, in fp32 and fp64."""

from __future__ import annotations

import pytest
import torch

from moe_engine.layout import ALIGNMENT
from moe_engine.optim.adamw import adamw


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_updates_have_the_bits_of_torch_adamw(dtype: torch.dtype, weight_decay: float) -> None:
    chance = torch.Generator().manual_seed(0)
    start = torch.randn(1003, generator=chance, dtype=dtype)
    parameter = torch.nn.Parameter(start.clone())
    settings = {"eps": 1e-8, "weight_decay": weight_decay}
    theirs = torch.optim.AdamW([parameter], betas=(0.9, 0.95), fused=True, **settings)
    master, exp_avg, exp_avg_sq = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, 11):
        gradient = torch.randn(1003, generator=chance, dtype=dtype) * 10.0 ** (-step)
        lr = 1e-2 / step
        theirs.param_groups[0]["lr"] = lr
        parameter.grad = gradient.clone()
        theirs.step()
        kept = gradient.clone()
        adamw(master, exp_avg, exp_avg_sq, gradient, step=step, lr=lr, beta1=0.9, beta2=0.95, **settings)
        assert torch.equal(gradient, kept)
        assert torch.equal(master, parameter.detach()), step
        assert torch.equal(exp_avg, theirs.state[parameter]["exp_avg"]), step
        assert torch.equal(exp_avg_sq, theirs.state[parameter]["exp_avg_sq"]), step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_element_has_the_same_bits_in_any_shard(dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(1)
    whole = [torch.rand(16 * ALIGNMENT, generator=chance, dtype=dtype) for _ in range(4)]
    cut = [x.clone() for x in whole]
    settings = {"step": 3, "lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    adamw(*whole, **settings)
    for start, end in ((0, ALIGNMENT), (ALIGNMENT, 9 * ALIGNMENT), (9 * ALIGNMENT, 16 * ALIGNMENT)):
        adamw(*(x[start:end] for x in cut), **settings)
    for one, other in zip(whole[:3], cut[:3], strict=True):
        assert torch.equal(one, other)


def test_first_update_moves_by_the_learning_rate_against_the_sign() -> None:
    master, gradient = torch.zeros(4), torch.tensor([3.0, -3.0, 1e-3, 0.0])
    adamw(
        master, torch.zeros(4), torch.zeros(4), gradient,
        step=1, lr=0.1, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0,
    )  # fmt: skip
    assert torch.allclose(master, torch.tensor([-0.1, 0.1, -0.1, 0.0]), rtol=1e-6, atol=0)
