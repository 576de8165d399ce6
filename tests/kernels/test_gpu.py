"""Every kernel on a GPU against the reference (`make gpu`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from measures import assert_same_bits, calc_diff, randn
from torch import Tensor

import moe_kernels
from moe_kernels import reference
from moe_kernels.fp8_format import GRADIENT_AMAX

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COUNTS = [[0, 1, 7, 300], [1024, 0, 127, 513], [128, 129, 0, 0]]


def cuda(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, seed=seed).cuda()


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("counts", COUNTS)
def test_quantisation_has_the_bits_of_the_cpu(counts: list[int], power_of_two: bool) -> None:
    x, sizes = cuda(sum(counts) + 5, 1040), torch.tensor(counts)
    for floor in (1e-4, GRADIENT_AMAX):
        options = (floor, power_of_two)
        results = (*moe_kernels.quantize_rows(x, *options), *moe_kernels.quantize_blocks(x, *options))
        results += moe_kernels.quantize_rows_and_columns(x, sizes.cuda(), *options)
        expected = (*reference.quantize_rows(x.cpu(), *options), *reference.quantize_blocks(x.cpu(), *options))
        expected += reference.quantize_rows_and_columns(x.cpu(), sizes, *options)
        assert_same_bits([y.cpu() for y in results], expected)


def test_fewer_multiprocessors_change_no_bit() -> None:
    counts = torch.tensor(COUNTS[1]).cuda()
    x, d, w = cuda(sum(COUNTS[1]), 1040), cuda(sum(COUNTS[1]), 400, seed=2), cuda(4, 400, 1040, seed=1)
    a, (codes, _, scale) = moe_kernels.quantize_rows(x), moe_kernels.quantize_blocks(w)
    columns = (*moe_kernels.quantize_columns(d, counts, GRADIENT_AMAX), *moe_kernels.quantize_columns(x, counts))
    products: list[Callable[[int | None], Tensor]] = [
        lambda sms: moe_kernels.grouped_gemm(x, w.transpose(1, 2), counts, num_sms=sms),
        lambda sms: moe_kernels.grouped_wgrad(d, x, counts, num_sms=sms),
        lambda sms: moe_kernels.grouped_gemm_fp8(*a, codes, scale, counts, num_sms=sms),
        lambda sms: moe_kernels.grouped_wgrad_fp8(*columns, counts, num_sms=sms),
    ]
    for product in products:
        assert_same_bits([product(13)], [product(None)])


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_products(counts: list[int]) -> None:
    rows, sizes = sum(counts) + 5, torch.tensor(counts).cuda()
    x, w = cuda(rows, 1040), cuda(4, 400, 1040, seed=1)
    source = torch.randperm(rows).cuda()
    for b in (w.transpose(1, 2), w.transpose(1, 2).contiguous()):
        exact = reference.grouped_gemm(x.double(), b.double(), counts)
        gathered = reference.grouped_gemm(x.double(), b.double(), counts, source)
        for hopper in (False, True):
            assert calc_diff(moe_kernels.grouped_gemm(x, b, sizes, hopper=hopper), exact) < 1e-5
            assert calc_diff(moe_kernels.grouped_gemm(x, b, sizes, source, hopper=hopper), gathered) < 1e-5
    a, (codes, _, scale) = moe_kernels.quantize_rows(x), moe_kernels.quantize_blocks(w)
    for taken in (None, source):
        exact = reference.grouped_gemm_fp8(*a, codes, scale, counts, taken, torch.float32)
        for hopper in (False, True):
            out = moe_kernels.grouped_gemm_fp8(*a, codes, scale, sizes, taken, torch.float32, hopper=hopper)
            assert calc_diff(out, exact) < 1e-6 and not out[-5:].any()
    d = cuda(rows, 400, seed=2)
    exact = reference.grouped_wgrad(d.double(), x.double(), counts)
    for hopper in (False, True):
        grad = moe_kernels.grouped_wgrad(d, x, sizes, hopper=hopper)
        assert grad.dtype == torch.float32 and calc_diff(grad, exact) < 1e-9
        assert calc_diff(moe_kernels.grouped_wgrad(d, x, sizes, grad.clone(), hopper=hopper), 2 * exact) < 1e-9
    columns = (*moe_kernels.quantize_columns(d, sizes, GRADIENT_AMAX), *moe_kernels.quantize_columns(x, sizes))
    exact = reference.grouped_wgrad_fp8(*columns, counts)
    for hopper in (False, True):
        assert calc_diff(moe_kernels.grouped_wgrad_fp8(*columns, sizes, hopper=hopper), exact) < 1e-6


@pytest.mark.parametrize("name", ["gemm", "gemm_fp8", "wgrad", "wgrad_fp8"])
def test_the_hopper_forms_agree_where_there_is_a_hopper(name: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    from moe_kernels import device
    from moe_kernels.device.forms import hopper_form

    assert hopper_form(name, torch.device("cuda"), getattr(device, f"grouped_{name}")) is not None


@pytest.mark.parametrize("hidden", [128, 200])
def test_swiglu(hidden: int) -> None:
    gate_up, d_out, weight = cuda(77, 2 * hidden), cuda(77, hidden, seed=1), torch.rand(77, device="cuda")
    results = (moe_kernels.swiglu(gate_up, weight), *moe_kernels.swiglu_backward_recompute(d_out, gate_up, weight))
    exact = (reference.swiglu(gate_up.double(), weight.double()),)
    exact += reference.swiglu_backward_recompute(d_out.double(), gate_up.double(), weight.double())
    assert all(calc_diff(a, b) < 1e-5 for a, b in zip(results, exact, strict=True))
    codes, scale, d_weight, act, act_scale = moe_kernels.swiglu_backward_fp8(d_out, gate_up, weight)
    fp8 = (moe_kernels.dequantize_rows(codes, scale), d_weight, moe_kernels.dequantize_rows(act, act_scale))
    assert all(calc_diff(a, b) < 1e-3 for a, b in zip(fp8, exact[1:], strict=True))
    assert calc_diff(moe_kernels.dequantize_rows(*moe_kernels.swiglu_fp8(gate_up, weight)), exact[0]) < 1e-3


def test_kernels_run_on_the_stream_of_the_call() -> None:
    """Each reads what an unfinished copy on that stream brings; on any other it would find the old values."""
    old, new, side = cuda(64, 1024), cuda(64, 1024, seed=1), torch.cuda.Stream()
    sizes, w, source = torch.tensor([40, 24]).cuda(), cuda(2, 1024, 256, seed=2), torch.randperm(64).cuda()
    kernels: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
        "quantize_rows": moe_kernels.quantize_rows,
        "quantize_blocks": moe_kernels.quantize_blocks,
        "permute": lambda x: moe_kernels.permute(x, source),
        "swiglu": moe_kernels.swiglu,
        "grouped_gemm": lambda x: moe_kernels.grouped_gemm(x, w, sizes),
        "grouped_wgrad": lambda x: moe_kernels.grouped_wgrad(x, x, sizes),
    }
    for name, kernel in kernels.items():
        expected, x = kernel(new), old.clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
            x.copy_(new)
            result = kernel(x)
        torch.cuda.synchronize()
        pairs = zip(_tensors(result), _tensors(expected), strict=True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs), name


def _tensors(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [y.contiguous() for y in ([result] if isinstance(result, Tensor) else result)]


def test_permutation_and_routing() -> None:
    x, places = cuda(9, 1040), torch.tensor([[3, 1, -1], [-1, -1, -1], [8, -1, 0]]).cuda()
    codes = moe_kernels.quantize_rows(x)
    assert_same_bits([moe_kernels.permute(x, places[2].abs())], [x[places[2].abs()]])
    assert_same_bits([moe_kernels.unpermute(x, places)], [reference.unpermute(x, places)])
    expected = reference.permute_fp8(*codes, places[2].abs())
    assert_same_bits(moe_kernels.permute_fp8(*codes, places[2].abs()), expected)
    assert_same_bits([moe_kernels.unpermute_fp8(*codes, places)], [reference.unpermute_fp8(*codes, places)])
    logits, bias = cuda(500, 256).float(), cuda(256, seed=1).float() / 9
    result = moe_kernels.route(logits, bias, 8, 8, 4, route_scale=2.5)
    expected = reference.route(logits, bias, 8, 8, 4, route_scale=2.5)
    assert torch.equal(result[0], expected[0]) and torch.equal(result[3], expected[3])
    assert torch.allclose(result[1], expected[1], rtol=1e-5)
