"""Triton kernels, one family of ops a file with its launcher beside it: needs Triton; imported on first use.

A launcher takes what its namesake in `reference` takes, with group sizes as a tensor that stays on the device.
"""

from moe_kernels.device.bias import add_bias, add_bias_backward
from moe_kernels.device.grouped_gemm import grouped_gemm
from moe_kernels.device.grouped_gemm_fp8 import grouped_gemm_fp8
from moe_kernels.device.grouped_wgrad import grouped_wgrad
from moe_kernels.device.grouped_wgrad_fp8 import grouped_wgrad_fp8
from moe_kernels.device.permute import permute, permute_fp8, unpermute, unpermute_fp8
from moe_kernels.device.quantize import quantize_blocks, quantize_columns, quantize_rows, quantize_rows_and_columns
from moe_kernels.device.route import route
from moe_kernels.device.swiglu import (
    swiglu,
    swiglu_backward,
    swiglu_backward_fp8,
    swiglu_backward_recompute,
    swiglu_fp8,
)

__all__ = [
    "add_bias",
    "add_bias_backward",
    "grouped_gemm",
    "grouped_gemm_fp8",
    "grouped_wgrad",
    "grouped_wgrad_fp8",
    "permute",
    "permute_fp8",
    "quantize_blocks",
    "quantize_columns",
    "quantize_rows",
    "quantize_rows_and_columns",
    "route",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_fp8",
    "swiglu_backward_recompute",
    "swiglu_fp8",
    "unpermute",
    "unpermute_fp8",
]
