"""Comparisons and operands that the kernel tests share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def calc_diff(a: Tensor, b: Tensor) -> float:
    """1 - 2<a,b> / (<a,a> + <b,b>) in float64: half the squared relative difference."""
    a, b = a.detach().double(), b.detach().double()
    denominator = (a.square().sum() + b.square().sum()).item()
    return 1 - 2 * (a * b).sum().item() / denominator if denominator else 0.0


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits (also of NaN, and of fp8, which torch cannot compare)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_same_bits(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert [same_bits(a, b) for a, b in zip(results, expected, strict=True)] == [True] * len(expected)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_tail(counts: Sequence[int], dim: int, seed: int = 0) -> Tensor:
    """Rows of groups, and 5 rows of NaN after the last group."""
    x = randn(sum(counts) + 5, dim, seed=seed)
    x[-5:] = float("nan")
    return x


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, here and in the ranks forked here."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(8).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
