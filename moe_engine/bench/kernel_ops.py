"""What `bench kernels` measures: for each op its candidates, what they should give, and what a call costs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import moe_kernels
from moe_kernels.fp8_format import GRADIENT_AMAX

Candidates = dict[str, Callable[[], Tensor]]
OURS = "moe_kernels"


@dataclass(frozen=True)
class Shape:
    """Rows of `groups` groups, each times its own [depth, columns]."""

    text: str
    groups: int
    rows: int  # of all groups
    columns: int
    depth: int
    counts: Tensor  # int32 on the device

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.depth


@dataclass(frozen=True)
class Operands:
    """bf16 rows, weights and output gradients, and the exact group sizes."""

    shape: Shape
    x: Tensor  # [rows, depth]
    w: Tensor  # [groups, columns, depth]
    d: Tensor  # [rows, columns]


def _fprop_bf16(o: Operands) -> Candidates:
    return _product_bf16(o, o.x, o.w.transpose(1, 2))


def _dgrad_bf16(o: Operands) -> Candidates:
    return _product_bf16(o, o.d, o.w)


def _product_bf16(o: Operands, a: Tensor, b: Tensor) -> Candidates:
    ends = o.shape.counts.cumsum(0).to(torch.int32)
    return {
        **_forms(a, lambda hopper: moe_kernels.grouped_gemm(a, b, o.shape.counts, hopper=hopper)),
        "torch_grouped_mm": lambda: F.grouped_mm(a, b, offs=ends),
    }


def _forms(like: Tensor, product: Callable[[bool], Tensor]) -> Candidates:
    """Our product, and on a GPU also its Hopper form (the same where that is not used)."""
    found: Candidates = {OURS: lambda: product(False)}
    if like.device.type == "cuda":
        found[f"{OURS}_hopper"] = lambda: product(True)
    return found


def _fprop_fp8(o: Operands) -> Candidates:
    codes, _, scale = moe_kernels.quantize_blocks(o.w)
    return _product_fp8(o, o.x, codes, scale, o.w)


def _dgrad_fp8(o: Operands) -> Candidates:
    _, codes, scale = moe_kernels.quantize_blocks(o.w)
    return _product_fp8(o, o.d, codes, scale.transpose(1, 2).contiguous(), o.w.transpose(1, 2))


def _product_fp8(o: Operands, a: Tensor, b: Tensor, b_scale: Tensor, wide: Tensor) -> Candidates:
    a_codes, a_scale = moe_kernels.quantize_rows(a, GRADIENT_AMAX)
    counts = o.shape.counts
    found = _forms(a, lambda hopper: moe_kernels.grouped_gemm_fp8(a_codes, a_scale, b, b_scale, counts, hopper=hopper))
    if a.device.type != "cuda":
        return found
    row_scale = a.float().abs().amax(1) / 448  # torch scales whole rows
    column_scale = wide.float().abs().amax(2) / 448
    a_rows = (a.float() / row_scale[:, None]).to(torch.float8_e4m3fn)
    b_rows = (wide.float() / column_scale[:, :, None]).to(torch.float8_e4m3fn).transpose(1, 2)
    ends = counts.cumsum(0).to(torch.int32)
    found["torch_scaled_grouped_mm"] = lambda: torch._scaled_grouped_mm(
        a_rows, b_rows, row_scale, column_scale, ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    if importlib.util.find_spec("deep_gemm"):
        deep_gemm: Any = importlib.import_module("deep_gemm")
        out = a.new_empty(a.shape[0], b.shape[1])
        groups = torch.arange(o.shape.groups, device=a.device, dtype=torch.int32).repeat_interleave(counts)
        operands = (a_codes, a_scale.T.contiguous()), (b, b_scale)

        def call() -> Tensor:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*operands, out, groups)
            return out

        found["deep_gemm"] = call
    return found


def _wgrad_bf16(o: Operands) -> Candidates:
    ends = o.shape.counts.cumsum(0).to(torch.int32)
    return {
        **_forms(o.x, lambda hopper: moe_kernels.grouped_wgrad(o.d, o.x, o.shape.counts, hopper=hopper)),
        "torch_grouped_mm": lambda: F.grouped_mm(o.d.T, o.x, offs=ends),
    }


def _wgrad_fp8(o: Operands) -> Candidates:
    d, x = (moe_kernels.quantize_columns(each, o.shape.counts, GRADIENT_AMAX) for each in (o.d, o.x))
    return _forms(o.x, lambda hopper: moe_kernels.grouped_wgrad_fp8(*d, *x, o.shape.counts, hopper=hopper))


def _quantize_rows(o: Operands) -> Candidates:
    return {OURS: lambda: moe_kernels.quantize_rows(o.x)[0]}


def _quantize_both(o: Operands) -> Candidates:
    return {OURS: lambda: moe_kernels.quantize_rows_and_columns(o.x, o.shape.counts)[0]}


def _swiglu_fp8(o: Operands) -> Candidates:
    weight = torch.ones(o.shape.rows, device=o.d.device)
    return {OURS: lambda: moe_kernels.swiglu_fp8(o.d, weight)[0]}


def _exact_product(a: Tensor, b: Tensor, o: Operands) -> Tensor:
    return moe_kernels.reference.grouped_gemm(a.float(), b.float(), o.shape.counts)


def _exact_wgrad(o: Operands) -> Tensor:
    return moe_kernels.reference.grouped_wgrad(o.d.float(), o.x.float(), o.shape.counts)


@dataclass(frozen=True)
class Op:
    """How to call an op, what it should give, and its cost: FLOPs as a product, or bytes read and written."""

    candidates: Callable[[Operands], Candidates]
    exact: Callable[[Operands], Tensor]
    ceiling: str  # bf16 | fp8 (matrix products) | copy
    bytes_moved: Callable[[Shape], float] | None = None


def _codes(x: Tensor) -> Tensor:
    return x.float()


OPS = {
    "fprop_bf16": Op(_fprop_bf16, lambda o: _exact_product(o.x, o.w.transpose(1, 2), o), "bf16"),
    "dgrad_bf16": Op(_dgrad_bf16, lambda o: _exact_product(o.d, o.w, o), "bf16"),
    "wgrad_bf16": Op(_wgrad_bf16, _exact_wgrad, "bf16"),
    "fprop_fp8": Op(_fprop_fp8, lambda o: _exact_product(o.x, o.w.transpose(1, 2), o), "fp8"),
    "dgrad_fp8": Op(_dgrad_fp8, lambda o: _exact_product(o.d, o.w, o), "fp8"),
    "wgrad_fp8": Op(_wgrad_fp8, _exact_wgrad, "fp8"),
    "quantize_rows": Op(
        _quantize_rows,
        lambda o: _codes(moe_kernels.reference.quantize_rows(o.x)[0]),
        "copy",
        lambda s: s.rows * s.depth * (3 + 4 / 128),
    ),
    "quantize_rows_and_columns": Op(
        _quantize_both,
        lambda o: _codes(moe_kernels.reference.quantize_rows(o.x)[0]),
        "copy",
        lambda s: s.rows * s.depth * (4 + 8 / 128),
    ),
    "swiglu_fp8": Op(
        _swiglu_fp8,
        lambda o: _codes(moe_kernels.reference.swiglu_fp8(o.d)[0]),
        "copy",
        lambda s: s.rows * s.columns * (2 + 0.5 + 2 / 128),
    ),
}
