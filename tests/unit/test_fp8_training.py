"""A training step in fp8: which products run, when weights are quantised, and gradients of any size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from layout_cases import Case, config_of
from layouts import rank_batches
from measures import same_bits
from torch.utils._python_dispatch import TorchDispatchMode

import moe_kernels
from moe_engine.model.batch import Batch, ItemCounts
from moe_engine.moe.experts import Experts
from moe_engine.ops.linear import Linear
from moe_engine.trainer import Trainer

CASE = Case(precision="fp8", micro_batch=4, layers=2)
OPS = ("grouped_gemm_fp8", "grouped_wgrad_fp8", "swiglu_fp8", "swiglu_backward_fp8", "quantize_rows_and_columns")


def trainer_of() -> Trainer:
    return Trainer(config_of(CASE), 0, torch.device("cpu"))


class Products(TorchDispatchMode):
    """Dimensions of the matrices that torch multiplies, outside of `pause`d ops."""

    def __init__(self) -> None:
        super().__init__()
        self.dimensions: list[set[int]] = []
        self.inside = 0

    def pause(self, op: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*args: Any, **kwargs: Any) -> Any:
            self.inside += 1
            try:
                return op(*args, **kwargs)
            finally:
                self.inside -= 1

        return paused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside and "mm" in func.__name__:
            self.dimensions.append({n for x in args if isinstance(x, torch.Tensor) for n in x.shape[-2:]})
        return func(*args, **(kwargs or {}))


def test_every_layer_and_expert_multiplies_codes_and_nothing_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of each op in a step of two micro-batches; torch multiplies for router, head and core attention alone."""
    config = config_of(CASE)
    config.model.vocab_size = 101  # a number that no layer has
    trainer = Trainer(config, 0, torch.device("cpu"))
    calls: Counter[str] = Counter()
    products = Products()

    def counted(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (calls.update([name]), op(*args, **kwargs))[1]

    for name in OPS:
        monkeypatch.setattr(moe_kernels, name, products.pause(counted(name, getattr(moe_kernels, name))))
    blocks: list[torch.Tensor] = []
    quantize_blocks = moe_kernels.quantize_blocks
    monkeypatch.setattr(
        "moe_engine.ops.fp8.quantize_blocks", lambda w, *args: (blocks.append(w), quantize_blocks(w, *args))[1]
    )
    with products:
        trainer.accumulate(rank_batches(trainer, CASE, 0))

    stage = trainer.stages[0]
    weights = [m.weight for m in stage.modules() if isinstance(m, Linear)]
    experts = [w for m in stage.modules() if isinstance(m, Experts) for w in (m.gate_up, m.down)]
    matrices, mlps = len(weights) + len(experts), 1 + 2 * len(trainer.moe_layers())
    assert matrices == 3 * 5 + 1 + 2 * mlps  # attention of 3 blocks, MTP's projection, and the MLPs
    assert calls["grouped_gemm_fp8"] == 2 * 2 * matrices
    assert calls["grouped_wgrad_fp8"] == 2 * matrices
    assert calls["swiglu_fp8"] == calls["swiglu_backward_fp8"] == 2 * mlps
    assert calls["quantize_rows_and_columns"] == 2 * (matrices - mlps)  # gate|up's gradient comes in codes already
    assert len(blocks) == matrices, "a weight is quantised once in a step, not for each micro-batch"
    others = [found for found in products.dimensions if not found & {8, 101, 104}]  # not experts, not vocabulary
    heads = {8, 12, 16}  # of values, of keys, and tokens
    assert products.dimensions and all(found <= heads for found in others), others

    trainer.step(rank_batches(trainer, CASE, 0))
    assert len(blocks) == matrices
    trainer.step(rank_batches(trainer, CASE, 1))
    assert len(blocks) == 2 * matrices


def larger_batch(shift: int) -> Trainer:
    """A trainer whose every loss is divided by 2^shift times the number of items; its optimizer's constants follow."""

    class Larger(Trainer):
        def count_items(self, batches: Any) -> ItemCounts:
            return ItemCounts.from_tensor(super().count_items(batches).as_tensor() << shift)

    config = config_of(CASE)
    config.optim.eps *= 2.0**-shift
    config.optim.clip *= 2.0**-shift
    return Larger(config, 0, torch.device("cpu"))


@pytest.mark.parametrize("shift", [15, 40])
def test_gradients_of_a_batch_of_any_size_are_the_same_but_for_the_scale(shift: int) -> None:
    """Every gradient times 2^-shift, as in a batch of 2^shift times as many tokens: the same bits, scaled.

    2^15 times the 2,048 tokens of a quickstart step are 6.7e7: then gradients are near 1e-8.
    """
    plain, larger = trainer_of(), larger_batch(shift)
    batches: list[Batch] = rank_batches(plain, CASE, 0)
    plain.accumulate(batches)
    larger.accumulate(batches)
    for one, other in zip(
        plain.optimizer.named_gradient_shards(), larger.optimizer.named_gradient_shards(), strict=True
    ):
        assert one.gradient.any()
        assert torch.equal(one.gradient * 2.0**-shift, other.gradient), one.name


def test_a_batch_of_67_million_tokens_trains_the_same_weights() -> None:
    plain, larger = trainer_of(), larger_batch(15)
    for step in range(3):
        one, other = (trainer.step(rank_batches(plain, CASE, step)) for trainer in (plain, larger))
        assert not one.skipped and other.grad_norm == one.grad_norm * 2.0**-15
    for mine, its in zip(plain.optimizer.named_shards(), larger.optimizer.named_shards(), strict=True):
        assert torch.equal(mine.states["master"], its.states["master"]), mine.name


def test_transposed_codes_that_are_not_kept_change_no_bit() -> None:
    config = config_of(CASE)
    config.precision.keep_transposed_codes = False
    plain, leaner = trainer_of(), Trainer(config, 0, torch.device("cpu"))
    batches = rank_batches(plain, CASE, 0)
    for trainer in (plain, leaner):
        trainer.accumulate(batches)
    for one, other in zip(
        plain.optimizer.named_gradient_shards(), leaner.optimizer.named_gradient_shards(), strict=True
    ):
        assert torch.equal(one.gradient, other.gradient), one.name


def test_saved_and_loaded_parameters_have_the_same_codes(tmp_path: Any) -> None:
    trainer = trainer_of()
    trainer.step(rank_batches(trainer, CASE, 0))
    path = trainer.save(tmp_path)
    other = trainer_of()
    other.load(path)
    assert trainer.fp8 is not None and other.fp8 is not None
    for one, two in zip(trainer.named, other.named, strict=True):
        if one.is_matrix:
            mine, loaded = trainer.fp8.weight(one.parameter), other.fp8.weight(two.parameter)
            assert same_bits(mine.codes, loaded.codes) and same_bits(mine.scale, loaded.scale)


def test_first_and_last_layers_stay_in_bf16_by_option() -> None:
    config = config_of(replace(CASE, layers=4))
    config.precision = replace(config.precision, bf16_first_layers=1, bf16_last_layers=2)
    stage = Trainer(config, 0, torch.device("cpu")).stages[0]
    layers = {name: {module.fp8 is not None for module in layer.modules() if hasattr(module, "fp8")}
              for name, layer in [*stage.layers.items(), ("mtp", stage.mtp)]}  # fmt: skip
    assert layers == {"0": {False}, "1": {True}, "2": {False}, "3": {False}, "mtp": {True}}
