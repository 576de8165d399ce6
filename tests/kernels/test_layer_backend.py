"""The layer with `backend=triton`: its experts by the Triton kernels, in the interpreter, forward and backward."""

from __future__ import annotations

import pytest
import torch
from dense_moe import make_config
from interpreter import interpreted
from measures import calc_diff, randn

import moe_kernels
from moe_engine import ConfigError, MoELayer

interpreted("grouped_gemm")


def test_experts_by_triton_equal_those_by_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moe_kernels.interprets()
    calls, product = [], moe_kernels.device_ops().grouped_gemm
    monkeypatch.setattr(moe_kernels.device_ops(), "grouped_gemm", lambda *args: calls.append(args) or product(*args))
    config = make_config(expert_hidden=16)
    found = []
    for name in ("triton", "torch"):
        layer = MoELayer(config, backend=name, dtype=torch.bfloat16)
        x = randn(30, 24).requires_grad_()
        layer(x).backward(randn(30, 24, seed=1))
        found.append([layer(x).detach(), x.grad, *(p.grad for p in layer.parameters())])
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype and calc_diff(mine, theirs) < 1e-4
    assert len(calls) == 6  # two forwards' products, and the gradients of both inputs


def test_their_format_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="backend=triton: multiplies in bf16 or fp16"):
        MoELayer(make_config(), backend="triton")(randn(3, 24, dtype=torch.float32))
