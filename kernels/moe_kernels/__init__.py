"""Kernels of Mixture-of-Experts layers: grouped matrix products, permutation, SwiGLU.

A library of its own: it knows torch (and Triton where there is a GPU), nothing of the engine. Each op has a
reference of the same name and signature in `reference`, plain torch, which is its specification, the CPU path
and the oracle of the tests. This file is the only place that picks an implementation, by the device of the
tensors. No op records into autograd: `moe_engine.ops` does that.
"""

from moe_kernels.reference import (
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
    "gemm",
    "grouped_gemm",
    "grouped_wgrad",
    "matmul_dtype",
    "permute",
    "swiglu",
    "swiglu_backward",
    "unpermute",
    "wgrad",
]
