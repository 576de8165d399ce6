"""Routing: published values, the engine's router, and the Triton kernel against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import interpreted
from measures import randn
from torch import Tensor

import moe_kernels
from moe_engine.config.schema import MoEConfig
from moe_engine.moe.router import Router
from moe_kernels.reference.route import weigh

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities on purpose
device = interpreted("route")
IMPLEMENTATIONS = [moe_kernels.route, device.route]
CASES: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_k": 4, "num_groups": 8, "top_groups": 3},
    {"top_k": 4, "num_groups": 8, "top_groups": 3, "group_score": "max", "score_function": "softmax"},
    {"top_k": 1, "score_function": "softmax", "normalize": False, "route_scale": 2.5},
    {"top_k": 6, "num_groups": 4, "top_groups": 2, "normalize": False},
    {"top_k": 4, "score_function": "softmax"},
]


@pytest.mark.parametrize("route", IMPLEMENTATIONS)
def test_published_values(route: Callable[..., tuple[Tensor, ...]]) -> None:
    logits = torch.tensor([[2, -1, 1, 0.9, 1.5, 0, -2, 0.5]])
    ids, weights, scores, counts = route(logits, torch.zeros(8), 2, 4, 2, "sum_top2", route_scale=2.5)
    expected = [0.880797, 0.268941, 0.731059, 0.710949, 0.817574, 0.5, 0.119203, 0.622459]
    assert scores[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert ids.tolist() == [[2, 4]] and weights[0].tolist() == pytest.approx([1.180167, 1.319832], abs=1e-6)
    assert counts.tolist() == [0, 0, 1, 0, 1, 0, 0, 0] and counts.dtype == torch.int64


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_experts", [16, 40, 256])
def test_the_kernel_and_the_engines_router_choose_alike(num_experts: int, case: dict[str, Any]) -> None:
    logits, bias = randn(13, num_experts, dtype=torch.float32) * 2, randn(num_experts, dtype=torch.float32, seed=1) / 9
    mask = torch.arange(13) != 4
    expected = moe_kernels.route(logits, bias, token_mask=mask, **case)
    result = device.route(logits, bias, token_mask=mask, **case)
    for a, b in zip(result, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(result[0], expected[0]) and torch.equal(result[3], expected[3])
    assert torch.allclose(result[1], expected[1], rtol=1e-5) and torch.allclose(result[2], expected[2], rtol=1e-5)
    assert result[3].sum() == 12 * case["top_k"]

    names = {"top_k", "num_groups", "top_groups", "group_score", "score_function", "route_scale"}
    options = {name: value for name, value in case.items() if name in names}
    normalize = case.get("normalize", True)
    config = MoEConfig(
        dim=num_experts, expert_hidden=8, num_experts=num_experts, normalize_weights=normalize, **options
    )
    router = Router(config)
    with torch.no_grad():
        router.weight.copy_(torch.eye(num_experts))
        router.expert_bias.copy_(bias)
        routing = router(logits)
    assert torch.equal(routing.expert_ids, result[0])
    assert torch.allclose(routing.expert_weights, result[1], rtol=1e-5)


@pytest.mark.parametrize("route", IMPLEMENTATIONS)
def test_masked_experts_never_win(route: Callable[..., tuple[Tensor, ...]]) -> None:
    bias = torch.full((8,), -5.0)
    ids, _, _, _ = route(randn(9, 8, dtype=torch.float32), bias, 3, 4, 2)
    assert all(len({i // 2 for i in row}) <= 2 for row in ids.tolist())


@pytest.mark.parametrize("route", IMPLEMENTATIONS)
def test_equal_scores_go_to_the_lower_index(route: Callable[..., tuple[Tensor, ...]]) -> None:
    ids, weights, _, _ = route(torch.zeros(2, 8), torch.zeros(8), 2, 4, 2)
    assert ids.tolist() == [[0, 1]] * 2 and weights.tolist() == [[0.5, 0.5]] * 2
    negative_zero = torch.zeros(8)
    negative_zero[::2] = -0.0
    softmax = route(torch.full((1, 8), -1e30) * negative_zero.sign(), negative_zero, 2, score_function="softmax")
    assert softmax[0].tolist() == [[0, 1]]


@pytest.mark.parametrize("route", IMPLEMENTATIONS)
def test_scores_that_underflow_still_give_weights(route: Callable[..., tuple[Tensor, ...]]) -> None:
    _, weights, _, _ = route(torch.full((3, 16), -120.0), torch.zeros(16), 4, route_scale=2.5)
    assert weights.tolist() == [[0.625] * 4] * 3


@pytest.mark.parametrize("route", IMPLEMENTATIONS)
def test_nan_and_no_tokens(route: Callable[..., tuple[Tensor, ...]]) -> None:
    logits = randn(2, 16, dtype=torch.float32)
    logits[0, 3] = float("nan")
    ids, _, _, counts = route(logits, torch.zeros(16), 4, 4, 2)
    assert 3 not in ids[0].tolist() and (ids >= 0).all() and (ids < 16).all() and counts.sum() == 8
    ids, weights, scores, counts = route(logits[:0], torch.zeros(16), 4)
    assert ids.shape == weights.shape == (0, 4) and scores.shape == (0, 16) and not counts.any()


@pytest.mark.parametrize("case", CASES)
def test_the_engines_router_is_the_op_with_a_gradient(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a forward, its very weights; the gradient has the bits of autograd through the same formula."""
    names = {"normalize": "normalize_weights"}
    config = MoEConfig(dim=40, expert_hidden=8, num_experts=40, **{names.get(k, k): v for k, v in case.items()})
    calls: list[tuple[Tensor, ...]] = []
    op = moe_kernels.route
    monkeypatch.setattr(moe_kernels, "route", lambda *args: (calls.append(op(*args)), calls[-1])[1])
    router, x = Router(config), randn(13, 40, dtype=torch.float32)
    routing = router(x, torch.arange(13) != 4)
    (ids, weights, _, loads), d_weights = calls[0], randn(13, case["top_k"], dtype=torch.float32, seed=1)
    assert len(calls) == 1 and torch.equal(routing.expert_weights, weights) and not router.num_tokens_per_expert.any()
    (result,) = torch.autograd.grad(routing.expert_weights, routing.router_logits, d_weights)
    assert torch.equal(router.num_tokens_per_expert, loads)
    logits = routing.router_logits.detach().requires_grad_()
    plain = weigh(logits, ids, config.score_function, config.normalize_weights, config.route_scale)
    assert torch.equal(result, torch.autograd.grad(plain, logits, d_weights)[0])
