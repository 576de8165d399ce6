"""What holds for the launch of every kernel: addresses beyond 32 bits, and group sizes that stay on the device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import interpreted
from measures import assert_same_bits, calc_diff, randn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver
from triton.runtime.interpreter import GridExecutor

import moe_kernels
from moe_kernels.fp8_format import CODE

gemm, gemm_fp8, permute = interpreted("grouped_gemm"), interpreted("grouped_gemm_fp8"), interpreted("permute")
wgrad, wgrad_fp8, quantize = interpreted("grouped_wgrad"), interpreted("grouped_wgrad_fp8"), interpreted("quantize")
DIM = 1024
ROWS = 2**21 + 3  # times DIM: above 2^31
LAST = torch.tensor([ROWS - 1, 1, ROWS - 2])


@pytest.fixture
def sparse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tensor]]:
    """Large tensors of zeros in files of holes: what is not written takes no memory."""
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)  # (copies every argument onto itself)
    made = 0

    def make(*shape: int, dtype: torch.dtype) -> Tensor:
        nonlocal made
        made += 1
        path, size = tmp_path / f"zeros{made}", torch.Size(shape).numel() * dtype.itemsize
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8).view(dtype).view(shape)

    yield make
    for path in tmp_path.glob("zeros*"):
        path.unlink()


def test_rows_beyond_32_bits_are_found(sparse: Callable[..., Tensor]) -> None:
    x, few = sparse(ROWS, DIM, dtype=torch.bfloat16), randn(3, DIM)
    x[LAST] = few
    assert_same_bits([permute.permute(x, LAST)], [few])
    assert_same_bits(
        [permute.unpermute(x, torch.stack([LAST, LAST.flip(0)], 1))], [(few.float() + few.flip(0).float()).bfloat16()]
    )
    b, counts = randn(1, DIM, 72, seed=1), torch.tensor([3])
    expected = moe_kernels.grouped_gemm(few, b, [3])
    assert calc_diff(gemm.grouped_gemm(x, b, counts, LAST), expected) < 1e-6


def test_codes_beyond_32_bits_are_found(sparse: Callable[..., Tensor]) -> None:
    codes, scale = sparse(ROWS, DIM, dtype=CODE), sparse(DIM // 128, ROWS, dtype=torch.float32)
    few, few_scale = moe_kernels.quantize_rows(randn(3, DIM))
    codes.view(torch.uint8)[LAST], scale[:, LAST] = few.view(torch.uint8), few_scale
    assert_same_bits(permute.permute_fp8(codes, scale, LAST), (few, few_scale))
    b, _, b_scale = moe_kernels.quantize_blocks(randn(1, 72, DIM, seed=1))
    result = gemm_fp8.grouped_gemm_fp8(codes, scale, b, b_scale, torch.tensor([3]), LAST, torch.float32)
    expected = moe_kernels.grouped_gemm_fp8(few, few_scale, b, b_scale, [3], dtype=torch.float32)
    assert calc_diff(result, expected) < 1e-6


class NothingRead(TorchDispatchMode):
    """Refuses what brings an integer to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = "_local_scalar_dense" in func.__name__ and not args[0].is_floating_point()
        assert not reads, "a launcher waits for the device"
        return func(*args, **(kwargs or {}))


def launches() -> list[Callable[[], Any]]:
    """One of each kernel that takes group sizes."""
    counts, x, d = torch.tensor([5, 0, 9]), randn(16, 128), randn(16, 136, seed=1)
    w = randn(3, 136, 128, seed=2)
    a, (b, _, b_scale) = moe_kernels.quantize_rows(x), moe_kernels.quantize_blocks(w)
    columns = moe_kernels.quantize_columns(x, counts)
    return [
        lambda: gemm.grouped_gemm(x, w.transpose(1, 2), counts),
        lambda: gemm_fp8.grouped_gemm_fp8(*a, b, b_scale, counts),
        lambda: wgrad.grouped_wgrad(d, x, counts),
        lambda: wgrad_fp8.grouped_wgrad_fp8(*columns, *columns, counts),
        lambda: quantize.quantize_columns(x, counts),
        lambda: quantize.quantize_rows_and_columns(x, counts),
    ]


def test_no_launcher_reads_the_group_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids come from numbers that the host knows: the rows and the number of groups."""
    counts, x = torch.tensor([5, 0, 9]), randn(16, 128)
    given = launches()

    def refuse(_: Tensor) -> Any:
        raise AssertionError("a launcher reads a tensor")

    monkeypatch.setattr(Tensor, "tolist", refuse)
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: None)
    for launch in given:
        with NothingRead():
            launch()
    with pytest.raises(AssertionError, match="reads a tensor"), NothingRead():
        moe_kernels.quantize_columns(x, counts)  # the reference does


def test_launches_ask_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Triton's nor CUDA's, on a machine that has them."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a driver is asked")

    monkeypatch.setattr(type(driver), "active", property(refuse))
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    for launch in launches():
        launch()


@pytest.mark.slow
def test_importing_the_kernels_asks_no_driver() -> None:
    program = """
import importlib, torch, triton
def refuse(*_):
    raise AssertionError("a driver is asked")
type(triton.runtime.driver).active = property(refuse)
torch.cuda._lazy_init = refuse
from moe_kernels import aot
assert len([importlib.import_module(f"moe_kernels.device.{name}") for name in aot.MODULES]) == len(aot.MODULES)
assert len(aot.variants()) > 50
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)
