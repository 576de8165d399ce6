"""The choice of experts, their weights, and the state that must survive casts."""

from __future__ import annotations

import copy

import pytest
import torch
from dense_moe import choose_experts, make_config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_engine.config.schema import MoEConfig
from moe_engine.moe.layer import MoELayer
from moe_engine.moe.router import Router, Routing
from moe_engine.ops.choose import choose, chosen_ids


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def router_for(config: MoEConfig, dtype: torch.dtype = torch.float32) -> Router:
    """A router whose logits are its input: weight = identity, dim = num_experts."""
    router = Router(config, dtype)
    with torch.no_grad():
        router.weight.copy_(torch.eye(config.num_experts))
    return router


def route(logits: Tensor, bias: Tensor | None = None, **changes: object) -> Routing:
    E = logits.shape[1]
    values: dict[str, object] = {"dim": E, "num_experts": E, "num_groups": 1, "top_groups": 1, "route_scale": 1.0}
    router = router_for(make_config(**(values | changes)))
    if bias is not None:
        router.expert_bias.copy_(bias)
    return router(logits)


def test_the_report_example() -> None:
    logits = torch.tensor([[2, -1, 1, 0.9, 1.5, 0, -2, 0.5]])
    routing = route(logits, num_groups=4, top_groups=2, top_k=2, route_scale=2.5)
    scores = [0.880797, 0.268941, 0.731059, 0.710949, 0.817574, 0.5, 0.119203, 0.622459]
    torch.testing.assert_close(routing.scores, torch.tensor([scores]), rtol=0, atol=1e-6)
    assert routing.expert_ids.tolist() == [[2, 4]]
    torch.testing.assert_close(routing.expert_weights, torch.tensor([[1.180167, 1.319832]]), rtol=0, atol=1e-6)
    assert torch.equal(routing.router_logits, logits)


@pytest.mark.parametrize("group_score", ["sum_top2", "max"])
@pytest.mark.parametrize("score_function", ["sigmoid", "softmax"])
def test_the_choice_equals_a_loop_in_python(score_function: str, group_score: str) -> None:
    config = make_config(
        dim=32,
        num_experts=32,
        num_groups=8,
        top_groups=3,
        top_k=6,
        score_function=score_function,
        group_score=group_score,
    )
    router = router_for(config)
    router.expert_bias.copy_(randn(32, seed=1) * 0.3)
    routing = router(randn(200, 32))
    for scores, ids in zip(routing.scores.tolist(), routing.expert_ids.tolist(), strict=True):
        # The bias is added in fp32, as the router does.
        biased = (torch.tensor(scores) + router.expert_bias).tolist()
        assert ids == choose_experts(biased, [0.0] * 32, config)


def test_a_negative_bias_on_the_best_groups_lets_nothing_else_in() -> None:
    logits = torch.full((5, 8), -3.0)
    logits[:, 2:4] = 4.0
    bias = torch.full((8,), -6.0)
    bias[2:4] = -5.0
    routing = route(logits, bias, num_groups=4, top_groups=1, top_k=2)
    assert routing.expert_ids.tolist() == [[2, 3]] * 5


@pytest.mark.parametrize("score_function", ["sigmoid", "softmax"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("E", [8, 16, 40, 64, 128, 256])
@pytest.mark.parametrize("K", [1, 2, 3, 4, 6, 8, 16])
def test_weights_come_from_unbiased_scores(E: int, K: int, normalize: bool, score_function: str) -> None:
    K = min(K, E)
    logits, bias = randn(20, E), randn(E, seed=1) * 10
    options = {"top_k": K, "normalize_weights": normalize, "score_function": score_function, "route_scale": 2.5}
    routing = route(logits, bias, **options)
    wide = logits.double()
    scores = wide.sigmoid() if score_function == "sigmoid" else wide.softmax(dim=1)
    best = (routing.scores + bias).topk(K, dim=1).indices.sort(dim=1).values
    assert torch.equal(routing.expert_ids, best)
    weights = scores.gather(1, best)
    if normalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
        torch.testing.assert_close(routing.expert_weights.sum(dim=1), torch.full((20,), 2.5))
    torch.testing.assert_close(routing.expert_weights.double(), weights * 2.5, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("logit", [-60.0, -500.0, 60.0])
def test_logits_at_the_ends_give_finite_equal_weights_and_gradients(logit: float) -> None:
    logits = torch.full((3, 8), logit, requires_grad=True)
    routing = route(logits, top_k=4, route_scale=2.5)
    assert torch.equal(routing.expert_weights, torch.full((3, 4), 0.625))
    routing.expert_weights[:, 0].sum().backward()
    assert logits.grad.isfinite().all()


def test_ties_go_to_the_lower_expert_and_the_lower_group() -> None:
    routing = route(torch.zeros(4, 8), num_groups=4, top_groups=2, top_k=3)
    assert routing.expert_ids.tolist() == [[0, 1, 2]] * 4
    routing = route(torch.zeros(300, 64), top_k=5)
    assert routing.expert_ids.tolist() == [[0, 1, 2, 3, 4]] * 300


def test_choose_is_the_stable_sort_and_survives_nan() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(4, (500, 32), generator=generator).float()  # many ties
    scores[::7, 3:9] = float("-inf")
    expected = scores.sort(dim=1, descending=True, stable=True).indices[:, :6].sort(dim=1).values
    assert torch.equal(chosen_ids(choose(scores, 6), 6), expected)
    scores[5] = float("nan")
    scores[6, 10] = float("nan")
    mask = choose(scores, 6)
    assert (mask.sum(dim=1) == 6).all() and not mask[6, 10]


def test_choice_is_the_same_for_any_split_of_the_tokens() -> None:
    router = Router(make_config(dim=24, num_experts=32, num_groups=4, top_groups=2, top_k=4), torch.bfloat16)
    with torch.no_grad():
        router.weight.copy_(randn(32, 24))
    x = randn(50, 24, seed=1).bfloat16()
    whole = router(x)
    parts = [router(part) for part in x.split([1, 2, 7, 40])]
    for name in ("expert_ids", "expert_weights", "router_logits", "scores"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


def test_logits_are_fp32_in_bf16_modules_and_under_cpu_autocast() -> None:
    router = Router(make_config(dim=64), torch.bfloat16)
    with torch.no_grad():
        router.weight.copy_(randn(8, 64))
    x = randn(10, 64, seed=1).bfloat16().requires_grad_()
    exact = x.detach().double() @ router.weight.detach().double().T
    plain = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = router(x)
        cast.expert_weights[:, 0].sum().backward()
    assert plain.router_logits.dtype == plain.expert_weights.dtype == torch.float32
    assert torch.equal(plain.router_logits, cast.router_logits)
    torch.testing.assert_close(plain.router_logits.double(), exact, rtol=1e-5, atol=1e-5)
    assert x.grad.dtype == torch.bfloat16 and router.weight.grad.dtype == torch.bfloat16


CASTS = {
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to(torch.bfloat16),
    "type": lambda m: m.type(torch.bfloat16),
    "deepcopy": lambda m: copy.deepcopy(m).bfloat16().float(),
}


@pytest.mark.parametrize("cast", CASTS)
def test_bias_and_counts_keep_their_values_through_any_cast(cast: str) -> None:
    config = make_config(dim=24, num_experts=256, num_groups=8, top_groups=4, top_k=8)
    router = Router(config)
    bias = 7 + torch.arange(256) * 1e-3
    router.expert_bias.copy_(bias)
    router.num_tokens_per_expert.copy_(torch.arange(256) + 40_960)
    router = CASTS[cast](router)
    assert router.expert_bias.dtype == torch.float32 and torch.equal(router.expert_bias, bias)
    assert router.num_tokens_per_expert.dtype == torch.int64
    assert torch.equal(router.num_tokens_per_expert, torch.arange(256) + 40_960)
    assert len(set(router.expert_bias.tolist())) == 256


@pytest.mark.parametrize("assign", [False, True])
def test_bias_stays_fp32_after_loading_a_checkpoint(assign: bool) -> None:
    router = Router(make_config())
    state = router.state_dict()
    assert sorted(state) == ["expert_bias", "weight"]
    state["expert_bias"] = torch.full((8,), 0.5, dtype=torch.bfloat16)
    router.load_state_dict(state, assign=assign)
    assert router.expert_bias.dtype == torch.float32 and router.expert_bias.tolist() == [0.5] * 8


def test_to_empty_moves_the_buffers_too() -> None:
    router = Router(make_config(), device="meta")
    assert router.expert_bias.is_meta
    router.to_empty(device="cpu")
    assert router.expert_bias.device.type == router.num_tokens_per_expert.device.type == "cpu"


def test_a_layer_on_the_meta_device_takes_a_checkpoint_in_place_of_its_tensors() -> None:
    layer, source = MoELayer(make_config(capacity_factor=1.0), device="meta"), MoELayer(make_config())
    layer.load_state_dict(source.state_dict(), assign=True)
    layer(randn(9, 24)).sum().backward()
    assert layer.router.num_tokens_per_expert.sum() == 27 and layer.dropped_choices[1] == 27
    layer.update_balance()
    assert layer.router.expert_bias.any()


class TestCounts:
    """Every token of a training step counts once, in backward."""

    def layer(self) -> MoELayer:
        return MoELayer(make_config())

    def test_micro_batches_add_up_to_one_large_batch(self) -> None:
        whole, parts = self.layer(), self.layer()
        x = randn(40, 24)
        whole(x).sum().backward()
        for part in x.split([10, 10, 1, 19]):
            parts(part).sum().backward()
        assert whole.router.num_tokens_per_expert.sum() == 40 * 3
        assert torch.equal(whole.router.num_tokens_per_expert, parts.router.num_tokens_per_expert)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_recompute_counts_once_and_changes_no_gradient(self, use_reentrant: bool) -> None:
        plain, recomputed = self.layer(), self.layer()
        with torch.no_grad():
            for layer in (plain, recomputed):
                layer.router.weight[1:4] = layer.router.weight[0]  # exact ties
        inputs = [randn(30, 24).requires_grad_() for _ in range(2)]
        plain(inputs[0]).square().sum().backward()
        checkpoint(recomputed, inputs[1], use_reentrant=use_reentrant).square().sum().backward()
        assert plain.router.num_tokens_per_expert.sum() == 30 * 3
        assert torch.equal(plain.router.num_tokens_per_expert, recomputed.router.num_tokens_per_expert)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)

    def test_evaluation_and_forwards_without_gradient_count_nothing(self) -> None:
        layer, x = self.layer(), randn(10, 24)
        with torch.no_grad():
            layer(x)
        layer.eval()
        layer(x).sum().backward()
        assert not layer.router.num_tokens_per_expert.any()

    def test_a_second_backward_through_one_forward_does_not_count_again(self) -> None:
        layer = self.layer()
        loss = layer(randn(10, 24)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert layer.router.num_tokens_per_expert.sum() == 30

    def test_padding_does_not_count(self) -> None:
        layer = self.layer()
        mask = torch.tensor([True, False] * 5)
        layer(randn(10, 24), token_mask=mask).sum().backward()
        assert layer.router.num_tokens_per_expert.sum() == 15
