"""AdamW has the bits of torch.optim.AdamW's fused kernel, in fp32, in fp64, and with moments rounded after steps."""

from __future__ import annotations

import math

import pytest
import torch

from moe_engine.config.validate import LONGEST_BF16_MEMORY
from moe_engine.layout import ALIGNMENT
from moe_engine.optim.adamw import adamw


@pytest.mark.parametrize(
    ("dtype", "moments"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_updates_have_the_bits_of_torch_adamw(dtype: torch.dtype, moments: torch.dtype, weight_decay: float) -> None:
    """Narrow moments: those of torch's, each rounded to the nearest after its step."""
    chance = torch.Generator().manual_seed(0)
    start = torch.randn(1003, generator=chance, dtype=dtype)
    parameter = torch.nn.Parameter(start.clone())
    settings = {"eps": 1e-8, "weight_decay": weight_decay}
    theirs = torch.optim.AdamW([parameter], betas=(0.9, 0.95), fused=True, **settings)
    master, exp_avg, exp_avg_sq = start.clone(), *(torch.zeros_like(start, dtype=moments) for _ in range(2))
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
        for name, moment in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            state = theirs.state[parameter][name]
            state.copy_(state.to(moments))
            assert moment.dtype == moments and torch.equal(moment.to(dtype), state), (name, step)


@pytest.mark.parametrize(
    ("dtype", "moments"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.float32, torch.bfloat16)],
)
def test_an_element_has_the_same_bits_in_any_shard(dtype: torch.dtype, moments: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(1)
    whole = [torch.rand(16 * ALIGNMENT, generator=chance, dtype=dtype) for _ in range(4)]
    whole[1:3] = [moment.to(moments) for moment in whole[1:3]]
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


@pytest.mark.parametrize(("beta2", "follows"), [(0.95, True), (LONGEST_BF16_MEMORY, True), (0.998, False)])
def test_bf16_moments_follow_gradients_that_become_small_up_to_the_longest_memory(beta2: float, follows: bool) -> None:
    """Gradients a tenth as large: their mean square becomes a hundredth, or stays as it was for ever."""
    chance = torch.Generator().manual_seed(2)
    states = [torch.zeros(512), *(torch.zeros(512, dtype=torch.bfloat16) for _ in range(2))]
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": beta2, "eps": 1e-8, "weight_decay": 0.0}
    before, steps = [], math.ceil(6 / (1 - beta2))
    for size in (1.0, 0.1):
        for step in range(steps):
            adamw(*states, size * torch.randn(512, generator=chance), step=step + 1, **settings)
        before.append(float(states[2].float().mean()))
    assert (0.7 < before[1] / 0.01 < 1.3) if follows else (before[1] > 0.9 * before[0])
