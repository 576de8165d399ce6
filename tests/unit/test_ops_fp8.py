"""fp8 in the engine: rows as codes, linear layers and MLPs on them, weights quantised once between two updates."""

from __future__ import annotations

import copy

import pytest
import torch
from measures import assert_same_bits, calc_diff, randn, same_bits
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import moe_kernels
from moe_engine.moe.dispatch import Rows
from moe_engine.moe.experts import Experts
from moe_engine.moe.mlp import DenseMLP
from moe_engine.ops.fp8 import Fp8, Fp8Rows, dequantize, quantize, use_fp8
from moe_engine.ops.fp8_linear import fp8_linears, fp8_mlp
from moe_engine.ops.linear import Linear, linears
from moe_engine.ops.wgrad_queue import WgradQueue
from moe_kernels.fp8_format import FORWARD_AMAX, GRADIENT_AMAX

BF16 = torch.bfloat16


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("shape", [(0, 128), (3, 128), (5, 200), (17, 64)])
def test_numbers_that_came_from_codes_give_the_same_numbers_again(shape: tuple[int, int], gradient: bool) -> None:
    x = randn(*shape, dtype=torch.float32) * torch.logspace(-3, 3, shape[1])
    once = dequantize(quantize(x.bfloat16(), gradient))
    assert once.dtype == BF16
    assert torch.equal(dequantize(quantize(once, gradient)), once)


def test_codes_of_small_gradients_are_those_of_large_ones() -> None:
    g = randn(9, 300)
    large, small = quantize(g, gradient=True), quantize(g * 2.0**-40, gradient=True)
    assert same_bits(large.codes, small.codes)
    assert torch.equal(large.scale * 2.0**-40, small.scale)


def of_rows(x: Tensor, floor: float = FORWARD_AMAX) -> Tensor:
    """x through codes with a tile for each 128 numbers of a row, in float64."""
    return moe_kernels.dequantize_rows(*moe_kernels.quantize_rows(x, floor)).double()


def of_columns(x: Tensor, floor: float = FORWARD_AMAX) -> Tensor:
    """The same with a tile for each 128 numbers of a column."""
    codes, scale = moe_kernels.quantize_columns(x, [x.shape[0]], floor)
    return moe_kernels.dequantize_columns(codes, scale)[:, : x.shape[0]].T.double()


def of_blocks(w: Tensor) -> Tensor:
    codes, _, scale = moe_kernels.quantize_blocks(w)
    return moe_kernels.dequantize_blocks(codes, scale).double()


@pytest.mark.parametrize(("rows", "inner", "outer"), [(37, 200, 72), (1, 128, 256), (130, 96, 130), (0, 64, 64)])
@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_linears_multiply_codes(rows: int, inner: int, outer: int, wgrad: str) -> None:
    """Each product equals that of the numbers its codes stand for, and is near the one of the exact numbers."""
    x, w, v = (t.requires_grad_() for t in (randn(rows, inner), randn(outer, inner, seed=1), randn(24, inner, seed=2)))
    d_out, d_other = randn(rows, outer, seed=3) * 2.0**-20, randn(rows, 24, seed=4) * 2.0**-20
    outs = fp8_linears(x, [w, v], Fp8(wgrad))
    assert outs[0].dtype == BF16
    assert calc_diff(outs[0], of_rows(x) @ of_blocks(w).T) < 4e-6  # rounding to bf16
    d_x, d_w, d_v = torch.autograd.grad(outs, (x, w, v), (d_out, d_other))
    by_row = of_rows(d_out, GRADIENT_AMAX) @ of_blocks(w) + of_rows(d_other, GRADIENT_AMAX) @ of_blocks(v)
    assert calc_diff(d_x, by_row) < 4e-6
    kept = of_rows(x)
    expected = (
        of_columns(d_out, GRADIENT_AMAX).T @ of_columns(kept.float()) if wgrad == "fp8" else d_out.double().T @ kept
    )
    assert d_w.shape == w.shape and d_v.shape == v.shape
    assert calc_diff(d_w, expected) < 4e-6
    if rows:
        exact_x, exact_w = d_out.double() @ w.double() + d_other.double() @ v.double(), d_out.double().T @ x.double()
        differences = [
            calc_diff(outs[0], x.double() @ w.double().T), calc_diff(d_x, exact_x), calc_diff(d_w, exact_w)
        ]  # fmt: skip
        assert max(differences) < 1.5e-3 and min(differences) > 1e-5, differences


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("waits", [False, True])
def test_an_input_that_is_held_anyway_is_kept_alone_with_the_same_bits(power_of_two: bool, waits: bool) -> None:
    x, w, d_out = randn(150, 136).requires_grad_(), randn(72, 136, seed=1).requires_grad_(), randn(150, 72, seed=2)
    results, kept = [], []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    for held in (False, True):
        x.grad = w.grad = None
        kept.clear()
        queue = WgradQueue()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y):
            (out,) = fp8_linears(x, [w], Fp8(power_of_two=power_of_two), queue, held)
        assert [y.dtype for y in kept] == ([BF16] if held else [torch.float8_e4m3fn, torch.float32])
        assert not held or kept[0].data_ptr() == x.data_ptr()
        with queue.defer("batch", waits):
            out.backward(d_out)
        if waits:
            queue.run("batch")
        results.append([out, x.grad, w.grad])
    assert_same_bits(*results)


@pytest.mark.parametrize("shape", [(136, 72), (2, 200, 264)])
def test_transposed_codes_made_at_each_use_are_those_that_are_kept(shape: tuple[int, ...]) -> None:
    weight = randn(*shape)
    one, other = Fp8().weight(weight), Fp8(keep_transposed=False).weight(weight)
    assert one.kept is not None and other.kept is None
    assert_same_bits(one.transposed(), other.transposed())


def experts_and_rows(biases: bool = False) -> tuple[Experts, Rows]:
    """Four experts, the second without rows, for received rows of which each has up to two."""
    experts = Experts(range(4), 136, 72, BF16, biases=biases)
    for i, parameter in enumerate(experts.parameters()):
        parameter.data = (randn(*parameter.shape, seed=10 + i, dtype=torch.float32) * 0.1).to(BF16)
    ids = torch.tensor([[0, 2], [3, -1], [2, 3], [0, -1]]).repeat(20, 1)
    weights = torch.rand(80, 2, generator=torch.Generator().manual_seed(5)).masked_fill(ids < 0, 0)
    return experts, Rows(randn(80, 136).requires_grad_(), ids.int(), weights.requires_grad_())


def run_experts(experts: Experts, rows: Rows, queue: WgradQueue | None = None) -> list[Tensor]:
    """Output, d rows, d weights, and the parameters' gradients."""
    for tensor in (rows.x, rows.weights, *experts.parameters()):
        tensor.grad = None
    out = experts(rows, queue)
    d_out = randn(*out.shape, seed=9) * 2.0**-24
    if queue is None:
        out.backward(d_out)
    else:
        with queue.defer("batch"):
            out.backward(d_out)
        assert experts.down.grad is None and len(queue) == 2
        queue.run("batch")
    return [out, *(tensor.grad for tensor in (rows.x, rows.weights, experts.gate_up, experts.down))]  # type: ignore[misc]


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("biases", [False, True])  # with biases SwiGLU is apart from the products
def test_experts_in_fp8_are_near_those_in_bf16(wgrad: str, power_of_two: bool, biases: bool) -> None:
    experts, rows = experts_and_rows(biases)
    plain = run_experts(experts, rows)
    use_fp8(experts, Fp8(wgrad, power_of_two))
    names = ("out", "d rows", "d weights", "d gate_up", "d down")
    results = run_experts(experts, rows)
    found = {name: calc_diff(a, b) for name, a, b in zip(names, results, plain, strict=True)}
    assert all(1e-5 < difference < 5e-3 for difference in found.values()), found
    assert not results[3][1].any() and not results[4][1].any()  # the expert without rows


def test_weight_gradients_that_wait_have_the_same_bits() -> None:
    experts, rows = experts_and_rows()
    use_fp8(experts, Fp8())
    at_once = run_experts(experts, rows)
    later = run_experts(experts, rows, WgradQueue())
    assert all(torch.equal(a, b) for a, b in zip(at_once, later, strict=True))


def test_a_rows_result_does_not_depend_on_the_others() -> None:
    mlp = DenseMLP(200, 72, BF16)
    for i, parameter in enumerate(mlp.parameters()):
        parameter.data = randn(*parameter.shape, seed=i) * 0.1
    use_fp8(mlp, Fp8())
    x = randn(45, 200).requires_grad_()
    whole = mlp(x)
    d_x = torch.autograd.grad(whole, x, randn(45, 200, seed=7))[0]
    for part in (slice(0, 1), slice(3, 20), slice(40, 45)):
        alone = mlp(x[part])
        assert torch.equal(alone, whole[part])
        assert torch.equal(torch.autograd.grad(alone, x, randn(45, 200, seed=7)[part])[0][part], d_x[part])


@pytest.mark.parametrize("kind", ["linears", "dense", "experts"])
def test_what_is_kept_are_fp8_bytes(kind: str) -> None:
    """One byte for each number of the inputs of linear layers and of SwiGLU, and 4 for each 128 of them."""
    kept: list[Tensor] = []
    fp8, T, D, F = Fp8(), 256, 256, 128
    x = randn(T, D).requires_grad_()
    small = 0
    with saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        if kind == "linears":
            out = fp8_linears(x, [randn(64, D).requires_grad_(), randn(32, D).requires_grad_()], fp8)
            numbers = T * D
        elif kind == "dense":
            out = [fp8_mlp(x, randn(2 * F, D).requires_grad_(), randn(D, F).requires_grad_(), fp8)]
            numbers = T * D + T * 2 * F
        else:
            experts = Experts(range(2), D, F, BF16)
            for parameter in experts.parameters():
                parameter.data = randn(*parameter.shape)
            use_fp8(experts, fp8)
            ids = torch.tensor([[0, 1]]).repeat(T, 1).int()
            out = [experts(Rows(x, ids, torch.rand(T, 2).requires_grad_()))]
            numbers = T * D + 2 * T * 2 * F  # the rows as they came, not their copies for each expert
            small = 2 * T * 4  # the rows' weights
    assert sum(t.untyped_storage().nbytes() for t in kept) == numbers + numbers // 128 * 4 + small
    assert not [t for t in kept if t.dtype == BF16]
    torch.autograd.backward(out, [torch.ones_like(o) for o in out])


def test_a_weight_is_quantised_once_until_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    real = moe_kernels.quantize_blocks
    monkeypatch.setattr("moe_engine.ops.fp8.quantize_blocks", lambda w, *args: made.append(w) or real(w, *args))
    layer, fp8 = Linear(64, 32, BF16), Fp8()
    layer.weight.data = randn(32, 64)
    use_fp8(layer, fp8)
    x = randn(4, 64)
    first = layer(x)
    assert torch.equal(linears(x, [layer, layer])[1], first) and len(made) == 1
    with torch.no_grad():
        layer.weight.mul_(2)  # as an ordinary optimizer does
    assert torch.equal(layer(x), 2 * first) and len(made) == 2
    layer.weight.data.mul_(2)  # behind autograd's back
    fp8.forget()
    assert torch.equal(layer(x), 4 * first) and len(made) == 3
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), 4 * first) and len(made) == 4
    use_fp8(layer, None)
    assert calc_diff(layer(x), 4 * first) > 1e-5 and len(made) == 4


def test_autocast_chooses_the_format_around_the_codes() -> None:
    x, w = (
        randn(5, 64, dtype=torch.float32).requires_grad_(),
        randn(16, 64, seed=1, dtype=torch.float32).requires_grad_(),
    )
    with torch.autocast("cpu", dtype=BF16):
        out = fp8_linears(x, [w], Fp8())[0]
    assert out.dtype == BF16
    out.sum().backward()
    assert x.grad is not None and w.grad is not None and x.grad.dtype == w.grad.dtype == torch.float32


def test_rows_of_a_weight_have_their_part_of_its_codes() -> None:
    """Cut on borders of blocks: the products' bits, and gradients that are the parts of the whole's."""
    fp8, weight = Fp8(), randn(384, 96, dtype=BF16)
    x, d_y = randn(17, 96, seed=1), randn(17, 384, seed=2)
    own, leaf = x.clone().requires_grad_(), weight.clone().requires_grad_()
    (whole,) = fp8_linears(own, [leaf], fp8)
    whole.backward(d_y)
    rows = slice(128, 384)
    part_of_x, part = x.clone().requires_grad_(), weight[rows].clone().requires_grad_()
    (found,) = fp8_linears(part_of_x, [part], Fp8Rows(fp8, leaf, rows))
    found.backward(d_y[:, rows])
    assert own.grad is not None and leaf.grad is not None and part_of_x.grad is not None and part.grad is not None
    assert same_bits(found, whole[:, rows]) and same_bits(part.grad, leaf.grad[rows])
    codes = fp8.weight(leaf)
    expected = (
        dequantize(quantize(d_y[:, rows], gradient=True), torch.float64)
        @ moe_kernels.dequantize_blocks(codes.codes, codes.scale)[0, rows].double()
    )
    assert calc_diff(part_of_x.grad, expected) < 1e-5
    with pytest.raises(ValueError, match="rows 64 to 384 do not lie between borders of blocks of 128"):
        Fp8Rows(fp8, leaf, slice(64, 384))


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_what_tensors_are_made_by_default_changes_no_bit(wgrad: str) -> None:
    experts, rows = experts_and_rows()
    use_fp8(experts, Fp8(wgrad, keep=False))
    d_out, inputs = randn(80, 136, seed=9), (rows.x, rows.weights, *experts.parameters())

    def results() -> list[Tensor]:
        out = experts(rows)
        return [out, *torch.autograd.grad(out, inputs, d_out)]

    expected = results()
    try:
        for dtype in (BF16, torch.float64):
            torch.set_default_dtype(dtype)
            with torch.device("meta"):
                found = results()
            assert_same_bits(found, expected)
    finally:
        torch.set_default_dtype(torch.float32)
