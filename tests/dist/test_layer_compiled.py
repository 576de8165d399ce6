"""The compiled layer on 1 and 2 ranks, in DDP: gradients and an optimizer step equal the bare layer's."""

from __future__ import annotations

import pytest
import torch
from dense_moe import make_config
from ranks import run_ranks
from torch import nn
from wrapped_layer import Model, assert_equal_bare, bare, in_ddp, make_layer, results, step, wrapped_step


def _compiled(model: Model, ep: bool) -> nn.Module:
    model.run = torch.compile(model.moe.forward, fullgraph=True, backend="aot_eager")
    return in_ddp(model, ep)


@pytest.mark.slow
@pytest.mark.parametrize("ep", [False, True], ids=["dp2", "ep2"])
def test_two_compiled_ranks_equal_the_bare_layer(ep: bool) -> None:
    assert_equal_bare(run_ranks(2, wrapped_step, _compiled, ep, 1, time_limit=300), bare())


@pytest.mark.slow
@pytest.mark.parametrize("ep", [False, True], ids=["dp2", "ep2"])
def test_two_compiled_ranks_with_a_capacity_equal_two_that_are_not_compiled(ep: bool) -> None:
    """What an expert drops depends on a rank's tokens, so the bare layer is the same on two ranks, by DDP."""
    config = make_config(expert_biases=True, aux_loss_weight=0.1, capacity_factor=0.75)
    compiled, plain = (
        run_ranks(2, wrapped_step, wrapper, ep, 1, config, time_limit=300) for wrapper in (_compiled, in_ddp)
    )
    for found, expected in zip(compiled, plain, strict=True):
        assert set(found) == set(expected)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=name)
    dropless = run_ranks(2, wrapped_step, in_ddp, ep, 1)
    assert not torch.allclose(plain[0]["out"], dropless[0]["out"])


@pytest.mark.slow
def test_one_compiled_graph_equals_the_bare_layer_by_inductor() -> None:
    model = Model(make_layer())
    model.run = torch.compile(model.moe.forward, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.moe.update_balance_after(optimizer)
    assert_equal_bare([results(model, step(model, optimizer, slice(0, 4)))], bare())
