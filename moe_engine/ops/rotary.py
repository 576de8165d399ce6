"""Rotary embedding of the end (or start) of each vector: pairs of numbers turned by given angles (arXiv 2104.09864).

Turning a pair (a, b) gives (a cos - b sin, b cos + a sin): the pair times cos, plus the pair turned by a right angle
times sin. So no number is taken out of its place: every pass is over contiguous memory, in blocks that stay in a CPU's
cache (elsewhere in few large ones, each of which starts its kernels anew), and the rest of the vector is only copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.ops.first_order import first_order

CPU_BLOCK_ELEMENTS = 1 << 17
BLOCK_ELEMENTS = 1 << 24  # on a device: bounds the memory of a pass, 64 MB in fp32


@dataclass(frozen=True)
class Turn:
    """The turning of wide vectors in place, a row at a time. factors [B, S, 1, rope/2]: cos + i sin of each pair."""

    factors: Tensor
    interleaved: bool

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor, interleaved: bool) -> Turn:
        """cos, sin [B, S, 1, rope/2], in fp32 (fp64)."""
        return cls(torch.complex(cos, sin), interleaved)

    @property
    def back(self) -> Turn:
        return Turn(self.factors.conj().resolve_conj(), self.interleaved)

    def end(self, x: Tensor, row: int) -> Tensor:
        """Turn the last `rope` numbers of x [heads, S, group, n], which are of row `row`: these, a view."""
        return self._turn(x, self.factors[row])

    def ends(self, x: Tensor) -> None:
        """Turn the last `rope` numbers of every vector in x [B, S, heads, n], which nobody else reads: autograd does
        not see it."""
        self._turn(x.data, self.factors)

    def _turn(self, x: Tensor, factors: Tensor) -> Tensor:
        """One pass. Pairs of a vector are the innermost loop, so its bits do not depend on what is beside it."""
        end = x[..., x.shape[-1] - 2 * factors.shape[-1] :]
        if self.interleaved:
            even = _even(end)
            torch.view_as_complex(even.unflatten(-1, (-1, 2))).mul_(factors)
            if even is not end:
                end.copy_(even)
        else:
            first, second = end.chunk(2, dim=-1)
            turned = torch.complex(first, second).mul_(factors)
            first.copy_(turned.real)
            second.copy_(turned.imag)
        return end


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, start: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.start = interleaved, start
        return _turned(x, cos, sin, interleaved, start)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, -sin, ctx.interleaved, ctx.start), None, None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, start: bool) -> Tensor:
    cos, sin = (_for_each(angle, interleaved) for angle in (cos, sin))
    (heads, n), rope = x.shape[-2:], cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, turned, cos, sin = x.flatten(0, -3), out.view(-1, heads, n), cos.flatten(0, -3), sin.flatten(0, -3)
    turns, rest = (slice(rope), slice(rope, n)) if start else (slice(n - rope, n), slice(n - rope))
    if n > rope:
        turned[..., rest] = rows[..., rest]
    elements = CPU_BLOCK_ELEMENTS if x.device.type == "cpu" else BLOCK_ELEMENTS
    step = max(1, elements // max(1, heads * rope))
    for first in range(0, rows.shape[0], step):
        part = slice(first, first + step)
        pairs = rows[part, :, turns].to(cos.dtype, memory_format=torch.contiguous_format)
        turned[part, :, turns] = (pairs * cos[part]).add_(_quarter(pairs, interleaved).mul_(sin[part]))
    return out


def _for_each(angle: Tensor, interleaved: bool) -> Tensor:
    """An angle for each number from one for each pair."""
    return angle.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angle, angle), dim=-1)


def _quarter(x: Tensor, interleaved: bool) -> Tensor:
    """Pairs (a, b) turned by a right angle: (-b, a)."""
    if not interleaved:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)
    # Times i, in which no number is rounded; torch has no other fast way to exchange neighbours.
    return torch.view_as_real(torch.view_as_complex(_even(x).unflatten(-1, (-1, 2))) * 1j).flatten(-2)


def _even(x: Tensor) -> Tensor:
    """x, or a copy where heads of an odd size put its pairs at odd places: torch would not take these as complex."""
    *strides, _ = x.stride()
    odd = x.storage_offset() % 2 or any(stride % 2 for stride in strides)
    return x.clone(memory_format=torch.contiguous_format) if odd else x


def rotate_end(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The last `rope` numbers of every head turned, the others as they are: x [B, S, heads, n] -> the same, new.

    cos, sin [B, S, 1, rope/2] in fp32 (fp64), in which products are computed. Pairs are (2i, 2i+1) if interleaved,
    else (i, i + rope/2).
    """
    out: Tensor = _Rotate.apply(x, cos, sin, interleaved, False)
    return out


def rotate_start(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The first `rope` numbers of every head turned; otherwise as `rotate_end`."""
    out: Tensor = _Rotate.apply(x, cos, sin, interleaved, True)
    return out
