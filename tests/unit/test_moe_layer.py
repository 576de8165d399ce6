"""The whole layer on one rank against a dense float64 loop, and its edges."""

from __future__ import annotations

import copy

import pytest
import torch
from dense_moe import dense_balance_loss, dense_moe, global_tensors, leaf_parameters, make_config
from measures import calc_diff
from torch import Tensor

from moe_engine.config.errors import ConfigError
from moe_engine.moe.dispatch import combine_arrive, sum_rows
from moe_engine.moe.layer import MoELayer
from moe_engine.moe.placement import ExpertPlacement
from moe_engine.ops.wgrad_queue import WgradQueue


def tokens(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


VARIANTS = [
    {},
    {"score_function": "softmax", "group_score": "max", "normalize_weights": False},
    {"score_function": "softmax"},
    {"normalize_weights": False, "num_shared_experts": 0},
    {"num_groups": 1, "top_groups": 1, "top_k": 8, "num_shared_experts": 2},
    {"top_k": 1, "combine": "exact"},
    {"activation": "gelu"},
    {"activation": "gelu_tanh", "gated": False},
    {"activation": "relu", "expert_biases": True, "shared_gate": True},
    {"activation": "relu_squared", "gated": False, "expert_biases": True},
    {"activation": "silu", "gated": False},
    {"swiglu_limit": 0.7, "expert_biases": True, "score_function": "softmax", "num_shared_experts": 0},
]


def randomize_biases(layer: MoELayer) -> None:
    """Biases start from zero, where a lost one would not be seen."""
    with torch.no_grad():
        for i, (name, parameter) in enumerate(layer.named_parameters()):
            if name.endswith("bias"):
                parameter.copy_(tokens(*parameter.shape, seed=30 + i) * 0.3)


@pytest.mark.parametrize("changes", VARIANTS)
def test_output_and_all_gradients_equal_the_dense_loop_in_fp64(changes: dict[str, object]) -> None:
    config = make_config(**changes)
    layer = MoELayer(config, dtype=torch.float64)
    randomize_biases(layer)
    layer.router.expert_bias.copy_(tokens(8, seed=5) * 0.1)
    x, weight = tokens(2, 19, 24), tokens(2, 19, 24, seed=1)
    x.requires_grad_()
    out, aux = layer(x, return_aux=True)
    ((out * weight).sum() + aux).backward()

    parameters, x_dense = leaf_parameters(layer), x.detach().reshape(-1, 24).clone().requires_grad_()
    expected, logits, counts = dense_moe(x_dense, parameters, config, layer.router.expert_bias)
    expected_aux = dense_balance_loss(logits, config, [list(range(19)), list(range(19, 38))]) / 2
    ((expected * weight.view(-1, 24)).sum() + expected_aux).backward()

    torch.testing.assert_close(out.view(-1, 24), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(aux, expected_aux, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad.view(-1, 24), x_dense.grad, rtol=1e-11, atol=1e-12)
    for name, grad in global_tensors(layer, gradients=True).items():
        expected_grad = parameters[name].grad
        expected_grad = torch.zeros_like(grad) if expected_grad is None else expected_grad  # an expert without tokens
        torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-12, msg=name)
    assert layer.router.num_tokens_per_expert.tolist() == counts.tolist()


def test_bf16_layer_is_close_to_fp64_at_equal_routing() -> None:
    config = make_config(num_experts=4, num_groups=1, top_groups=1, top_k=4)  # all experts: no choice to flip
    layer = MoELayer(config, dtype=torch.bfloat16)
    x = tokens(64, 24, dtype=torch.bfloat16).requires_grad_()
    out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    parameters, x_dense = leaf_parameters(layer), x.detach().double().requires_grad_()
    expected, _, _ = dense_moe(x_dense, parameters, config)
    expected.square().sum().backward()
    assert calc_diff(out, expected) < 1e-5
    assert calc_diff(x.grad, x_dense.grad) < 2e-5
    for name, grad in global_tensors(layer, gradients=True).items():
        assert calc_diff(grad, parameters[name].grad) < 5e-5, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tokens_have_the_same_bits_under_any_split_of_the_batch(dtype: torch.dtype) -> None:
    layer = MoELayer(make_config(), dtype=dtype).eval()
    x = tokens(61, 24, dtype=dtype)
    whole = layer(x)
    for cuts in ([1] * 61, [2, 3, 5, 51], [30, 31]):
        parts = torch.cat([layer(part) for part in x.split(cuts)])
        assert torch.equal(parts, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_input_gradients_have_the_same_bits_under_any_split_of_the_batch(dtype: torch.dtype) -> None:
    layer = MoELayer(make_config(aux_loss_weight=0.0), dtype=dtype)
    x, d_out = tokens(53, 24, dtype=dtype), tokens(53, 24, dtype=dtype, seed=2)

    def input_gradient(rows: slice) -> Tensor:
        part = x[rows].clone().requires_grad_()
        layer(part).backward(d_out[rows])
        return part.grad

    whole = input_gradient(slice(0, 53))
    parts = [input_gradient(slice(a, b)) for a, b in ((0, 1), (1, 8), (8, 53))]
    assert torch.equal(torch.cat(parts), whole)


def test_no_tokens_give_an_empty_output_and_zero_gradients() -> None:
    layer = MoELayer(make_config(), dtype=torch.float32)
    for shape in ((0, 24), (0, 5, 24), (3, 0, 24)):
        layer.zero_grad()
        x = torch.zeros(shape, requires_grad=True)
        out, aux = layer(x, return_aux=True)
        assert out.shape == shape
        (out.sum() + aux).backward()
        assert x.grad.shape == shape
        for parameter in layer.parameters():
            assert parameter.grad is not None and not parameter.grad.any()
    assert layer.router.num_tokens_per_expert.sum() == 0


def test_experts_without_tokens_get_zero_gradients() -> None:
    layer = MoELayer(make_config(top_k=1, num_groups=1, top_groups=1))
    layer.router.expert_bias[5] = 10.0
    layer(tokens(40, 24, dtype=torch.float32)).square().sum().backward()
    assert layer.router.num_tokens_per_expert.tolist() == [0, 0, 0, 0, 0, 40, 0, 0]
    for parameter in layer.experts.parameters():
        used = parameter.grad.flatten(1).abs().sum(dim=1) > 0
        assert used.tolist() == [e == 5 for e in range(8)]
        assert torch.equal(parameter.grad[:5], torch.zeros_like(parameter.grad[:5]))


def test_appended_padding_changes_nothing() -> None:
    config = make_config()
    layer, padded_layer = (MoELayer(config, dtype=torch.float64) for _ in range(2))
    x = tokens(2, 9, 24)
    padded = torch.cat((x, tokens(2, 4, 24, seed=3)), dim=1)
    mask = torch.tensor([[True] * 9 + [False] * 4] * 2)
    out, aux = layer(x, return_aux=True)
    padded_out, padded_aux = padded_layer(padded, token_mask=mask, return_aux=True)
    (out.square().sum() + aux).backward()
    (padded_out[:, :9].square().sum() + padded_aux).backward()
    assert torch.equal(padded_out[:, :9], out)
    torch.testing.assert_close(padded_aux, aux, rtol=1e-14, atol=0)
    assert torch.equal(padded_layer.router.num_tokens_per_expert, layer.router.num_tokens_per_expert)
    expected = global_tensors(layer, gradients=True)
    for name, grad in global_tensors(padded_layer, gradients=True).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-11, atol=1e-12, msg=name)


def test_a_sequence_of_padding_alone_has_no_balance_loss() -> None:
    layer = MoELayer(make_config(), dtype=torch.float64)
    x = tokens(2, 6, 24)
    mask = torch.tensor([[True] * 6, [False] * 6])
    packed = layer.pack(x.view(-1, 24), (2, 6), mask.view(-1))
    alone = layer.pack(x[0], (1, 6))
    torch.testing.assert_close(packed.aux_loss, alone.aux_loss, rtol=1e-14, atol=0)
    mean, mean_alone = (layer(rows, valid, return_aux=True)[1] for rows, valid in ((x, mask), (x[:1], None)))
    torch.testing.assert_close(mean, mean_alone, rtol=1e-14, atol=0)


def test_deferred_weight_gradients_are_bit_equal_and_hooks_fire_once_at_w_time() -> None:
    config = make_config()
    x = tokens(30, 24, dtype=torch.bfloat16)
    plain, split = (MoELayer(config, dtype=torch.bfloat16) for _ in range(2))
    x_plain, x_split = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(x_plain).float().square().sum().backward()

    fired: list[str] = []
    for name, parameter in split.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    queue = WgradQueue()
    loss = split(x_split, queue=queue).float().square().sum()
    with queue.defer("m0"):
        loss.backward()
    assert torch.equal(x_split.grad, x_plain.grad)
    assert fired == ["router.weight"] and split.experts.down.grad is None and len(queue) == 4
    queue.run("m0")
    assert sorted(fired) == sorted(name for name, _ in split.named_parameters()) and len(queue) == 0
    for a, b in zip(split.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_phases_in_a_row_are_the_forward() -> None:
    layer = MoELayer(make_config())
    x = tokens(2, 8, 24, dtype=torch.float32)
    flat = x.view(-1, 24)
    packed = layer.pack(flat, (2, 8))
    pending = layer.dispatch_start(packed)
    shared = layer.compute_shared(flat)
    rows = layer.compute(layer.dispatch_wait(pending))
    back = combine_arrive(layer.combine_start(rows, packed))
    out = sum_rows(back, packed.handle, layer.compute_further(flat, packed)) + shared
    expected, aux = layer(x, return_aux=True)
    assert torch.equal(out.view(2, 8, 24), expected)
    assert torch.equal(packed.aux_loss[0] / 2, aux) and not packed.aux_loss[1]


def test_parameters_depend_on_name_and_seed_alone() -> None:
    config = make_config()
    a, b = MoELayer(config, name="layers.3.moe", seed=7), MoELayer(config, name="layers.3.moe", seed=7)
    other = MoELayer(config, name="layers.4.moe", seed=7)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(a.parameters(), other.parameters(), strict=True))
    assert not torch.equal(a.experts.down[0], a.experts.down[1])
    assert a.experts.gate_up.std().item() == pytest.approx(config.init_std, rel=0.05)


def test_without_a_seed_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's parameters are filled from its masters; drawing them twice would double the start of a run."""

    def no_draw(*args: object) -> None:
        raise AssertionError("drawn")

    monkeypatch.setattr("moe_engine.moe.layer.normal", no_draw)
    layer = MoELayer(make_config(), seed=None)
    assert not layer.router.expert_bias.any() and not layer.router.num_tokens_per_expert.any()
    with pytest.raises(AssertionError, match="drawn"):
        MoELayer(make_config(), seed=0)


def test_a_layer_on_the_meta_device_has_the_right_sizes() -> None:
    layer = MoELayer(make_config(num_shared_experts=2), device="meta")
    assert sum(p.numel() for p in layer.parameters()) == 8 * 24 + 8 * 3 * 24 * 10 + 3 * 24 * 20
    assert all(p.is_meta for p in layer.parameters())


def test_update_balance_moves_the_bias_once_and_clears_the_counts() -> None:
    layer = MoELayer(make_config(bias_step=0.25))
    layer.router.num_tokens_per_expert.copy_(torch.tensor([10, 2, 6, 6, 6, 6, 6, 6]))
    layer.update_balance()
    assert layer.router.expert_bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0]
    layer.update_balance()
    assert layer.router.expert_bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0]


def test_a_copied_layer_is_independent() -> None:
    layer = MoELayer(make_config())
    twin = copy.deepcopy(layer)
    x = tokens(6, 24, dtype=torch.float32)
    assert torch.equal(twin(x), layer(x))
    twin(x).sum().backward()
    assert layer.router.num_tokens_per_expert.sum() == 0 and layer.experts.down.grad is None
    assert twin.router.num_tokens_per_expert.sum() == 18


def test_wrong_values_are_reported_together_with_values_that_work() -> None:
    with pytest.raises(ConfigError) as error:
        MoELayer(make_config(score_function="relu", combine="fast", top_k=0))
    message = str(error.value)
    assert all(text in message for text in ("score_function=relu", "sigmoid", "combine=fast", "exact", "top_k=0"))
    with pytest.raises(ConfigError, match="num_groups=3: must divide num_experts=8"):
        MoELayer(make_config(num_groups=3))
    with pytest.raises(ConfigError, match="hold fewer than top_k=5; use top_groups=3"):
        MoELayer(make_config(top_k=5))
    with pytest.raises(ConfigError, match="top_groups=5: there are num_groups=4; use top_groups=4"):
        MoELayer(make_config(top_groups=5))
    with pytest.raises(ConfigError, match="group_score=max"):
        MoELayer(make_config(num_groups=8, top_groups=4))
    with pytest.raises(ConfigError, match=r"ep=3.*\[1, 2, 4, 8\]"):
        ExpertPlacement(8, 3)
