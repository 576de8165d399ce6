"""What is not a layer, its tokens, their mask, or a choice of experts: refused by name, never computed with."""

from __future__ import annotations

import pytest
import torch
from dense_moe import make_config
from torch import Tensor

from moe_engine import ConfigError, MoELayer, experts_forward


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_activations_that_do_not_fit_are_refused_with_values_that_work() -> None:
    with pytest.raises(ConfigError) as error:
        MoELayer(make_config(activation="silo", swiglu_limit=-1.0))
    assert "activation=silo" in str(error.value) and "silu" in str(error.value)
    assert "swiglu_limit=-1.0: must be 0 or more" in str(error.value)
    with pytest.raises(ConfigError, match="swiglu_limit=7.0: there is a gate to clamp only .* use gated=true"):
        MoELayer(make_config(gated=False, swiglu_limit=7.0))
    with pytest.raises(ConfigError, match="swiglu_limit=7.0: the clamped .* use activation=silu"):
        MoELayer(make_config(activation="relu", swiglu_limit=7.0))


def test_shapes_that_do_not_fit_are_told() -> None:
    x, ids, w = torch.zeros(4, 6), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"gate_up must be \[e, 2F, D\] and down \[e, D, F\]"):
        experts_forward(x, ids, w, torch.zeros(3, 8, 6), torch.zeros(3, 6, 5))
    with pytest.raises(ValueError, match=r"down \[3, 4, 6\].*gate_up must be \[e, F, D\]"):
        experts_forward(x, ids, w, torch.zeros(3, 4, 6), torch.zeros(3, 4, 6), gated=False)
    with pytest.raises(ValueError, match="same leading dimensions"):
        experts_forward(x, ids[:3], w[:3], torch.zeros(3, 8, 6), torch.zeros(3, 6, 4))
    up, down = torch.zeros(3, 8, 6), torch.zeros(3, 6, 4)
    for wrong in (ids + 0.7, ids.bool(), ids[:, :0]):
        with pytest.raises(ValueError, match="ids must be whole numbers"):
            experts_forward(x, wrong, w[:, : wrong.shape[1]], up, down)
    with pytest.raises(ValueError, match="x floating-point numbers"):
        experts_forward(x.long(), ids, w, up, down)
    with pytest.raises(ValueError, match=r"gate_up_bias \[3, 4\]: must be \[3, 8\]"):
        experts_forward(x, ids, w, up, down, gate_up_bias=torch.zeros(3, 4))
    with pytest.raises(ConfigError, match="activation=swish: no such choice; there are silu"):
        experts_forward(x, ids, w, up, down, activation="swish")
    with pytest.raises(ConfigError, match="swiglu_limit=-1.0: must be 0 or more"):
        experts_forward(x, ids, w, up, down, swiglu_limit=-1.0)


def test_an_id_beyond_32_bits_is_no_expert() -> None:
    x, w = tokens(4, 6), torch.ones(4, 1)
    ids = torch.full((4, 1), 2**32 + 1)
    assert not experts_forward(x, ids, w, tokens(3, 8, 6), tokens(3, 6, 4)).any()


def test_what_is_no_token_and_no_mask_is_told() -> None:
    layer, x = MoELayer(make_config()), tokens(2, 6, 24)
    for wrong in (torch.ones(2, 6), torch.ones(2, 6, dtype=torch.int64), torch.ones(6, 2, dtype=torch.bool)):
        for module in (layer, layer.router):
            with pytest.raises(ValueError, match=r"token_mask=.*: must be bool, \[2, 6\] for x \[2, 6, 24\]"):
                module(x, wrong)
    for x in (tokens(2, 23), torch.ones(2, 24, dtype=torch.int64), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"x=.*: must be \[..., 24\], dim=24, of floating-point numbers"):
            layer(x)


def test_a_start_that_cannot_be_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        MoELayer(make_config(), name=None, seed=1.5, dtype=torch.int32)  # type: ignore[arg-type]
    lines = str(error.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["name=None", "seed=1.5", "dtype=torch.int32"]
    with pytest.raises(ConfigError, match="group='ep': a process group of this rank or a one-dimensional DeviceMesh"):
        MoELayer(make_config(), ep_group="ep")
