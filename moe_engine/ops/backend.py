"""Whose kernels compute the routed experts, where somebody wants to say: `backend=` of the layer.

A backend is a set of functions with the names and arguments of `moe_kernels`: the engine's choice by device (auto), its
reference in plain torch on any device, its Triton kernels, or the grouped products of MegaBlocks. What a backend
cannot do is refused by name, at once where that can be seen, else in the first forward: a model may move to a GPU
after it was made.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import moe_kernels
from moe_engine.config.errors import ConfigError
from moe_kernels import reference

BACKENDS = ("auto", "torch", "triton", "megablocks")
_NEEDS = {"triton": "triton", "megablocks": "megablocks"}  # the module to look for


def check_backend(name: str, plain: bool, precision: str | None) -> None:
    """Raises ConfigError for a backend that there is not, that is not installed, or that cannot do what is asked.

    plain: whether the experts are SwiGLU without biases.
    """
    if name not in BACKENDS:
        raise ConfigError(f"backend={name}: no such choice; there are {', '.join(BACKENDS)}")
    if name == "auto":
        return
    problems = []
    module = _NEEDS.get(name)
    if module and importlib.util.find_spec(module) is None:
        problems.append(f"backend={name}: {module} is not installed; install it, or use backend=auto")
    if name == "megablocks" and not torch.cuda.is_available():
        problems.append("backend=megablocks: its kernels need CUDA, and there is none; use backend=auto")
    if not plain:
        problems.append(f"backend={name}: has SwiGLU experts without biases alone; use backend=auto for others")
    if precision == "fp8":
        problems.append(f"backend={name}: does not compute in precision=fp8; use backend=auto")
    if problems:
        raise ConfigError("\n".join(problems))


def kernels_of(name: str, x: Tensor, dtype: torch.dtype) -> Any:
    """The functions of a backend for rows like x and products in `dtype`; raises ConfigError where it has none."""
    if name == "auto":
        return moe_kernels
    if torch.compiler.is_compiling():
        raise ConfigError(f"backend={name}: a compiled graph has the ops of backend=auto; use that")
    if name == "torch":
        return reference
    if dtype.itemsize != 2 or (name == "megablocks" and dtype != torch.bfloat16):
        formats = "bf16" if name == "megablocks" else "bf16 or fp16"
        raise ConfigError(
            f"backend={name}: multiplies in {formats}, and the experts have {dtype}; "
            "use precision=bf16 or dtype=torch.bfloat16, or backend=auto"
        )
    if name == "triton" and moe_kernels.interprets():
        return moe_kernels.device_ops()
    if x.device.type != "cuda":
        raise ConfigError(f"backend={name}: x is on {x.device.type}, its kernels need a GPU; use backend=auto")
    return MegaBlocks() if name == "megablocks" else moe_kernels


class MegaBlocks:
    """MegaBlocks' grouped products between the engine's moves and activation. For its 0.10; not run on a GPU yet."""

    permute, unpermute = staticmethod(moe_kernels.permute), staticmethod(moe_kernels.unpermute)
    swiglu, swiglu_backward = staticmethod(moe_kernels.swiglu), staticmethod(moe_kernels.swiglu_backward)

    def __init__(self) -> None:
        backend = importlib.import_module("megablocks.grouped_gemm_util").backend
        if backend is None:
            raise ConfigError("backend=megablocks: needs grouped_gemm beside it; install it, or use backend=auto")
        self.gmm = backend.gmm

    def grouped_gemm(self, a: Tensor, b: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
        """See `moe_kernels.grouped_gemm`. Theirs wants the group sizes on the host, and whole matrices."""
        turned = b.stride(1) == 1
        matrices = (b.transpose(1, 2) if turned else b).contiguous()
        out: Tensor = self.gmm(a.contiguous(), matrices, _on_host(counts), trans_a=False, trans_b=turned)
        return out

    def grouped_wgrad(self, d_out: Tensor, a: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
        """See `moe_kernels.grouped_wgrad`; in the operands' format."""
        out: Tensor = self.gmm(d_out.contiguous(), a.contiguous(), _on_host(counts), trans_a=True, trans_b=False)
        return out


def _on_host(counts: Sequence[int] | Tensor) -> Tensor:
    return torch.as_tensor(counts, dtype=torch.int64).cpu()
