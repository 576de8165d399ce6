"""MXFP4, the form in which gpt-oss's experts are published: numbers of four bits with an exponent for each 32.

A number is a sign, two bits of exponent and one of mantissa, two of them a byte, the first in the low half; a block's
exponent is a byte with a bias of 127 (OCP Microscaling Formats specification 1.0, sections 5.2 and 6.3). All of it is
exact in bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32  # numbers that share an exponent
BLOCKS, SCALES = "_blocks", "_scales"  # how the two tensors of a matrix are called
_EXPONENT_BIAS = 127


def unpack(blocks: Tensor, exponents: Tensor) -> Tensor:
    """blocks [R, C/32, 16] and exponents [R, C/32], bytes -> bf16 [R, C]."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).int()  # [R, C/32, 32]
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = sizes[codes & 7] * (1 - (codes >> 3) * 2)
    return torch.ldexp(values, exponents[..., None].int() - _EXPONENT_BIAS).flatten(1).bfloat16()
