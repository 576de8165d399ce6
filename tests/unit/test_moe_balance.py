"""The balancing bias and the balance losses: published values, gradients, memory."""

from __future__ import annotations

import pytest
import torch
from dense_moe import dense_balance_loss, make_config
from torch import Tensor

from moe_engine.moe.balance import router_z_loss, sequence_balance_loss, update_expert_bias
from moe_engine.moe.layer import MoELayer

LOGITS = torch.tensor([[2, 1, 0, -1], [2, 1, 0, -1], [0, 2, 1, -1], [-1, 0, 1, 2]], dtype=torch.float64)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("score_function", "expected"), [("softmax", 1.0580917682), ("sigmoid", 1.0606568334)])
def test_balance_loss_has_the_published_value(score_function: str, expected: float) -> None:
    loss = sequence_balance_loss(LOGITS, (1, 4), 2, score_function)
    assert loss.item() == pytest.approx(expected, abs=1e-10)


def test_z_loss_has_the_published_value_and_ignores_padding() -> None:
    assert router_z_loss(LOGITS).item() / 4 == pytest.approx(5.9545257650, abs=1e-10)
    mask = torch.tensor([True, True, False, True])
    torch.testing.assert_close(router_z_loss(LOGITS, mask), router_z_loss(LOGITS[mask]), rtol=1e-14, atol=0)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_perfect_balance_gives_one(score_function: str) -> None:
    logits = torch.eye(4, dtype=torch.float64) * 3
    assert sequence_balance_loss(logits, (1, 4), 1, score_function).item() == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("logit", [-60.0, -500.0])
def test_underflowing_scores_give_a_loss_of_one_and_finite_gradients(logit: float) -> None:
    logits = torch.full((6, 8), logit, requires_grad=True)
    loss = sequence_balance_loss(logits, (1, 6), 2, "sigmoid")
    loss.backward()
    assert loss.item() >= 1 - 1e-6 and logits.grad.isfinite().all()


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_loss_and_gradient_equal_a_loop_with_ragged_padding(score_function: str) -> None:
    config = make_config(num_experts=8, top_k=3, score_function=score_function, aux_loss_weight=1.0)
    logits = randn(21, 8).requires_grad_()
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[0, 5:], mask[1, 1:], mask[2, :] = False, False, False
    loss = sequence_balance_loss(logits, (3, 7), 3, score_function, mask.view(-1))
    expected = dense_balance_loss(logits, config, [list(range(5)), [7], []])
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    (grad,), (expected_grad,) = torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-15)
    assert not grad[~mask.view(-1)].any()


def test_gradient_of_a_token_has_the_same_bits_under_any_micro_batch_size() -> None:
    logits = randn(6 * 16, 8).float().requires_grad_()
    (whole,) = torch.autograd.grad(sequence_balance_loss(logits, (6, 16), 2, "sigmoid"), logits)
    parts = []
    for rows in logits.detach().split([16, 32, 48]):
        part = rows.requires_grad_()
        parts += torch.autograd.grad(sequence_balance_loss(part, (len(rows) // 16, 16), 2, "sigmoid"), part)
    assert torch.equal(torch.cat(parts), whole)


def test_router_gradient_from_the_loss_alone_is_the_weighted_analytic_one() -> None:
    layer = MoELayer(make_config(aux_loss_weight=0.25), dtype=torch.float64)
    x = randn(2, 10, 24)
    _, aux = layer(x, return_aux=True)
    aux.backward()
    weight = layer.router.weight.detach().clone().requires_grad_()
    sequences = [list(range(10)), list(range(10, 20))]
    (dense_balance_loss(x.view(-1, 24) @ weight.T, layer.config, sequences) / 2).backward()
    torch.testing.assert_close(layer.router.weight.grad, weight.grad, rtol=1e-11, atol=1e-15)


def test_z_loss_reaches_the_router_alone_and_is_a_mean_over_tokens_that_are_no_padding() -> None:
    layer = MoELayer(make_config(aux_loss_weight=0.0, z_loss_weight=0.25), dtype=torch.float64)
    x = randn(2, 10, 24)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, 3:] = False
    _, aux = layer(x, mask, return_aux=True)
    aux.backward()
    weight = layer.router.weight.detach().clone().requires_grad_()
    expected = 0.25 * ((x[mask] @ weight.T).exp().sum(dim=1).log() ** 2).mean()
    expected.backward()
    assert aux.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(layer.router.weight.grad, weight.grad, rtol=1e-11, atol=1e-15)
    assert layer.experts.down.grad is None


def test_weight_zero_turns_the_loss_off() -> None:
    layer = MoELayer(make_config(aux_loss_weight=0.0))
    x = torch.zeros(4, 24)
    assert layer.pack(x, (1, 4)).aux_loss is None
    assert layer(x, return_aux=True)[1].item() == 0


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_memory_is_that_of_the_logits(score_function: str) -> None:
    """Nothing like a [T, K, E] one-hot tensor."""
    T, E, K = 512, 64, 8
    logits = randn(T, E).float().requires_grad_()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, tuple | list) else [out]:
                if isinstance(value, Tensor):
                    largest = max(largest, value.numel())
            return out

    with Watch():
        sequence_balance_loss(logits, (4, T // 4), K, score_function).backward()
    assert largest == T * E


def test_bias_moves_against_the_load_by_one_step() -> None:
    bias = torch.zeros(4)
    update_expert_bias(bias, torch.tensor([10, 2, 6, 6]), 0.001)
    torch.testing.assert_close(bias, torch.tensor([-0.001, 0.001, 0, 0]), rtol=0, atol=0)


def test_bias_comparison_is_exact_at_large_loads_and_small_steps() -> None:
    bias = torch.full((4,), 7.0)
    loads = torch.tensor([40_960, 40_961, 40_959, 40_960])
    update_expert_bias(bias, loads, 0.001)
    assert (bias - 7).tolist() == pytest.approx([0, -0.001, 0.001, 0], abs=1e-6)
    huge = torch.tensor([2**53 + 1, 2**53 + 1, 2**53 + 3, 2**53 - 1])
    bias = torch.zeros(4)
    update_expert_bias(bias, huge, 1.0)
    assert bias.tolist() == [0, 0, -1, 1]
