"""Rotary embedding of the ends of vectors against pairs as complex numbers, and its gradient."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_engine.ops import rotary
from moe_engine.ops.rotary import rotate_end


class Counted(TorchDispatchMode):
    """Counts the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def inputs(n: int, rope: int, dtype: torch.dtype = torch.float64, heads: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(n)
    x = torch.randn(2, 7, heads, n, generator=chance, dtype=torch.float64).to(dtype)
    angle = torch.randn(2, 7, 1, rope // 2, generator=chance, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    return x, angle.cos().to(wide), angle.sin().to(wide)


def by_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    kept, end = x.split((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), dim=-1)
    pairs = end.unflatten(-1, (-1, 2)) if interleaved else torch.stack(end.chunk(2, dim=-1), dim=-1)
    a, b = pairs.unbind(-1)
    new = a * cos - b * sin, a * sin + b * cos
    return torch.cat((kept, torch.stack(new, dim=-1).flatten(-2) if interleaved else torch.cat(new, dim=-1)), dim=-1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("n", "rope"), [(8, 8), (12, 8), (20, 4), (6, 2)])
@pytest.mark.parametrize("block", [1, 30, 1 << 17])
def test_value_and_gradient(interleaved: bool, n: int, rope: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "CPU_BLOCK_ELEMENTS", block)
    x, cos, sin = inputs(n, rope)
    d_out = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    leaf = x.clone().requires_grad_()
    expected = by_pairs(leaf, cos, sin, interleaved)
    (right,) = torch.autograd.grad(expected, leaf, d_out)
    found = rotate_end(leaf, cos, sin, interleaved)
    (gradient,) = torch.autograd.grad(found, leaf, d_out)
    assert torch.equal(found, expected) and torch.equal(gradient, right)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("width", [7, 8])
def test_pairs_at_odd_places(width: int, interleaved: bool) -> None:
    """Heads of an odd size, and pairs that begin at an odd place of wider vectors: parts of a latent's projection."""
    x, cos, sin = inputs(width, 4)
    part = x[..., :7]
    assert torch.equal(rotate_end(part, cos, sin, interleaved), by_pairs(part.clone(), cos, sin, interleaved))


@pytest.mark.parametrize("interleaved", [True, False])
def test_sixteen_bit_vectors_are_rounded_once(interleaved: bool) -> None:
    x, cos, sin = inputs(12, 8, torch.bfloat16)
    found = rotate_end(x, cos, sin, interleaved)
    assert found.dtype == x.dtype and torch.equal(found, by_pairs(x.float(), cos, sin, interleaved).bfloat16())


@pytest.mark.parametrize("heads", [1, 3])
def test_a_row_has_the_same_bits_alone_and_among_others(heads: int) -> None:
    x, cos, sin = inputs(10, 6, torch.float32, heads)
    whole = rotate_end(x, cos, sin, True)
    for b in range(2):
        for t in range(7):
            part = slice(b, b + 1), slice(t, t + 1)
            assert torch.equal(rotate_end(x[part], cos[part], sin[part], True), whole[part])


def test_no_tokens() -> None:
    x, cos, sin = inputs(8, 8)
    assert rotate_end(x[:, :0], cos[:, :0], sin[:, :0], True).shape == (2, 0, 3, 8)


def test_a_device_turns_its_vectors_in_few_large_blocks() -> None:
    """A CPU's cache wants small ones; each one more starts all kernels anew."""
    x, angle = torch.empty(1, 4096, 8, 64, device="meta"), torch.empty(1, 4096, 1, 32, device="meta")
    with Counted() as counted:
        rotate_end(x, angle, angle, True)
    assert counted.calls[torch.ops.aten.view_as_complex.default] == 1
