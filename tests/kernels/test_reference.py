"""The reference kernels against float64, at odd and empty sizes, with uninitialised memory poisoned by NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from measures import calc_diff, poisoned_memory, randn
from torch import Tensor

import moe_kernels
from moe_kernels.reference import wide

DTYPES = [torch.bfloat16, torch.float32, torch.float64]
LIMITS = {torch.bfloat16: 1e-5, torch.float32: 1e-12, torch.float64: 1e-15}  # on calc_diff
GROUPS = [[0, 0, 0], [1, 0, 0], [0, 3, 0], [0, 0, 5], [7, 16, 1], [20, 0, 44], [2, 15, 17]]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def check(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert result.shape == expected.shape and result.isfinite().all()
    assert calc_diff(result, expected) <= LIMITS[dtype]


def each_group(a: Tensor, b: Tensor, counts: Sequence[int]) -> Tensor:
    parts = [rows @ matrix for rows, matrix in zip(a.split(counts), b, strict=True)]
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8, 12), (1, 24, 10), (5, 7, 3), (17, 33, 257), (64, 100, 16)])
def test_gemm_and_wgrad_equal_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inner, columns = shape
    a, b = randn(rows, inner, dtype=dtype), randn(inner, columns, dtype=dtype, seed=1)
    result = moe_kernels.gemm(a, b)
    assert result.dtype == dtype and result.is_contiguous()
    check(result, a.double() @ b.double(), dtype)
    check(moe_kernels.gemm(a, b.T.contiguous().T), a.double() @ b.double(), dtype)
    d_out = randn(rows, columns, dtype=dtype, seed=2)
    check(moe_kernels.wgrad(d_out, a), d_out.double().T @ a.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (257, 12), (12, 257), (64, 48), (9, 7)])
def test_gemm_rows_do_not_depend_on_other_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    a, b = randn(70, shape[0], dtype=dtype), randn(*shape, dtype=dtype, seed=1)
    for matrix in (b, b.T.contiguous().T):
        whole = moe_kernels.gemm(a, matrix)
        for start in (0, 1, 3, 16):
            for count in (1, 2, 5, 15, 18, 54):
                assert torch.equal(moe_kernels.gemm(a[start : start + count], matrix), whole[start : start + count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", GROUPS)
@pytest.mark.parametrize("dims", [(24, 12), (13, 10)])
def test_grouped_gemm_equals_float64_and_one_gemm_a_group(
    counts: list[int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    a, b = randn(sum(counts), dims[0], dtype=dtype), randn(3, *dims, dtype=dtype, seed=1)
    for matrices in (b, b.transpose(1, 2).contiguous().transpose(1, 2)):
        result = moe_kernels.grouped_gemm(a, matrices, counts)
        assert result.dtype == dtype and result.is_contiguous()
        check(result, each_group(a.double(), b.double(), counts), dtype)
        singles = [moe_kernels.gemm(rows, m) for rows, m in zip(a.split(counts), matrices, strict=True)]
        assert torch.equal(result, torch.cat(singles))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_after_the_last_group_stay_out_of_everything(dtype: torch.dtype) -> None:
    counts = [3, 0, 18]
    a, b = randn(30, 24, dtype=dtype), randn(3, 24, 12, dtype=dtype, seed=1)
    clean = moe_kernels.grouped_gemm(a, b, counts)
    d_out = randn(30, 12, dtype=dtype, seed=2)
    clean_grad = moe_kernels.grouped_wgrad(d_out, a, counts)
    a[21:], d_out[21:] = float("nan"), float("inf")
    poisoned = moe_kernels.grouped_gemm(a, b, counts)
    assert torch.equal(poisoned, clean) and not poisoned[21:].any()
    assert torch.equal(moe_kernels.grouped_wgrad(d_out, a, counts), clean_grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_wgrad_equals_float64_and_is_zero_for_an_empty_group(dtype: torch.dtype) -> None:
    counts = [162, 0, 2577, 446, 0, 83]
    a, d_out = randn(sum(counts), 8, dtype=dtype), randn(sum(counts), 4, dtype=dtype, seed=1)
    grad = moe_kernels.grouped_wgrad(d_out, a, counts)
    parts = zip(d_out.double().split(counts), a.double().split(counts), strict=True)
    check(grad, torch.stack([d.T @ x for d, x in parts]), dtype)
    assert not grad[1].any() and not grad[4].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpermute_sums_in_the_order_of_columns(dtype: torch.dtype) -> None:
    rows = randn(9, 5, dtype=dtype)
    places = torch.tensor([[3, 1, -1], [-1, -1, -1], [8, -1, 0], [2, 4, 5]])
    wide = rows.to(torch.promote_types(dtype, torch.float32))
    zero = torch.zeros_like(wide[0])
    expected = torch.stack([wide[3] + wide[1], zero, wide[8] + wide[0], wide[2] + wide[4] + wide[5]])
    assert torch.equal(moe_kernels.unpermute(rows, places), expected.to(dtype))
    order = torch.tensor([4, 4, 0])
    assert torch.equal(moe_kernels.permute(rows, order), rows[order])


def test_unpermute_sums_in_fp32_and_rounds_once() -> None:
    rows = torch.tensor([[1.0]] + [[2.0**-9]] * 4, dtype=torch.bfloat16)  # 1 + 2^-9 rounds to 1 in bf16
    assert moe_kernels.unpermute(rows, torch.tensor([[0, 1, 2, 3, 4]])).item() == 1 + 2.0**-7


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_permute_and_unpermute_of_nothing(rows: int) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    assert moe_kernels.permute(torch.zeros(rows, 4), nothing).shape == (0, 4)
    result = moe_kernels.unpermute(torch.zeros(0, 4), torch.full((rows, 2), -1))
    assert result.shape == (rows, 4) and not result.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 5), (300, 130)])
def test_swiglu_and_its_gradients_equal_float64(shape: tuple[int, int], weighted: bool, dtype: torch.dtype) -> None:
    rows, hidden = shape
    gate_up, d_out = randn(rows, 2 * hidden, dtype=dtype) * 3, randn(rows, hidden, dtype=dtype, seed=1)
    wide = torch.promote_types(dtype, torch.float32)
    weight = randn(rows, dtype=wide, seed=2) if weighted else None

    x = gate_up.double().clone().requires_grad_()
    w = weight.double().clone().requires_grad_() if weight is not None else None
    gate, up = x.chunk(2, dim=1)
    expected = gate / (1 + (-gate).exp()) * up * (1 if w is None else w[:, None])
    expected.backward(d_out.double())

    check(moe_kernels.swiglu(gate_up, weight), expected.detach(), dtype)
    d_gate_up, d_weight = moe_kernels.swiglu_backward(d_out, gate_up, weight)
    assert d_gate_up.dtype == dtype
    check(d_gate_up, x.grad, dtype)
    if w is None:
        assert d_weight is None
    else:
        check(d_weight, w.grad, wide)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_is_finite_at_the_ends_of_the_range(dtype: torch.dtype) -> None:
    gate_up = torch.tensor([[-1e4, 2.0], [1e4, 2.0], [-90.0, 2.0], [0.0, 0.0]], dtype=dtype)
    assert moe_kernels.swiglu(gate_up).flatten().tolist()[:2] == [0.0, torch.tensor(2e4, dtype=dtype).item()]
    d_gate_up, _ = moe_kernels.swiglu_backward(torch.ones(4, 1, dtype=dtype), gate_up)
    assert moe_kernels.swiglu(gate_up).isfinite().all() and d_gate_up.isfinite().all()
    assert d_gate_up[1].tolist() == [2.0, torch.tensor(1e4, dtype=dtype).item()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_rows_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    gate_up, weight, d_out = randn(61, 26, dtype=dtype), randn(61, dtype=torch.float32), randn(61, 13, dtype=dtype)
    whole = (moe_kernels.swiglu(gate_up, weight), *moe_kernels.swiglu_backward(d_out, gate_up, weight))
    for start in range(0, 40, 7):
        rows = slice(start, start + 1 + start % 19)
        part = (
            moe_kernels.swiglu(gate_up[rows], weight[rows]),
            *moe_kernels.swiglu_backward(d_out[rows], gate_up[rows], weight[rows]),
        )
        for a, b in zip(part, whole, strict=True):
            assert torch.equal(a, b[rows])


def test_products_that_a_cpu_has_no_instructions_for_run_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for has_tiles, expected in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setitem(wide._HAS_TILES, torch.bfloat16, has_tiles)
        assert moe_kernels.matmul_dtype(torch.bfloat16, cpu) == expected
        assert moe_kernels.matmul_dtype(torch.float32, cpu) == torch.float32
        assert moe_kernels.matmul_dtype(torch.float64, cpu) == torch.float64
        assert moe_kernels.matmul_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16
        a, b = randn(40, 24, dtype=torch.bfloat16), randn(2, 24, 12, dtype=torch.bfloat16, seed=1)
        check(moe_kernels.gemm(a, b[0]), a.double() @ b[0].double(), torch.bfloat16)
        check(moe_kernels.grouped_gemm(a, b, [30, 10]), each_group(a.double(), b.double(), [30, 10]), torch.bfloat16)
