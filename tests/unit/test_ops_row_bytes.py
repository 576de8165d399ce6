"""Rows as bytes: what is decoded are the numbers of the codes, whatever the size."""

from __future__ import annotations

import pytest
import torch

from moe_engine.ops.fp8 import dequantize, quantize
from moe_engine.ops.row_bytes import codes_of, encode, row_bytes


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 128), (1, 128), (1, 5), (3, 7), (5, 300), (129, 64)])
def test_what_is_decoded_are_the_numbers_of_the_codes(
    shape: tuple[int, int], dtype: torch.dtype, gradient: bool
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) * (1e-9 if gradient else 1)
    messages = encode(x, gradient)
    assert messages.shape == (shape[0], row_bytes(shape[1])) and messages.dtype == torch.uint8
    got = dequantize(codes_of(messages, shape[1]), dtype)
    assert got.dtype == dtype and torch.equal(got, dequantize(quantize(x.float(), gradient), dtype))
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1))
    assert torch.equal(dequantize(codes_of(messages[order], shape[1]), dtype), got[order])


def test_bytes_of_a_row_of_deepseek_v3() -> None:
    assert row_bytes(7168) == 7168 + 56 * 4 == 7392
    assert row_bytes(5) == 8 + 4
