"""`backend=` of the layer: what is refused by name, and that a backend computes what the engine's own choice does."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from dense_moe import make_config
from measures import calc_diff
from torch import Tensor

import moe_kernels
from moe_engine import ConfigError, MoELayer, experts_forward
from moe_engine.ops import backend


def tokens(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(name: str, dtype: torch.dtype) -> list[Tensor]:
    layer = MoELayer(make_config(), backend=name, dtype=dtype)
    x = tokens(2, 20, 24, dtype=dtype).requires_grad_()
    out = layer(x)
    out.backward(tokens(2, 20, 24, dtype=dtype, seed=1))
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


def test_mistakes_are_told_together_with_values_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="backend=cutlass: no such choice; there are auto, torch, triton, megablocks"):
        MoELayer(make_config(), backend="cutlass")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as error:
        MoELayer(make_config(expert_biases=True), backend="megablocks", precision="fp8")
    told = str(error.value).splitlines()
    assert len(told) == 4 and all(
        line.startswith("backend=megablocks: ") and "use backend=auto" in line for line in told
    )
    with pytest.raises(ConfigError, match="backend=triton: triton is not installed"):
        MoELayer(make_config(), backend="triton")
    with pytest.raises(ConfigError, match="backend=torch: has SwiGLU experts without biases alone"):
        MoELayer(make_config(activation="gelu"), backend="torch")
    x, ids, weights = torch.zeros(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(ConfigError, match="backend=torch: has SwiGLU experts"):
        experts_forward(x, ids, weights, torch.zeros(2, 8, 8), torch.zeros(2, 8, 4), activation="gelu", backend="torch")


def test_what_only_a_forward_shows_is_refused_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(moe_kernels, "interprets", lambda: False)
    with pytest.raises(ConfigError, match="backend=triton: x is on cpu, its kernels need a GPU; use backend=auto"):
        run("triton", torch.bfloat16)
    with pytest.raises(ConfigError, match=r"backend=triton: multiplies in bf16 or fp16, .* torch.float32"):
        run("triton", torch.float32)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ConfigError, match="backend=torch: a compiled graph has the ops of backend=auto"):
        backend.kernels_of("torch", torch.zeros(1), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch_is_what_a_cpu_runs_anyway(dtype: torch.dtype) -> None:
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(run("torch", dtype), run("auto", dtype), strict=True))


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool, trans_b: bool) -> Tensor:
    """MegaBlocks' grouped product, by its contract: whole matrices, group sizes on the host."""
    assert a.is_contiguous() and b.is_contiguous() and batch_sizes.dtype == torch.int64 and not (trans_a and trans_b)
    groups = a.split(batch_sizes.tolist())
    if trans_a:
        return torch.stack([x.T @ y for x, y in zip(groups, b.split(batch_sizes.tolist()), strict=True)])
    return torch.cat([x @ (matrix.T if trans_b else matrix) for x, matrix in zip(groups, b, strict=True)])


def test_megablocks_products_are_given_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """MegaBlocks needs CUDA: here a module with its contract stands for it."""
    stand_in: Any = types.ModuleType("megablocks.grouped_gemm_util")
    stand_in.backend = types.SimpleNamespace(gmm=gmm)
    monkeypatch.setitem(sys.modules, "megablocks", types.ModuleType("megablocks"))
    monkeypatch.setitem(sys.modules, "megablocks.grouped_gemm_util", stand_in)
    monkeypatch.setattr(backend, "check_backend", lambda *_: None)
    monkeypatch.setattr("moe_engine.moe.layer.check_backend", lambda *_: None)
    monkeypatch.setattr("moe_engine.ops.expert_mlp.kernels_of", lambda *_: backend.MegaBlocks())
    for mine, theirs in zip(run("megablocks", torch.bfloat16), run("auto", torch.bfloat16), strict=True):
        assert calc_diff(mine, theirs) < 1e-4
    stand_in.backend = None
    with pytest.raises(ConfigError, match="backend=megablocks: needs grouped_gemm"):
        backend.MegaBlocks()
