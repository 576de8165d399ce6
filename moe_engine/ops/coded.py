"""Rows that stay in fp8 between the wire and the products, under autograd.

Rows come over the wire as codes, and products in fp8 multiply codes. To decode them between the two, only to make the
same codes again, would be two passes over all rows. So autograd's edge carries a stand-in of the rows' shape and dtype
that has no memory, and the codes go beside it: those of forward with the rows, those of a gradient in a
`CodedGradient`, which both ends of the edge know. A stand-in's numbers are NaN: whoever takes them for numbers is
found out at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moe_engine.ops.first_order import first_order
from moe_engine.ops.fp8 import Codes, dequantize


def stand_in(codes: Codes, dtype: torch.dtype) -> Tensor:
    """NaN of the shape of the codes [R, D], without memory."""
    return torch.full((), float("nan"), dtype=dtype, device=codes.codes.device).expand(codes.codes.shape)


class _Numbers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Codes) -> Tensor:
        return dequantize(codes, x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def numbers(x: Tensor, codes: Codes) -> Tensor:
    """The numbers [R, D] of codes that x stands for, in x's dtype, for an op that does not compute with codes."""
    out: Tensor = _Numbers.apply(x, codes)
    return out


class CodedGradient:
    """The way of one gradient from the exchange that brings it to the op that multiplies its codes.

    In forward the op says which rows it `made`, and the exchange that takes rows away which ones it `sent`: if they are
    the same, nothing that wants numbers comes between the two. In backward the exchange's gradient has `arrived`, and
    the op can `take` its codes.
    """

    def __init__(self) -> None:
        self._made: tuple[StorageWeakRef, torch.Size, torch.dtype] | None = None
        self._wanted = False
        self._codes: Codes | None = None
        self._stand_in: Tensor | None = None

    def made(self, rows: Tensor) -> None:
        """An op made these rows [R, D], and takes codes of their gradient."""
        self._made = StorageWeakRef(rows.untyped_storage()), rows.shape, rows.dtype

    def sent(self, rows: Tensor) -> None:
        """These rows go away; their gradient will come in fp8."""
        self._wanted = False
        if self._made is not None:
            storage, *like = self._made
            same = not storage.expired() and storage.cdata == rows.untyped_storage()._cdata
            self._wanted = same and like == [rows.shape, rows.dtype]

    def arrived(self, codes: Codes, dtype: torch.dtype) -> Tensor:
        """What autograd is to be given as the gradient: a stand-in for an op that takes codes, otherwise numbers."""
        if not self._wanted:
            return dequantize(codes, dtype)
        self._codes, self._stand_in = codes, stand_in(codes, dtype)
        return self._stand_in

    def take(self, gradient: Tensor) -> Codes | None:
        """The codes, if this gradient stands for them."""
        codes, expected = self._codes, self._stand_in
        if codes is None or expected is None or expected.untyped_storage()._cdata != gradient.untyped_storage()._cdata:
            return None
        self._codes = self._stand_in = None
        return codes
