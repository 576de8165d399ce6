"""Kernels of Mixture-of-Experts layers: grouped matrix products, permutation, SwiGLU, block-scaled fp8.

A library of its own: it knows torch (and Triton where there is a GPU), nothing of the engine. Each op has a
reference of the same name and signature in `reference`, plain torch, which is its specification, the CPU path
and the oracle of the tests; the ops that `device` names have a Triton kernel there. This file is the only place that
picks an implementation, by the device of the tensors. No op records into autograd: `moe_engine.ops` does that.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from moe_kernels import custom, fp8_format, reference
from moe_kernels.reference import gemm, matmul_dtype, wgrad
from moe_kernels.reference.wide import DIM_MULTIPLE, product_rows

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _device_ops() -> Any:
    """`moe_kernels.device`, or None where Triton is not installed."""
    return importlib.import_module("moe_kernels.device") if importlib.util.find_spec("triton") else None


def device_ops() -> Any:
    """The Triton kernels' launchers, whatever device the tensors are on; needs Triton."""
    return importlib.import_module("moe_kernels.device")


def interprets() -> bool:
    """Whether Triton's kernels run in its interpreter and so on a CPU: TRITON_INTERPRET=1 when it was loaded."""
    if _device_ops() is None:
        return False
    kernel = importlib.import_module("moe_kernels.device.permute")._permute_kernel
    return isinstance(kernel, importlib.import_module("triton.runtime.interpreter").InterpretedFunction)


def _by_device(op: Callable[P, R], widest: int = 4) -> Callable[P, R]:
    """`op` of `reference`; for tensors on a CUDA device its namesake in `device`; as a custom op while compiling.

    Of tensors without data (on the device `meta`) the custom op's fake implementation gives the results.

    widest: the most bytes of a number that the device's kernel takes; the reference computes wider ones there too.
    """

    @functools.wraps(op)
    def pick(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        if torch.compiler.is_compiling() or first.is_meta:
            return cast(R, custom.call(op.__name__, *args, **kwargs))
        if first.device.type == "cuda" and first.element_size() <= widest and _device_ops() is not None:
            with torch.cuda.device_of(first):
                return cast(R, getattr(_device_ops(), op.__name__)(*args, **kwargs))
        return op(*args, **kwargs)

    return pick


add_bias = _by_device(reference.add_bias)
add_bias_backward = _by_device(reference.add_bias_backward)
grouped_gemm = _by_device(reference.grouped_gemm, widest=2)
grouped_gemm_fp8 = _by_device(reference.grouped_gemm_fp8)
grouped_wgrad = _by_device(reference.grouped_wgrad, widest=2)
grouped_wgrad_fp8 = _by_device(reference.grouped_wgrad_fp8)
permute = _by_device(reference.permute)
permute_fp8 = _by_device(reference.permute_fp8)
quantize_blocks = _by_device(reference.quantize_blocks)
quantize_columns = _by_device(reference.quantize_columns)
quantize_rows = _by_device(reference.quantize_rows)
quantize_rows_and_columns = _by_device(reference.quantize_rows_and_columns)
route = _by_device(reference.route)
swiglu = _by_device(reference.swiglu)
swiglu_backward = _by_device(reference.swiglu_backward)
swiglu_backward_fp8 = _by_device(reference.swiglu_backward_fp8)
swiglu_backward_recompute = _by_device(reference.swiglu_backward_recompute)
swiglu_fp8 = _by_device(reference.swiglu_fp8)
unpermute = _by_device(reference.unpermute)
unpermute_fp8 = _by_device(reference.unpermute_fp8)
dequantize_blocks = reference.dequantize_blocks
dequantize_columns = reference.dequantize_columns
dequantize_rows = reference.dequantize_rows

__all__ = [
    "DIM_MULTIPLE",
    "add_bias",
    "add_bias_backward",
    "dequantize_blocks",
    "dequantize_columns",
    "dequantize_rows",
    "device_ops",
    "fp8_format",
    "gemm",
    "grouped_gemm",
    "grouped_gemm_fp8",
    "grouped_wgrad",
    "grouped_wgrad_fp8",
    "interprets",
    "matmul_dtype",
    "permute",
    "permute_fp8",
    "product_rows",
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

custom.register({name: op for name, op in globals().items() if name in __all__})
