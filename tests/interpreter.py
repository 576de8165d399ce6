"""Triton's interpreter, repaired, for running device kernels on CPU tensors.

Up to 3.9 the interpreter is silently wrong in three places: fp32 to fp8 mis-rounds, fp32 to bf16 truncates, and a bf16
`tl.dot` multiplies the raw 16-bit codes. Conversions and products are replaced here by torch's. Import this module
before anything imports Triton.
"""

from __future__ import annotations

import importlib
import os
import types
from typing import Any

import numpy as np
import torch

_TORCH = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _tensor(data: np.ndarray, dtype: Any) -> torch.Tensor:
    """The interpreter's array as the torch tensor whose bits it holds."""
    want = _TORCH[dtype.name]
    bits = torch.from_numpy(np.ascontiguousarray(data).view(f"i{data.itemsize}" if data.itemsize > 1 else "u1").copy())
    return bits.view(_CARRIER[data.itemsize]).view(want)


def _convert_float(data: np.ndarray, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> np.ndarray:
    out = _tensor(data, input_dtype).to(_TORCH[output_dtype.name])
    return out.view(_CARRIER[out.element_size()]).numpy().view(f"u{out.element_size()}").reshape(data.shape)


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    wide = torch.float64 if d.dtype.scalar.name == "fp64" else torch.float32
    product = torch.matmul(_tensor(a.data, a.dtype.scalar).to(wide), _tensor(b.data, b.dtype.scalar).to(wide))
    return TensorHandle(product.numpy().astype(d.data.dtype) + d.data, d.dtype.scalar)


def _import_all() -> None:
    """Import the device kernels so that they run in the repaired interpreter in this process."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, those of Triton's own library included
    try:
        import triton.experimental.gluon  # (the launcher imports it late)
        import triton.language
        import triton.runtime.interpreter as interpreter

        if not isinstance(triton.language.sum, interpreter.InterpretedFunction):
            raise ImportError("Triton was imported before tests/interpreter.py: its own kernels are not interpreted")
        interpreter._convert_float = _convert_float
        interpreter.InterpreterBuilder.create_dot = _create_dot
        importlib.import_module("moe_kernels.device")
        importlib.import_module("moe_kernels.device.tails")  # (imported late, by a form that does not run here)
        importlib.import_module("moe_kernels.nvshmem.exchange")
    finally:
        del os.environ["TRITON_INTERPRET"]


_import_all()


def interpreted(name: str) -> types.ModuleType:
    """A module of `moe_kernels.device` whose kernels run in the interpreter."""
    return importlib.import_module(f"moe_kernels.device.{name}")
