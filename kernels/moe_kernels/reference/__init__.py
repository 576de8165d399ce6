"""Every op in plain torch: the specification, the CPU path and the oracle of the tests."""

from moe_kernels.reference.bias import add_bias, add_bias_backward
from moe_kernels.reference.fp8 import (
    grouped_gemm_fp8,
    grouped_wgrad_fp8,
    permute_fp8,
    swiglu_backward_fp8,
    swiglu_backward_recompute,
    swiglu_fp8,
    unpermute_fp8,
)
from moe_kernels.reference.quantize import (
    dequantize_blocks,
    dequantize_columns,
    dequantize_rows,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    quantize_rows_and_columns,
)
from moe_kernels.reference.route import route
from moe_kernels.reference.wide import (
    gemm,
    grouped_gemm,
    grouped_wgrad,
    matmul_dtype,
    permute,
    swiglu,
    swiglu_backward,
    unpermute,
    wgrad,
)

__all__ = [
    "add_bias",
    "add_bias_backward",
    "dequantize_blocks",
    "dequantize_columns",
    "dequantize_rows",
    "gemm",
    "grouped_gemm",
    "grouped_gemm_fp8",
    "grouped_wgrad",
    "grouped_wgrad_fp8",
    "matmul_dtype",
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
    "wgrad",
]
