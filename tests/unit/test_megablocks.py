"""MegaBlocks' layers under its names: what they compute, what they return and leave behind, and what they refuse."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_engine import ConfigError
from moe_engine.integrations import megablocks
from moe_engine.integrations.megablocks import Arguments, MoE, dMoE

TANH_GELU = functools.partial(F.gelu, approximate="tanh")
WIDE: dict[str, Any] = dict(
    hidden_size=12, ffn_hidden_size=10, moe_num_experts=5, moe_top_k=2, fp16=False, device="cpu",
    init_method=functools.partial(nn.init.normal_, std=0.5), output_layer_init_method=nn.init.xavier_normal_,
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_saved() -> Iterator[None]:
    torch.manual_seed(0)
    megablocks.clear_load_balancing_loss()
    megablocks.clear_router_zloss()
    yield
    megablocks.clear_load_balancing_loss()
    megablocks.clear_router_zloss()


def arguments(**changes: Any) -> Arguments:
    return Arguments(**(WIDE | changes))


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def dense(layer: MoE, x: Tensor, capacity: float = float("inf")) -> Tensor:
    """One token and one expert at a time, under torch's own autograd: [T, H]."""
    args, mlp = layer.experts.args, layer.experts.mlp
    E, H, width = args.moe_num_experts, args.hidden_size, args.ffn_hidden_size
    taken, rows = [0] * E, []
    for token in x:
        scores = (layer.router.layer.weight @ token).softmax(dim=0)
        weights, ids = scores.sort(descending=True)
        weights, ids = weights[: args.moe_top_k], ids[: args.moe_top_k]
        p = args.moe_normalize_expert_weights
        if p is not None:
            weights = weights / weights.abs().pow(p).sum() ** (1 / p)
        row = torch.zeros_like(token)
        for weight, e in zip(weights, ids.tolist(), strict=True):
            if taken[e] < capacity:
                if isinstance(layer, dMoE):
                    w1, w2 = (w.view(E, width, H)[e] for w in (mlp.w1, mlp.w2))
                else:
                    w1, w2 = mlp.w1[e].T, mlp.w2[e]
                inner = args.activation_fn(w1 @ token)
                if args.mlp_type == "glu":
                    inner = inner * (mlp.v1.view(E, width, H)[e] @ token)
                row = row + weight * (w2.T @ inner)
            taken[e] += 1
        rows.append(row)
    return torch.stack(rows)


def with_shared(layer: MoE, x: Tensor, routed: Tensor) -> Tensor:
    shared, args = layer.shared_expert, layer.experts.args
    if shared is None:
        return routed
    inner = args.activation_fn((shared.gate_proj if args.mlp_type == "glu" else shared.up_proj)(x))
    out = shared.down_proj(inner * shared.up_proj(x) if args.mlp_type == "glu" else inner)
    if args.shared_expert_weighted_sum:
        return (out + args.moe_top_k * routed) / (args.moe_top_k + 1)
    return out + routed


CASES: dict[str, tuple[type[MoE], dict[str, Any]]] = {
    "dropless": (dMoE, {}),
    "one expert a token": (dMoE, dict(moe_top_k=1)),
    "all experts": (dMoE, dict(moe_top_k=5, moe_normalize_expert_weights=1)),
    "weights of norm 1": (dMoE, dict(moe_normalize_expert_weights=2.0)),
    "gated": (dMoE, dict(mlp_type="glu", mlp_impl="grouped", activation_fn=F.silu)),
    "gated by somebody's function": (dMoE, dict(mlp_type="glu", activation_fn=torch.tanh)),
    "somebody's function": (dMoE, dict(activation_fn=torch.tanh, memory_optimized_mlp=True)),
    "shared expert": (dMoE, dict(shared_expert=True, shared_expert_hidden_size=7)),
    "gated, with a shared expert in the mean": (
        dMoE, dict(mlp_type="glu", shared_expert=True, shared_expert_weighted_sum=True, activation_fn=F.silu),
    ),
    "capacity": (MoE, dict(moe_capacity_factor=1)),
    "small capacity": (MoE, dict(moe_capacity_factor=0.5, moe_top_k=3)),
    "without capacity": (MoE, dict(moe_capacity_factor=0)),
    "square": (MoE, dict(ffn_hidden_size=12, moe_capacity_factor=0.7)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_output_and_all_gradients_equal_a_loop_over_tokens(name: str) -> None:
    kind, changes = CASES[name]
    args = arguments(**changes)
    layer = kind(args).double()
    x = batch(7, 3, 12).requires_grad_()
    out, bias = layer(x)
    assert out.shape == x.shape and bias is layer.experts.bias and bias.shape == (12,)
    capacity = float("inf")
    if kind is MoE and args.moe_capacity_factor:
        capacity = int(args.moe_capacity_factor * args.moe_top_k * 21 / 5)
    twin_x = x.detach().reshape(21, 12).requires_grad_()
    twin = copy.deepcopy(layer)
    expected = with_shared(twin, twin_x, dense(twin, twin_x, capacity))
    torch.testing.assert_close(out.view(21, 12), expected, rtol=1e-11, atol=1e-12)
    d_out = batch(21, 12)
    out.view(21, 12).backward(d_out)
    expected.backward(d_out)
    torch.testing.assert_close(x.grad.view(21, 12), twin_x.grad, rtol=1e-10, atol=1e-11)
    for (key, mine), theirs in zip(layer.named_parameters(), twin.parameters(), strict=True):
        if key == "experts.bias":
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-11, msg=key)


def test_small_capacity_drops_and_none_does_not() -> None:
    dropping = MoE(arguments(moe_capacity_factor=0.5)).double()
    x = batch(40, 1, 12)
    outs = []
    for factor in (0.5, 0, 2.5):
        dropping.experts.args.moe_capacity_factor = factor
        outs.append(dropping(x)[0])
    assert torch.equal(outs[1], outs[2]) and not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize(("bias", "return_bias"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_bias_is_returned_or_added_or_absent(bias: bool, return_bias: bool) -> None:
    layer = dMoE(arguments(bias=bias, return_bias=return_bias)).double()
    x = batch(4, 2, 12)
    if not bias:
        assert layer.experts.bias is None and isinstance(layer(x), Tensor)
        return
    nn.init.normal_(layer.experts.bias)
    found = layer(x)
    routed = dense(layer, x.view(8, 12)).view(x.shape)
    if return_bias:
        torch.testing.assert_close(found[0], routed)
        assert found[1] is layer.experts.bias
    else:
        torch.testing.assert_close(found, routed + layer.experts.bias)


def test_saved_losses_equal_the_formulas_and_train_the_router() -> None:
    args = arguments(num_layers=2, moe_loss_weight=0.3, moe_zloss_weight=0.01)
    layers, x = [dMoE(args).double() for _ in range(2)], batch(6, 2, 12)
    y = x
    for layer in layers:
        y = y + layer(y)[0]
    saved = megablocks.get_load_balancing_loss()
    assert [int(counts.sum()) for counts, _ in saved] == [24, 24]
    expected = torch.stack([(c.double() * s.mean(0)).sum() for c, s in saved]).sum() * 0.3 * 5 / (2 * 12 * 2)
    loss = megablocks.batched_load_balancing_loss(args)
    torch.testing.assert_close(loss, expected)
    z = megablocks.batched_router_zloss(args)
    logits = x.view(12, 12) @ layers[0].router.layer.weight.T
    assert z.shape == (2,)
    torch.testing.assert_close(z[0], 0.01 * logits.exp().sum(1).log().square().mean())
    (loss + z.sum()).backward()
    assert all(layer.router.layer.weight.grad.abs().sum() > 0 for layer in layers)
    megablocks.clear_load_balancing_loss()
    assert megablocks.get_load_balancing_loss() == []


def test_balanced_routing_has_a_loss_of_its_weight() -> None:
    args = arguments(moe_loss_weight=0.3, uniform_expert_assignment=True)
    layer = dMoE(args).double()
    nn.init.zeros_(layer.router.layer.weight)
    layer(batch(5, 2, 12))
    torch.testing.assert_close(megablocks.batched_load_balancing_loss(args), torch.tensor(0.3, dtype=torch.float64))


def test_forwards_that_were_not_cleared_are_told() -> None:
    args, x = arguments(), batch(2, 2, 12)
    layer = dMoE(args).double()
    layer(x), layer(x)
    with pytest.raises(ValueError, match="2 forwards of layers were saved and 1 expected.*clear_load_balancing_loss"):
        megablocks.batched_load_balancing_loss(args)
    megablocks.clear_load_balancing_loss()
    layer.eval()(x)
    dMoE(arguments(moe_loss_weight=0)).double()(x)
    assert not megablocks.get_load_balancing_loss()
    assert megablocks.batched_load_balancing_loss(arguments(moe_loss_weight=0)) == 0.0
    with pytest.warns(UserWarning, match="moe_zloss_weight=0"):
        assert megablocks.batched_router_zloss(args) == 0


def test_jitter_moves_scores_in_training_alone() -> None:
    layer, x = dMoE(arguments(moe_jitter_eps=0.2)).double(), batch(6, 2, 12)
    first, second = (layer.router(x)[0] for _ in range(2))
    assert not torch.equal(first, second)
    layer.eval()
    assert torch.equal(layer.router(x)[0], layer.router(x)[0])


@pytest.mark.parametrize("kind", [MoE, dMoE])
def test_no_tokens_give_an_empty_output_and_zero_gradients(kind: type[MoE]) -> None:
    args = arguments()
    layer = kind(args).double()
    out, _ = layer(batch(0, 2, 12))
    (out.sum() + megablocks.batched_load_balancing_loss(args)).backward()
    assert out.shape == (0, 2, 12)
    assert all(not p.grad.any() for name, p in layer.named_parameters() if name != "experts.bias")


@pytest.mark.parametrize(
    ("changes", "dtype"), [({"fp16": True}, torch.float16), ({"bf16": True}, torch.bfloat16), ({}, torch.float32)]
)
def test_formats_train_on_this_device(changes: dict[str, Any], dtype: torch.dtype) -> None:
    args = Arguments(hidden_size=16, ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2, mlp_type="glu",
                     shared_expert=True, device="cpu", **({"fp16": False} | changes))  # fmt: skip
    layer = dMoE(args)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    optimizer = torch.optim.SGD(layer.parameters(), lr=3.0)
    x, target = batch(8, 4, 16).to(dtype), torch.randn(8, 4, 16).to(dtype)
    losses = []
    for _ in range(6):
        out, bias = layer(x)
        loss = ((out + bias) - target).float().square().mean() + megablocks.batched_load_balancing_loss(args)
        megablocks.clear_load_balancing_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert out.dtype == dtype and losses[-1] < losses[0] - 0.02


def test_under_autocast_products_are_bf16_and_the_router_is_not() -> None:
    layer = dMoE(arguments())
    x = batch(9, 2, 12).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = layer(x)
        scores, *_ = layer.router(x.bfloat16())
    assert out.dtype == torch.bfloat16 and scores.dtype == torch.float32
    layer.router.float()
    out.float().square().sum().backward()
    assert layer.experts.mlp.w1.grad.dtype == torch.float32


def test_checkpoints_have_megablocks_names_and_shapes() -> None:
    shapes: Callable[[MoE], dict[str, tuple[int, ...]]] = lambda layer: {  # noqa: E731
        name: tuple(value.shape) for name, value in layer.state_dict().items()
    }
    glu = dMoE(arguments(mlp_type="glu", shared_expert=True))
    assert shapes(glu) == {
        "router.layer.weight": (5, 12), "experts.bias": (12,), "experts.mlp.w1": (50, 12),
        "experts.mlp.w2": (50, 12), "experts.mlp.v1": (50, 12), "shared_expert.up_proj.weight": (10, 12),
        "shared_expert.up_proj.bias": (10,), "shared_expert.down_proj.weight": (12, 10),
        "shared_expert.down_proj.bias": (12,), "shared_expert.gate_proj.weight": (10, 12),
        "shared_expert.gate_proj.bias": (10,),
    }  # fmt: skip
    assert shapes(MoE(arguments(bias=False))) == {
        "router.layer.weight": (5, 12), "experts.mlp.w1": (5, 12, 10), "experts.mlp.w2": (5, 10, 12)
    }  # fmt: skip
    stored = io.BytesIO()
    torch.save(glu.state_dict(), stored)
    twin = dMoE(arguments(mlp_type="glu", shared_expert=True))
    twin.load_state_dict(torch.load(io.BytesIO(stored.getvalue())))
    x = batch(3, 2, 12).float()
    assert torch.equal(twin(x)[0], glu(x)[0])
    marked = [name for name, p in glu.named_parameters() if megablocks.is_moe_param(p)]
    assert marked == ["experts.mlp.w1", "experts.mlp.w2", "experts.mlp.v1"]
    assert not any(megablocks.param_is_expert_model_parallel(p) for p in glu.parameters())


def test_arguments_that_fit_no_layer_are_refused_all_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        dMoE(arguments(moe_top_k=9, mlp_type="mlp2", mlp_impl="fast", hidden_size=0, moe_capacity_factor=-1))
    for part in ("moe_top_k=9", "use moe_top_k=5", "mlp_type=mlp2", "mlp and glu", "mlp_impl=fast", "hidden_size=0",
                 "moe_capacity_factor=-1"):  # fmt: skip
        assert part in str(error.value)
    wrong = dict(hidden_size="24", moe_top_k=1.5, moe_capacity_factor=float("nan"), moe_loss_weight=float("inf"),
                 moe_jitter_eps=-0.1, moe_normalize_expert_weights=-1, activation_fn=None,
                 pipeline_model_parallel_size=0, shared_expert_hidden_size=0)  # fmt: skip
    with pytest.raises(ConfigError) as error:
        dMoE(arguments(**wrong))
    told = {line.partition("=")[0] for line in str(error.value).splitlines()}
    assert told == set(wrong)
    with pytest.raises(ValueError, match=r"x=\[3, 23\].*dim="):
        dMoE(arguments())(torch.zeros(3, 23))
    with pytest.raises(ConfigError, match="mlp_type=glu: MoE has plain experts alone; use mlp_type=mlp, or dMoE"):
        MoE(arguments(mlp_type="glu"))


def test_megatrons_arguments_are_taken_by_name() -> None:
    class Megatron:
        hidden_size, moe_top_k, moe_num_experts, unrelated = 24, 2, 6, "x"

    args = megablocks.from_megatron(Megatron())
    assert (args.hidden_size, args.moe_top_k, args.moe_num_experts) == (24, 2, 6)
    assert args.ffn_hidden_size == 4096 and args.shared_expert_hidden_size == 4096
