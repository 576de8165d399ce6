"""The ops as torch custom ops, so that a graph compiled by `torch.compile` holds each as one node.

In eager mode the public functions call an implementation directly; while a graph is traced they call
`torch.ops.moe_kernels.<name>`, whose fake implementation gives shapes and dtypes without data. Group sizes must then
be tensors. Importing this module registers the ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_kernels.fp8_format import BLOCK, CODE, blocks, padded_rows
from moe_kernels.reference import matmul_dtype

Outputs = Tensor | tuple[Tensor, ...]

_FLOOR = "float smallest_amax=1e-4, bool power_of_two=True"
_PRODUCT = "Tensor counts, Tensor? source=None"
_LAUNCH = "int? num_sms=None, bool hopper=False"
_SCHEMAS = {
    "add_bias": "(Tensor rows, Tensor weight, Tensor bias, Tensor counts) -> Tensor",
    "add_bias_backward": "(Tensor d_rows, Tensor weight, Tensor bias, Tensor counts) -> (Tensor, Tensor)",
    "grouped_gemm": f"(Tensor a, Tensor b, {_PRODUCT}, {_LAUNCH}) -> Tensor",
    "grouped_gemm_fp8": "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, "
    f"{_PRODUCT}, ScalarType dtype=bfloat16, {_LAUNCH}) -> Tensor",
    "grouped_wgrad": f"(Tensor d_out, Tensor a, Tensor counts, *, {_LAUNCH}) -> Tensor",
    "grouped_wgrad_fp8": "(Tensor d_out, Tensor d_out_scale, Tensor a, Tensor a_scale, Tensor counts, "
    f"*, {_LAUNCH}) -> Tensor",
    "permute": "(Tensor x, Tensor source) -> Tensor",
    "permute_fp8": "(Tensor x, Tensor x_scale, Tensor source) -> (Tensor, Tensor)",
    "unpermute": "(Tensor rows, Tensor places) -> Tensor",
    "unpermute_fp8": "(Tensor rows, Tensor scale, Tensor places, ScalarType dtype=bfloat16) -> Tensor",
    "quantize_rows": f"(Tensor x, {_FLOOR}) -> (Tensor, Tensor)",
    "quantize_blocks": f"(Tensor w, {_FLOOR}) -> (Tensor, Tensor, Tensor)",
    "quantize_columns": f"(Tensor x, Tensor counts, {_FLOOR}, Tensor? x_scale=None) -> (Tensor, Tensor)",
    "quantize_rows_and_columns": f"(Tensor x, Tensor counts, {_FLOOR}) -> (Tensor, Tensor, Tensor, Tensor)",
    "route": "(Tensor logits, Tensor expert_bias, int top_k, int num_groups=1, int top_groups=1, "
    "str group_score='sum_top2', str score_function='sigmoid', bool normalize=True, float route_scale=1.0, "
    "Tensor? token_mask=None) -> (Tensor, Tensor, Tensor, Tensor)",
    "swiglu": "(Tensor gate_up, Tensor? weight=None) -> Tensor",
    "swiglu_fp8": f"(Tensor gate_up, Tensor? weight=None, {_FLOOR}) -> (Tensor, Tensor)",
    "swiglu_backward": "(Tensor d_out, Tensor gate_up, Tensor? weight=None) -> (Tensor, Tensor)",
    "swiglu_backward_recompute": "(Tensor d_out, Tensor gate_up, Tensor? weight=None) -> (Tensor, Tensor, Tensor)",
    "swiglu_backward_fp8": "(Tensor d_out, Tensor gate_up, Tensor? weight=None, Tensor? gate_up_scale=None, "
    "bool power_of_two=True) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
}
# Ops that add to a tensor: an op must not return an argument, so these return nothing.
_ADDING = {
    "grouped_wgrad": f"(Tensor d_out, Tensor a, Tensor counts, Tensor(a!) out, *, {_LAUNCH}) -> ()",
    "grouped_wgrad_fp8": "(Tensor d_out, Tensor d_out_scale, Tensor a, Tensor a_scale, Tensor counts, "
    f"Tensor(a!) out, *, {_LAUNCH}) -> ()",
}
# Where an op's gradient of a weight stands in its results: no op may return None, so it is empty without a weight.
_WEIGHT_GRADIENT = {"swiglu_backward": 1, "swiglu_backward_recompute": 1, "swiglu_backward_fp8": 2}


def _codes(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=CODE)


def _fp32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _row_count(a: Tensor, source: Tensor | None) -> int:
    return a.shape[0] if source is None else source.shape[0]


def _fake_wgrad(d_out: Tensor, a: Tensor, counts: Tensor, **_: Any) -> Tensor:
    wide = a.device.type == "cuda" and a.element_size() == 2
    dtype = torch.float32 if wide else matmul_dtype(a.dtype, a.device)
    return a.new_empty(counts.shape[0], d_out.shape[1], a.shape[1], dtype=dtype)


def _fake_columns(x: Tensor, counts: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    places = padded_rows(x.shape[0], counts.shape[0])
    return _codes(x, x.shape[1], places), _fp32(x, places // BLOCK, blocks(x.shape[1]) * BLOCK)


def _fake_rows(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return _codes(x, *x.shape), _fp32(x, blocks(x.shape[1]), x.shape[0])


def _fake_blocks(w: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    *many, outer, inner = w.shape
    scale = _fp32(w, *many, blocks(outer), blocks(inner))
    return _codes(w, *w.shape), _codes(w, *many, inner, outer), scale


def _fake_route(logits: Tensor, expert_bias: Tensor, top_k: int, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    tokens, experts = logits.shape
    ids = logits.new_empty(tokens, top_k, dtype=torch.int64)
    return ids, logits.new_empty(tokens, top_k), torch.empty_like(logits), ids.new_empty(experts)


def _fake_weight(d_out: Tensor, weight: Tensor | None) -> Tensor:
    return d_out.new_empty(0) if weight is None else torch.empty_like(weight)


def _fake_backward_fp8(
    d_out: Tensor, gate_up: Tensor, weight: Tensor | None = None, *_: Any, **__: Any
) -> tuple[Tensor, ...]:
    return (*_fake_rows(gate_up), _fake_weight(d_out, weight), *_fake_rows(d_out))


def _half(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


_FAKES: dict[str, Callable[..., Outputs]] = {
    "add_bias": lambda rows, weight, bias, counts: torch.empty_like(rows),
    "add_bias_backward": lambda d_rows, weight, bias, counts: (
        torch.empty_like(weight),
        bias.new_empty(bias.shape, dtype=torch.promote_types(d_rows.dtype, torch.float32)),
    ),
    "grouped_gemm": lambda a, b, counts, source=None, *_, **__: a.new_empty(_row_count(a, source), b.shape[2]),
    "grouped_gemm_fp8": lambda a, a_scale, b, b_scale, counts, source=None, dtype=torch.bfloat16, *_, **__: a.new_empty(
        _row_count(a, source), b.shape[1], dtype=dtype
    ),
    "grouped_wgrad": _fake_wgrad,
    "grouped_wgrad_fp8": lambda d_out, d_out_scale, a, a_scale, counts, **_: _fp32(
        a, counts.shape[0], d_out.shape[0], a.shape[0]
    ),
    "permute": lambda x, source: x.new_empty(source.shape[0], x.shape[1]),
    "permute_fp8": lambda x, x_scale, source: (
        x.new_empty(source.shape[0], x.shape[1]),
        x_scale.new_empty(x_scale.shape[0], source.shape[0]),
    ),
    "unpermute": lambda rows, places: rows.new_empty(places.shape[0], rows.shape[1]),
    "unpermute_fp8": lambda rows, scale, places, dtype=torch.bfloat16: rows.new_empty(
        places.shape[0], rows.shape[1], dtype=dtype
    ),
    "quantize_rows": _fake_rows,
    "quantize_blocks": _fake_blocks,
    "quantize_columns": _fake_columns,
    "quantize_rows_and_columns": lambda x, counts, *_, **__: (*_fake_rows(x), *_fake_columns(x, counts)),
    "route": _fake_route,
    "swiglu": lambda gate_up, weight=None: _half(gate_up),
    "swiglu_fp8": lambda gate_up, weight=None, *_, **__: _fake_rows(_half(gate_up)),
    "swiglu_backward": lambda d_out, gate_up, weight=None: (torch.empty_like(gate_up), _fake_weight(d_out, weight)),
    "swiglu_backward_recompute": lambda d_out, gate_up, weight=None: (
        torch.empty_like(gate_up),
        _fake_weight(d_out, weight),
        torch.empty_like(d_out),
    ),
    "swiglu_backward_fp8": _fake_backward_fp8,
}


def register(ops: dict[str, Callable[..., Any]]) -> None:
    """Register each named op: `ops[name]` runs it on real tensors."""
    for name, schema in _SCHEMAS.items():
        run = torch.library.custom_op(
            f"moe_kernels::{name}", _without_none(name, ops[name]), mutates_args=(), schema=schema
        )
        run.register_fake(_FAKES[name])
    for name, schema in _ADDING.items():
        run = torch.library.custom_op(f"moe_kernels::{name}_", _adding(ops[name]), mutates_args=("out",), schema=schema)
        run.register_fake(lambda *_, **__: None)


def _without_none(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        results = op(*args, **kwargs)
        if name not in _WEIGHT_GRADIENT:
            return results
        return tuple(args[0].new_empty(0) if result is None else result for result in results)

    return run


def _adding(op: Callable[..., Any]) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        op(*args, **kwargs)

    return run


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """The custom op of this name, with the results of the public function."""
    namespace = torch.ops.moe_kernels
    args = tuple(torch.tensor(arg) if isinstance(arg, list) else arg for arg in args)  # numbers of rows
    if name in _ADDING:
        # The public functions' (…, counts, out=None, num_sms=None, hopper=False).
        operands = 3 if name == "grouped_wgrad" else 5
        options = {**dict(zip(("out", "num_sms", "hopper"), args[operands:], strict=False)), **kwargs}
        out = options.pop("out", None)
        if out is None:
            return getattr(namespace, name)(*args[:operands], **options)
        getattr(namespace, f"{name}_")(*args[:operands], out, **options)
        return out
    results = getattr(namespace, name)(*args, **kwargs)
    if name in _WEIGHT_GRADIENT:
        weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
        place = _WEIGHT_GRADIENT[name]
        return (*results[:place], None if weight is None else results[place], *results[place + 1 :])
    return results
