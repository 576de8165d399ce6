"""The layer as people import it: invariants of its mathematics, its ways to be called, and the function without it."""

from __future__ import annotations

import gc
import io
from typing import Any

import psutil
import pytest
import torch
from dense_moe import dense_moe, expert, leaf_parameters, make_config, mlp
from live_bytes import LiveBytes
from measures import calc_diff
from torch import Tensor, nn

from moe_engine import ConfigError, MoEConfig, MoELayer, Router, experts_forward
from moe_engine.distributed.collectives import Communicator
from moe_engine.ops.wgrad_queue import WgradQueue

OPTIONS: list[dict[str, Any]] = [
    {},
    {"score_function": "softmax", "normalize_weights": False, "group_score": "max"},
    {"activation": "gelu", "expert_biases": True},
    {"activation": "relu_squared", "gated": False},
    {"swiglu_limit": 0.7, "expert_biases": True},
]


def tokens(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("changes", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_permuting_tokens_permutes_outputs_and_input_gradients_bitwise(changes: Any, dtype: torch.dtype) -> None:
    layer = MoELayer(make_config(aux_loss_weight=0.0, **changes), dtype=dtype)
    x, d_out = tokens(37, 24, dtype=dtype).requires_grad_(), tokens(37, 24, dtype=dtype, seed=1)
    out = layer(x)
    out.backward(d_out)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(2))
    permuted = x.detach()[order].requires_grad_()
    out_permuted = layer(permuted)
    out_permuted.backward(d_out[order])
    assert torch.equal(out_permuted, out[order]) and torch.equal(permuted.grad, x.grad[order])
    assert layer.router.num_tokens_per_expert.sum() == 2 * 37 * 3


@pytest.mark.parametrize("changes", OPTIONS)
def test_permuting_experts_with_the_routers_rows_changes_nothing(changes: Any) -> None:
    config = make_config(num_groups=1, top_groups=1, **{k: v for k, v in changes.items() if k != "group_score"})
    layer, twin = MoELayer(config, dtype=torch.float64), MoELayer(config, dtype=torch.float64)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for (name, mine), theirs in zip(layer.named_parameters(), twin.parameters(), strict=True):
            mine.copy_(tokens(*mine.shape, dtype=torch.float64, seed=len(name)) * 0.3)
            theirs.copy_(mine if name.startswith("shared") else mine[order])
    x = tokens(2, 9, 24, dtype=torch.float64)
    (out, aux), (out_twin, aux_twin) = layer(x, return_aux=True), twin(x, return_aux=True)
    torch.testing.assert_close(out_twin, out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(aux_twin, aux, rtol=1e-12, atol=0)


@pytest.mark.parametrize("changes", [{}, {"activation": "gelu", "gated": False}, {"score_function": "softmax"}])
def test_identical_experts_with_normalised_weights_are_one_dense_mlp(changes: Any) -> None:
    config = make_config(num_shared_experts=0, route_scale=1.0, **changes)
    layer = MoELayer(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter[:] = parameter[:1].clone()
    x = tokens(21, 24, dtype=torch.float64)
    dense = mlp(x, expert(leaf_parameters(layer), "experts.0.{}", config), config)
    torch.testing.assert_close(layer(x), dense, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("changes", OPTIONS)
def test_ten_repeats_have_the_same_bits_forward_and_backward(changes: Any) -> None:
    layer, x = MoELayer(make_config(**changes)), tokens(3, 11, 24)
    seen: list[list[Tensor]] = []
    for _ in range(10):
        layer.zero_grad()
        mine = x.clone().requires_grad_()
        out, aux = layer(mine, return_aux=True)
        (out.square().sum() + aux).backward()
        seen.append([out.detach(), aux.detach(), mine.grad, *(p.grad.clone() for p in layer.parameters())])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def run_often(layer: MoELayer, times: int) -> None:
    """Loads differ each time, and for two of three forwards no backward ever comes."""
    generator = torch.Generator().manual_seed(0)
    for i in range(times):
        x = torch.randn(40 + i % 7, 24, generator=generator) * (1 + i % 5)
        out = layer(x.requires_grad_())
        if i % 3 == 0:
            out.sum().backward()
            layer.zero_grad(set_to_none=True)


def test_no_tensor_outlives_its_forward_and_backward() -> None:
    layer = MoELayer(make_config(), attach_aux_loss=True)
    with LiveBytes() as memory:
        run_often(layer, 2)
        before = memory.bytes()
        run_often(layer, 12)
        assert memory.bytes() == before


@pytest.mark.slow
def test_memory_is_flat_over_a_thousand_forwards() -> None:
    layer = MoELayer(make_config(), attach_aux_loss=True)
    resident = []
    for times in (1000, 1000):
        run_often(layer, times)
        gc.collect()
        resident.append(psutil.Process().memory_info().rss)
    assert resident[1] - resident[0] < 1000 * 40 * 24 * 4 / 2  # half of what one lost input a forward would take


def test_attached_balance_loss_gives_the_gradients_of_an_added_one() -> None:
    config, x = make_config(z_loss_weight=0.01), tokens(2, 9, 24, dtype=torch.float64)
    added = MoELayer(config, dtype=torch.float64)
    attached = MoELayer(config, dtype=torch.float64, attach_aux_loss=True)
    attached.aux_loss_scale = 3.0
    out, aux = added(x, return_aux=True)
    (out.square().sum() + 3 * aux).backward()
    out_attached, seen = attached(x, return_aux=True)
    assert torch.equal(out_attached, out) and torch.equal(seen, aux) and not seen.requires_grad
    out_attached.square().sum().backward()
    for a, b in zip(attached.parameters(), added.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-14)


def test_the_bias_moves_after_the_steps_of_an_optimizer_until_the_hook_is_removed() -> None:
    layer = MoELayer(make_config(bias_step=0.5))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    handle = layer.update_balance_after(optimizer)
    layer(tokens(40, 24)).sum().backward()
    counts = layer.router.num_tokens_per_expert.clone()
    optimizer.step()
    expected = 0.5 * torch.sign(counts.double().mean() - counts).float()
    assert torch.equal(layer.router.expert_bias, expected) and not layer.router.num_tokens_per_expert.any()
    handle.remove()
    layer(tokens(40, 24)).sum().backward()
    optimizer.step()
    assert torch.equal(layer.router.expert_bias, expected)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_precision_sets_the_format_of_products_whatever_the_parameters_have(precision: str) -> None:
    config = make_config(num_experts=4, num_groups=1, top_groups=1, top_k=4, dim=128, expert_hidden=128, init_std=0.1)
    plain, layer = MoELayer(config), MoELayer(config, precision=precision)
    x = tokens(40, 128)
    outs = []
    for one in (plain, layer):
        mine = x.clone().requires_grad_()
        out = one(mine)
        assert out.dtype == torch.float32
        out.square().sum().backward()
        outs.append([out, mine.grad, *(p.grad for p in one.parameters())])
    for mine, exact in zip(outs[1], outs[0], strict=True):
        assert mine.dtype == torch.float32
        assert 1e-8 < calc_diff(mine, exact) < (1e-4 if precision == "bf16" else 1e-2)


def test_a_layer_in_fp8_works_without_gradients_and_sees_weights_that_move_behind_autograds_back() -> None:
    layer = MoELayer(make_config(), precision="fp8", dtype=torch.bfloat16)
    x = tokens(10, 24, dtype=torch.bfloat16)
    with torch.no_grad():
        before = layer(x)
    for parameter in layer.parameters():
        parameter.data.copy_(parameter.data.flip(0))
    twin = MoELayer(make_config(), precision="fp8", dtype=torch.bfloat16)
    twin.load_state_dict(layer.state_dict())
    wide = MoELayer(make_config(), precision="fp8")
    with torch.inference_mode():
        assert torch.equal(layer(x), twin(x)) and not torch.equal(layer(x), before)
        assert wide(x.float()).isfinite().all()


def test_native_precision_is_deaf_to_autocast() -> None:
    layer, native = MoELayer(make_config()), MoELayer(make_config(), precision="native")
    x = tokens(10, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, out_native = layer(x), native(x.bfloat16().float())
    assert out.dtype == torch.bfloat16 and torch.equal(out_native, MoELayer(make_config())(x.bfloat16().float()))
    with pytest.raises(ConfigError, match="precision=fp16: no such choice; there are bf16, fp8, native and None"):
        MoELayer(make_config(), precision="fp16")


def test_a_layer_made_on_the_meta_device_is_filled_like_any_other() -> None:
    layer = MoELayer(make_config(expert_biases=True), device="meta", seed=4)
    layer.to_empty(device="cpu").reset_parameters()
    expected = MoELayer(make_config(expert_biases=True), seed=4)
    assert expected.state_dict().keys() == layer.state_dict().keys()
    for name, value in layer.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name
    assert layer.router.num_tokens_per_expert.tolist() == [0] * 8
    x = tokens(6, 24)
    assert torch.equal(layer(x), expected(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_layer_keeps_bias_and_counts_and_its_state_comes_back(dtype: torch.dtype) -> None:
    layer = MoELayer(make_config()).to(dtype)
    layer.router.expert_bias.copy_(7 + torch.arange(8) * 1e-3)
    layer(tokens(9, 24, dtype=dtype)).sum().backward()
    layer.to(dtype)
    assert layer.router.num_tokens_per_expert.dtype == torch.int64 and layer.router.num_tokens_per_expert.sum() == 27
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = MoELayer(make_config()).to(dtype)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert loaded.router.expert_bias.dtype == torch.float32
    assert (
        torch.equal(loaded.router.expert_bias, 7 + torch.arange(8) * 1e-3)
        and len(loaded.router.expert_bias.unique()) == 8
    )


def test_router_and_function_make_the_layer() -> None:
    config = make_config(num_shared_experts=0)
    layer = MoELayer(config, dtype=torch.float64)
    router = Router(config, dtype=torch.float64)
    router.load_state_dict(layer.router.state_dict())
    x = tokens(2, 7, 24, dtype=torch.float64)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 4:] = False
    routing = router(x, mask)
    assert routing.expert_ids.shape == (2, 7, 3) and routing.router_logits.shape == (2, 7, 8)
    out = experts_forward(x, routing.expert_ids, routing.expert_weights, layer.experts.gate_up, layer.experts.down)
    assert torch.equal(out, layer(x, token_mask=mask))
    out.sum().backward()
    assert router.num_tokens_per_expert.sum() == 11 * 3
    router.update_balance()
    assert router.expert_bias.any() and not router.num_tokens_per_expert.any()


@pytest.mark.parametrize("changes", [{}, {"activation": "gelu", "gated": False}, {"swiglu_limit": 0.7}])
def test_the_function_takes_experts_in_any_order_and_skips_those_that_are_not_there(changes: dict[str, Any]) -> None:
    """With inner size equal to the outer one, where a transposed matrix would fit."""
    config = MoEConfig(dim=12, expert_hidden=12, num_experts=6, top_k=3, **changes)
    E, D, F, width = 6, 12, 12, 24 if config.gated else 12
    made = dict(gate_up=(E, width, D), down=(E, D, F), gate_up_bias=(E, width), down_bias=(E, D))
    weights = {
        name: tokens(*shape, dtype=torch.float64, seed=i).mul(0.4).requires_grad_()
        for i, (name, shape) in enumerate(made.items())
    }
    x = tokens(9, D, dtype=torch.float64, seed=7).requires_grad_()
    ids = torch.rand(9, E, generator=torch.Generator().manual_seed(8)).argsort(dim=1)[:, :3]
    ids[0, 0], ids[4, 2], ids[8] = -1, 6, 99
    share = tokens(9, 3, dtype=torch.float64, seed=9).requires_grad_()
    out = experts_forward(x, ids, share, **weights, **changes)
    grads = torch.autograd.grad(out.square().sum(), [x, share, *weights.values()])

    rows = []
    for t in range(9):
        row = x[t] * 0
        for k, e in enumerate(ids[t].tolist()):
            if 0 <= e < E:
                one = {"up": weights["gate_up"][e], "up_bias": weights["gate_up_bias"][e]}
                row = row + share[t, k] * mlp(
                    x[t], one | {"down": weights["down"][e], "down_bias": weights["down_bias"][e]}, config
                )
        rows.append(row)
    expected = torch.stack(rows)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    for grad, other in zip(
        grads, torch.autograd.grad(expected.square().sum(), [x, share, *weights.values()]), strict=True
    ):
        torch.testing.assert_close(grad, other, rtol=1e-11, atol=1e-13)


def test_the_function_under_autocast_and_in_a_plain_module() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(24, 4, bias=False)
            self.gate.weight.data = tokens(4, 24, seed=1)  # no choice is close
            self.up, self.down = nn.Parameter(tokens(4, 32, 24) * 0.2), nn.Parameter(tokens(4, 24, 16) * 0.2)

        def forward(self, x: Tensor) -> Tensor:
            weights, ids = self.gate(x).softmax(dim=-1).topk(2)
            return experts_forward(x, ids, weights, self.up, self.down)

    model, x = Plain(), tokens(3, 5, 24)
    plain = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(x)
    mixed.float().square().sum().backward()
    assert mixed.dtype == torch.bfloat16 and calc_diff(mixed, plain) < 1e-4
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_frozen_router_counts_where_the_input_has_a_gradient() -> None:
    layer, x = MoELayer(make_config()), tokens(9, 24)
    layer.router.requires_grad_(False)
    layer(x).sum().backward()
    assert not layer.router.num_tokens_per_expert.any() and layer.experts.down.grad.any()
    layer(x.requires_grad_()).sum().backward()
    assert layer.router.num_tokens_per_expert.sum() == 9 * 3


def test_every_weight_comes_from_unbiased_scores() -> None:
    """Case 10, for sizes of published models; the loop of the oracle is too slow for them."""
    for E, K in ((8, 1), (8, 2), (64, 6), (128, 8), (256, 8), (256, 16)):
        router = Router(MoEConfig(dim=16, expert_hidden=4, num_experts=E, top_k=K, route_scale=2.5))
        router.expert_bias.copy_(tokens(E, seed=E))
        routing = router(tokens(50, 16))
        scores = routing.router_logits.sigmoid()
        chosen = (scores + router.expert_bias).topk(K, dim=1).indices.sort(dim=1).values
        assert torch.equal(routing.expert_ids, chosen)
        taken = scores.gather(1, chosen)
        torch.testing.assert_close(routing.expert_weights, 2.5 * taken / taken.sum(dim=1, keepdim=True))


def test_the_oracle_sees_a_wrong_activation() -> None:
    layer = MoELayer(make_config(), dtype=torch.float64)
    x = tokens(5, 24, dtype=torch.float64)
    wrong = make_config(activation="gelu")
    assert calc_diff(layer(x), dense_moe(x, leaf_parameters(layer), wrong)[0]) > 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_one_operation_for_the_experts_has_the_bits_of_its_parts_and_keeps_less(
    dtype: torch.dtype, autocast: bool
) -> None:
    found = []
    for queue in (None, WgradQueue()):  # with a queue, which defers nothing, the parts one after the other
        x = tokens(90, 24, dtype=dtype).requires_grad_()
        layer = MoELayer(make_config(num_shared_experts=0), dtype=dtype)
        with LiveBytes() as memory, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            before = memory.bytes()
            out = layer(x, queue=queue)
            kept = memory.bytes() - before
        out.backward(tokens(90, 24, dtype=out.dtype, seed=1))
        found.append((kept, [out.detach(), x.grad, *(p.grad for p in layer.parameters())]))
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(mine, theirs)
    rows, item = 90 * 3, 2 if autocast else dtype.itemsize
    assert found[1][0] - found[0][0] >= rows * (24 + 10) * item  # the sorted rows, and what the second product takes


def test_frozen_experts_get_no_gradients_and_pass_them_on() -> None:
    whole, frozen = MoELayer(make_config()), MoELayer(make_config())
    frozen.experts.requires_grad_(False)
    grads = []
    for layer in (whole, frozen):
        x = tokens(30, 24).requires_grad_()
        layer(x).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads) and all(p.grad is None for p in frozen.experts.parameters())
    assert torch.equal(whole.router.weight.grad, frozen.router.weight.grad)


@pytest.mark.parametrize(
    "options", [{"max_recv_rows": 8}, {"dispatch": "hierarchical"}, {"dispatch": "nvshmem"}], ids=str
)
def test_a_compiled_graph_refuses_by_name_what_it_has_not(options: dict[str, Any]) -> None:
    two: Any = Communicator("ep", (0, 1), 0)
    layer = MoELayer(make_config(**options), ep=two, ep_nodes=(two, two), ep_windows=two)
    with pytest.raises(RuntimeError) as refused:
        torch.compile(layer, backend="eager", fullgraph=True)(tokens(1, 4, 24))
    name, value = next(iter(options.items()))
    assert f"{name}={value}" in str(refused.value)
    assert "a compiled graph has one round of one hop; use max_recv_rows=0 and dispatch=all_to_all" in str(
        refused.value
    )
