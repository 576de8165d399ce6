"""The Hopper forms on CPU tensors, a thread for each role, against the reference: addresses, masks, ends of groups.

Their machine code is looked at in `test_aot`, their barriers' every order in `test_hopper_protocol`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from gluon_on_threads import emulated
from interpreter import interpreted
from measures import calc_diff, randn, with_tail
from torch import Tensor

import moe_kernels
from moe_kernels.fp8_format import GRADIENT_AMAX

forms, hopper, tails = interpreted("forms"), interpreted("hopper"), interpreted("tails")
gemm, gemm_fp8 = interpreted("hopper_gemm"), interpreted("hopper_gemm_fp8")
wgrad, wgrad_fp8 = interpreted("hopper_wgrad"), interpreted("hopper_wgrad_fp8")
FP32_SUMS = 1e-6
WAYS = ["alone", "gather", "pair"]  # how multiprocessors and rows come together
COUNTS = [[0, 1, 7], [64, 0, 389], pytest.param([128, 129, 0], marks=pytest.mark.slow), [0, 0, 0]]


@pytest.fixture(autouse=True)
def on_threads() -> Iterator[None]:
    with emulated(hopper, gemm, gemm_fp8, wgrad, wgrad_fp8):
        yield


def sources(counts: list[int], way: str) -> Tensor | None:
    """Rows in another order, some of them twice; rows of NaN only after the groups."""
    if way != "gather":
        return None
    taken = torch.randint(max(1, sum(counts)), (sum(counts) + 5,), generator=torch.Generator().manual_seed(0))
    taken[-5:] = sum(counts) + 4
    return taken


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by_column", [True, False], ids=["fprop", "dgrad"])
@pytest.mark.parametrize("counts", COUNTS)
def test_gemm(counts: list[int], by_column: bool, way: str) -> None:
    depth = 136 if by_column else 128
    a, b, source = with_tail(counts, depth), randn(3, depth, 272, seed=1), sources(counts, way)
    stored = b.transpose(1, 2).contiguous() if by_column else b
    assert gemm.takes(a, stored.transpose(1, 2) if by_column else stored, by_column)
    out = gemm.hopper_gemm(a, stored, by_column, torch.tensor(counts), source, 3, way == "pair")
    expected = moe_kernels.grouped_gemm(a, b, counts, source)
    assert out.dtype == torch.bfloat16 and not out[-5:].any()
    assert not sum(counts) or calc_diff(out, expected) < FP32_SUMS


def test_gemm_leaves_sums_of_broken_steps_to_the_plain_form() -> None:
    """Across the columns of b a last step of the sum would reach into the next group's matrix."""
    a, b = randn(5, 136), randn(3, 136, 72)
    assert not gemm.takes(a, b, False) and gemm.takes(a, b, True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("counts", COUNTS)
def test_gemm_fp8(counts: list[int], way: str) -> None:
    a, (b, _, b_scale) = (
        moe_kernels.quantize_rows(with_tail(counts, 272)),
        moe_kernels.quantize_blocks(randn(3, 328, 272, seed=1)),
    )
    source = sources(counts, way)
    sizes = torch.tensor(counts)
    out = gemm_fp8.hopper_gemm_fp8(*a, b, b_scale, sizes, source, torch.float32, 3, way == "pair")
    expected = moe_kernels.grouped_gemm_fp8(*a, b, b_scale, counts, source, dtype=torch.float32)
    assert not out[-5:].any() and (not sum(counts) or calc_diff(out, expected) < FP32_SUMS)


@pytest.mark.parametrize(("columns", "num_sms", "pairs"), [(512, None, True), (512, 1, False), (768, None, False)])
def test_pairs_where_no_tile_is_left_over(columns: int, num_sms: int | None, pairs: bool) -> None:
    assert hopper.paired(columns, gemm.TILE, num_sms) == pairs
    assert hopper.grid(100, 1 + pairs, num_sms or 7, torch.device("cpu")) == ((num_sms or 7) // (1 + pairs),)


def check_gradients(run: Callable[[Tensor, bool], Tensor], reference: Callable[[Tensor | None], Tensor],
                    counts: list[int]) -> None:  # fmt: skip
    """Alone (over NaN) and added to what is there; a group without rows has zero, or leaves it untouched."""
    expected = reference(None)
    before = torch.randn(expected.shape)
    alone = run(torch.full_like(before, float("nan")), False)
    added = run(before.clone(), True)
    for group, count in enumerate(counts):
        assert count or (not alone[group].any() and torch.equal(added[group], before[group]))
    assert alone.isfinite().all() and (not sum(counts) or calc_diff(alone, expected) < FP32_SUMS)
    assert calc_diff(added, reference(before.clone())) < FP32_SUMS


@pytest.mark.parametrize("pairs", [False, True], ids=["alone", "pair"])
@pytest.mark.parametrize("counts", COUNTS)
def test_wgrad(counts: list[int], pairs: bool) -> None:
    """Rows of NaN follow the last group, and other groups' rows each of the others."""
    d, a, sizes = with_tail(counts, 72), with_tail(counts, 264, seed=1), torch.tensor(counts)
    check_gradients(
        lambda grad, accumulate: wgrad.hopper_wgrad(d, a, sizes, grad, accumulate, 3, pairs),
        lambda out: moe_kernels.grouped_wgrad(d.float(), a.float(), counts, out),
        counts,
    )


@pytest.mark.parametrize("pairs", [False, True], ids=["alone", "pair"])
@pytest.mark.parametrize("counts", COUNTS)
def test_wgrad_fp8(counts: list[int], pairs: bool) -> None:
    sizes = torch.tensor(counts)
    d = moe_kernels.quantize_columns(with_tail(counts, 72), counts, GRADIENT_AMAX)
    a = moe_kernels.quantize_columns(with_tail(counts, 136, seed=1), counts)
    check_gradients(
        lambda grad, accumulate: wgrad_fp8.hopper_wgrad_fp8(*d, *a, sizes, grad, accumulate, 3, pairs),
        lambda out: moe_kernels.grouped_wgrad_fp8(*d, *a, counts, out),
        counts,
    )


@pytest.mark.parametrize("counts", COUNTS)
def test_tails(counts: list[int]) -> None:
    x = with_tail(counts, 136)
    out = tails.tails(x, torch.tensor(counts), 64).view(3, 64, 136)
    start = 0
    for group, count in enumerate(counts):
        whole, start = start + count // 64 * 64, start + count
        assert torch.equal(out[group, : start - whole], x[whole:start]) and not out[group, start - whole :].any()


@pytest.mark.slow
@pytest.mark.parametrize("form", [gemm, gemm_fp8, wgrad, wgrad_fp8])
def test_a_form_is_compared_with_its_twin(form: object) -> None:
    """What a GPU does before it uses a form: here with the reference in the plain form's place, and one that errs."""
    name = form.__name__.rsplit("hopper_", 1)[1]  # type: ignore[attr-defined]
    plain = getattr(moe_kernels, f"grouped_{name}")
    compare: Callable[..., float] = form.compare  # type: ignore[attr-defined]
    assert compare(torch.device("cpu"), plain) < 1e-5  # (sums in another order; 16-bit results)
    assert compare(torch.device("cpu"), lambda *args, **kwargs: plain(*args, **kwargs) * 1.01) > 1e-5


@pytest.mark.parametrize("error", [0.0, 1e-3, float("nan")])
def test_a_form_is_compared_once_a_device_and_refused_where_it_differs(
    error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the device and for the comparison, which needs one."""
    compared: list[torch.device] = []

    def compare(device: torch.device, plain: Callable[..., Tensor]) -> float:
        assert plain is product
        compared.append(device)
        return error

    def product(*_: object) -> Tensor:
        return torch.empty(0)

    monkeypatch.setattr(gemm_fp8, "compare", compare)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0) if device.index != 1 else (8, 0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for device in (torch.device("cuda"), torch.device("cuda", 3), torch.device("cuda", 0)):
            form = forms.hopper_form("gemm_fp8", device, product)
            assert form is (None if error else gemm_fp8)
    assert [device.index for device in compared] == [3, 0]
    assert len(caught) == (2 if error else 0) and all("differs from the plain one" in str(w.message) for w in caught)
    assert forms.hopper_form("gemm_fp8", torch.device("cuda", 1), product) is None, "not a Hopper"
    assert forms.hopper_form("gemm_fp8", torch.device("cpu"), product) is None
    assert len(compared) == 2
