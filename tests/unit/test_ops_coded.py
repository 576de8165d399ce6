"""Rows that stay in fp8 from the wire to the products: the bits are those of rows that are decoded on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_engine.config.schema import MoEConfig
from moe_engine.moe import dispatch as wire
from moe_engine.moe.layer import MoELayer
from moe_engine.ops import coded
from moe_engine.ops.coded import CodedGradient, numbers, stand_in
from moe_engine.ops.fp8 import Codes, Fp8, dequantize, quantize, use_fp8
from moe_engine.ops.recompute import BLOCK, Segments
from moe_engine.ops.wgrad_queue import WgradQueue

BF16 = torch.bfloat16


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def step(layer: MoELayer, way: str, x: Tensor, d_out: Tensor) -> list[Tensor]:
    """Output and all gradients of the layer's exchange, as the engine's blocks run it."""
    queue = WgradQueue() if "queue" in way else None
    segments = Segments(frozenset([BLOCK])) if "recompute" in way else None
    x = x.clone().requires_grad_()
    layer.zero_grad()
    packed = layer.pack(x, (1, len(x)))
    arrived = layer.dispatch_wait(layer.dispatch_start(packed))
    if "decoded" in way:
        arrived = replace(arrived, x=arrived.numbers(), codes=None, gradient=None)

    def experts(rows: Tensor, weights: Tensor) -> Tensor:
        return layer.compute(replace(arrived, x=rows, weights=weights), queue)

    if segments is None:
        rows = experts(arrived.x, arrived.weights)
    else:
        with segments.hooks():
            rows = segments.run(experts, arrived.x, arrived.weights)
        segments.close()
    out = wire.combine_wait(layer.combine_start(rows, packed))
    if queue is None:
        out.backward(d_out)
    else:
        with queue.defer("batch"):
            out.backward(d_out)
        queue.run("batch")
    assert x.grad is not None
    return [out, x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
@pytest.mark.parametrize("way", ["", "queue", "recompute"])
def test_codes_give_the_bits_of_numbers(way: str, wgrad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MoEConfig(dim=256, expert_hidden=128, num_experts=8, top_k=3, wire="fp8")
    layer = MoELayer(config, precision="fp8", dtype=BF16)
    use_fp8(layer, Fp8(wgrad))
    x, d_out = randn(70, 256), randn(70, 256, seed=1) * 2.0**-30
    x[:5], d_out[5:9] = x[:5] * 1e-6, 0  # below the smallest magnitude of a forward tile; tiles of zeros
    want = step(layer, f"decoded {way}", x, d_out)
    decoded: list[Codes] = []
    monkeypatch.setattr(coded, "dequantize", lambda codes, dtype: decoded.append(codes))
    got = step(layer, way, x, d_out)
    assert len(got) == len(want) == 2 + len(list(layer.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(bool(a.any()) and bool(a.isfinite().all()) for a in got)
    assert not decoded  # neither rows nor gradients became numbers on their way


def test_experts_that_do_not_take_codes_get_numbers() -> None:
    """Those in bf16, and in fp8 those whose activation stands apart from the products (biases)."""
    for biases, precision in ((False, None), (True, "fp8")):
        config = MoEConfig(
            dim=256, expert_hidden=128, num_experts=8, top_k=3, wire="fp8", expert_biases=biases, activation="gelu"
        )
        layer = MoELayer(config, precision=precision, dtype=BF16)
        x, d_out = randn(30, 256), randn(30, 256, seed=1)
        want, got = (step(layer, way, x, d_out) for way in ("decoded", ""))
        assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(got, want, strict=True))


def test_a_gradient_comes_as_codes_only_to_who_asked() -> None:
    codes, rows = quantize(randn(4, 128)), randn(4, 128)
    way = CodedGradient()
    way.sent(rows)
    assert torch.equal(way.arrived(codes, BF16), dequantize(codes, BF16))  # nobody made them
    way.made(rows)
    way.sent(rows.float())
    assert torch.equal(way.arrived(codes, BF16), dequantize(codes, BF16))  # something came between
    way.sent(rows.detach())
    gradient = way.arrived(codes, BF16)
    assert gradient.shape == (4, 128) and gradient.dtype == BF16 and bool(gradient.isnan().all())
    assert gradient.untyped_storage().nbytes() == 2
    assert way.take(gradient * 1) is None  # it went through something else: numbers that are none
    assert way.take(gradient) is codes and way.take(gradient) is None


def test_numbers_of_a_stand_in_have_its_gradient() -> None:
    codes = quantize(randn(4, 128))
    x = stand_in(codes, BF16).requires_grad_()
    numbers(x, codes).backward(randn(4, 128, seed=2))
    assert x.grad is not None and torch.equal(x.grad, randn(4, 128, seed=2))
