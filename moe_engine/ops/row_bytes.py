"""Rows of numbers as bytes for the wire: fp8 codes followed by their scales.

A row of D numbers takes D bytes and 4 for every 128 of them: 7392 for D = 7168, against 14336 in bf16. The
scales are powers of two, so bf16 holds the decoded numbers exactly, and quantising them again for a matrix product
gives the same numbers.

Gloo refuses tensors of fp8, so the message is bytes; a row's codes are filled up to whole numbers of 4 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.ops.fp8 import Codes, quantize
from moe_kernels.fp8_format import BLOCK, CODE


def row_bytes(dim: int) -> int:
    """Bytes of one row of `dim` numbers in fp8."""
    return _code_bytes(dim) + 4 * -(-dim // BLOCK)


def encode(x: Tensor, gradient: bool = False) -> Tensor:
    """x [R, D] -> messages [R, row_bytes(D)] uint8; `gradient` as in `ops.fp8.quantize`. Without autograd."""
    coded = quantize(x.detach() if x.dtype != torch.float64 else x.detach().float(), gradient)
    rows, dim = x.shape
    out = torch.empty(rows, row_bytes(dim), dtype=torch.uint8, device=x.device)
    out[:, :dim] = coded.codes.view(torch.uint8)
    out[:, dim : _code_bytes(dim)] = 0
    out[:, _code_bytes(dim) :] = _packed(coded.scale.T).view(torch.uint8)
    return out


def codes_of(messages: Tensor, dim: int) -> Codes:
    """The codes [R, D] and scales in messages [R, row_bytes(D)]; on a CPU the codes stay where they are."""
    codes = messages[:, :dim].view(CODE)
    if codes.device.type != "cpu":
        codes = codes.contiguous()  # as kernels read them
    scale = _packed(messages[:, _code_bytes(dim) :]).view(torch.float32)
    return Codes(codes, scale.T.contiguous())


def _packed(x: Tensor) -> Tensor:
    """A true copy: of a single row or column `contiguous` keeps strides and start that no view of other size allows."""
    return x.clone(memory_format=torch.contiguous_format)


def _code_bytes(dim: int) -> int:
    return -(-dim // 4) * 4
