"""RMSNorm, SwiGLU and the sigmoids against torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.ops.activation import log_sigmoid, sigmoid, swiglu
from moe_engine.ops.norm import rms_norm


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6), (0, 6)])
def test_rms_norm_and_its_gradients_equal_torch(shape: tuple[int, ...]) -> None:
    x, weight = randn(*shape).requires_grad_(), randn(6, seed=1).requires_grad_()
    out, expected = rms_norm(x, weight, 1e-5), F.rms_norm(x, (6,), weight, 1e-5)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    d_out = randn(*shape, seed=2)
    grads = torch.autograd.grad(out, (x, weight), d_out)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (x, weight), d_out), rtol=1e-12, atol=1e-12)


def test_rms_norm_takes_a_view_and_computes_bf16_in_fp32() -> None:
    base = randn(4, 20, dtype=torch.bfloat16).requires_grad_()
    weight = randn(8, dtype=torch.bfloat16, seed=1).requires_grad_()
    x = base[:, 3:11]
    out = rms_norm(x, weight, 1e-6)
    wide = x.detach().double().requires_grad_()
    wide_weight = weight.detach().double().requires_grad_()
    expected = F.rms_norm(wide, (8,), wide_weight, 1e-6)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=0)
    d_out = randn(4, 8, dtype=torch.bfloat16, seed=2) * 2.0**-40
    out.backward(d_out)
    expected.backward(d_out.double())
    torch.testing.assert_close(base.grad[:, 3:11].double(), wide.grad, rtol=2**-7, atol=2.0**-50)
    torch.testing.assert_close(weight.grad.double(), wide_weight.grad, rtol=2**-8, atol=2.0**-50)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_have_the_same_bits_under_any_split(dtype: torch.dtype) -> None:
    x, weight, wide = randn(67, 24, dtype=dtype), randn(24, dtype=dtype, seed=1), randn(67 * 24).to(dtype) * 20
    whole = rms_norm(x, weight, 1e-6)
    for start, stop in ((0, 1), (1, 4), (5, 22), (30, 67)):
        assert torch.equal(rms_norm(x[start:stop], weight, 1e-6), whole[start:stop])
        for function in (sigmoid, log_sigmoid):
            assert torch.equal(function(wide[start:stop]), function(wide)[start:stop])


def test_swiglu_with_and_without_weight_passes_gradcheck() -> None:
    gate_up, weight = randn(2, 3, 8).requires_grad_(), randn(2, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(swiglu, (gate_up, weight))
    assert torch.autograd.gradcheck(swiglu, (gate_up,))
    gate, up = gate_up.chunk(2, dim=-1)
    expected = F.silu(gate) * up * weight[..., None]
    torch.testing.assert_close(swiglu(gate_up, weight), expected, rtol=1e-14, atol=1e-14)
    assert swiglu(torch.zeros(0, 3, 8)).shape == (0, 3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigmoids_equal_torch_and_stay_finite(dtype: torch.dtype) -> None:
    x = torch.tensor([-1e30, -200.0, -60.0, -1.0, 0.0, 1.0, 60.0, 1e30], dtype=dtype, requires_grad=True)
    torch.testing.assert_close(sigmoid(x), torch.sigmoid(x))
    torch.testing.assert_close(log_sigmoid(x), F.logsigmoid(x))
    (grad,) = torch.autograd.grad(log_sigmoid(x).sum(), x)
    torch.testing.assert_close(grad, torch.sigmoid(-x.detach()))
