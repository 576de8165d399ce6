"""Block-scaled fp8 as the engine uses it: rows of numbers as E4M3 codes with a scale for each 128 of them.

DeepSeek-V3 (arXiv 2412.19437, section 3.3); the format is `moe_kernels.fp8_format`. Codes and scales are the same
on CPUs and GPUs for the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels import dequantize_rows, quantize_rows
from moe_kernels.fp8_format import FORWARD_AMAX, GRADIENT_AMAX


@dataclass(frozen=True)
class Codes:
    """Rows in fp8: codes [R, D] in E4M3, scale [ceil(D/128), R] fp32; a number is its code times its tile's scale."""

    codes: Tensor
    scale: Tensor


def quantize(x: Tensor, gradient: bool = False, power_of_two: bool = True) -> Codes:
    """x [R, D] bf16 or fp32 in fp8 by tiles of 1x128; without autograd.

    gradient: x is one: its tiles may be as small as 2^-100, where a forward tile below 1e-4 loses bits. Numbers that
    came from codes with power-of-two scales give the same numbers again.
    """
    return Codes(*quantize_rows(x, GRADIENT_AMAX if gradient else FORWARD_AMAX, power_of_two))


def dequantize(x: Codes, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The numbers [R, D] that codes stand for: exact in bf16 if the scales are powers of two."""
    return dequantize_rows(x.codes, x.scale).to(dtype)
