"""What the layout harness must catch: it goes red under seeded faults, and the norm counts each parameter once."""

from __future__ import annotations

import pytest
import torch
from layout_cases import Case, config_of
from layouts import differences, run, truth
from ranks import run_ranks

from moe_engine.model.batch import Batch, ItemCounts, count_items
from moe_engine.model.transformer import LossRule
from moe_engine.moe.balance import update_expert_bias
from moe_engine.planner.flops import parameter_count
from moe_engine.trainer import StepGradients, StepResult, Trainer

# The harness must go red under each of these.


def expert_gradient_times_ep(trainer: Trainer) -> None:
    reduce_gradients = trainer.optimizer.reduce_gradients

    def times_ep() -> None:
        for named in trainer.named:
            if named.expert:
                assert named.parameter.grad is not None
                named.parameter.grad.mul_(trainer.groups.ep.size)
        reduce_gradients()

    trainer.optimizer.reduce_gradients = times_ep  # type: ignore[method-assign]


def tied_head_not_summed(trainer: Trainer) -> None:
    reduce_gradients = trainer.optimizer.reduce_gradients

    def without_the_last_stage() -> None:
        for named in trainer.named:
            if len(named.holders) > 1 and max(trainer.stages) == trainer.executor.num_stages - 1:
                assert named.parameter.grad is not None
                named.parameter.grad.zero_()
        reduce_gradients()

    trainer.optimizer.reduce_gradients = without_the_last_stage  # type: ignore[method-assign]


def mean_per_micro_batch(trainer: Trainer) -> None:
    parts = trainer.micro_batches * trainer.groups.data.size
    for stage in trainer.stages.values():
        forward = stage.forward

        def own_mean(batch: Batch, x: object, rule: LossRule, *args: object, forward: object = forward) -> object:
            own = count_items([batch])
            mtp = tuple(n * parts for n in own.mtp)
            items = ItemCounts(own.tokens * parts, mtp, own.sequences * parts, own.routed * parts)
            return forward(batch, x, LossRule(items, rule.mtp_weight), *args)  # type: ignore[operator]

        stage.forward = own_mean  # type: ignore[method-assign, assignment]


def bias_moved_twice(trainer: Trainer) -> None:
    update = trainer.update

    def twice(gradients: StepGradients) -> StepResult:
        result = update(gradients)
        for name, layer in trainer.moe_layers().items():
            update_expert_bias(layer.router.expert_bias, result.expert_counts[name], trainer.config.moe.bias_step)
        return result

    trainer.update = twice  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "seen_in"),
    [
        (expert_gradient_times_ep, "grad"),
        (tied_head_not_summed, "grad"),
        (mean_per_micro_batch, "grad"),
        (bias_moved_twice, "bias"),
    ],
)
def test_harness_goes_red_under_a_fault(fault: object, seen_in: str) -> None:
    case = Case(pp=2, dp=2, ep=2, tied=True, steps=2)
    worst = differences(truth(case), run(case, fault))  # type: ignore[arg-type]
    assert worst[seen_in] > 1e-6, f"{getattr(fault, '__name__', fault)} went unseen"


def _unit_gradient_norm(rank: int, case: Case) -> tuple[float, int]:
    trainer = Trainer(config_of(case), rank, torch.device("cpu"))
    trainer.optimizer.zero_grad()
    for named in trainer.named:
        assert named.parameter.grad is not None
        # one of the ranks that share this parameter brings the whole gradient of 1
        first = trainer.groups.expert if named.expert else trainer.groups.dense
        named.parameter.grad.fill_(float(first[named.holders].rank == 0))
    trainer.optimizer.reduce_gradients()
    return trainer.optimizer.gradient_norm()


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(pp=2, dp=2, ep=2, tied=True),
        Case(pp=2, dp=4, ep=2),
        Case(pp=4, schedule="dualpipe", tied=True),
        Case(pp=2, dp=2, ep=2, schedule="zbv", model="qwen3", tied=True),
        Case(pp=2, dp=2, schedule="interleaved_1f1b", virtual_stages=2, mtp_depth=2),
        Case(pp=4, dp=2, ep=2, stages=("embedding", "3L", "1L+head", "mtp")),
    ],
    ids=str,
)
def test_unit_gradients_have_norm_sqrt_of_parameters(case: Case) -> None:
    expected = parameter_count(config_of(case).model).total ** 0.5
    assert run_ranks(case.world, _unit_gradient_norm, case) == pytest.approx([expected] * case.world, rel=1e-15)
