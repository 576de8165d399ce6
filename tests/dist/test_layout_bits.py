"""The same bits over layouts, schedules, recompute and runs, where the design promises them; memory nobody wrote."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from layout_cases import Case, config_of
from layouts import differences, first_losses, rank_batches, run
from measures import poisoned_memory
from ranks import run_ranks

from moe_engine.model.transformer import LossRule
from moe_engine.schedule import schedules
from moe_engine.trainer import Trainer

STRAIGHT = ("1f1b", "gpipe", "split_1f1b", "zb_h1", "overlapped_1f1b", "interleaved_1f1b")  # the ends on two ranks
FOLDED = ("zbv", "dualpipev")  # both ends of the model on one rank


@pytest.mark.parametrize("precision", ["fp32", "fp8", pytest.param("fp8_moments", marks=pytest.mark.slow)])
def test_moving_experts_changes_no_bit_with_exact_combine(precision: str) -> None:
    """Losses, gradients, norms, biases, masters and moments."""
    case = Case(pp=2, dp=4, ep=2, schedule="zb_h1", combine="exact", precision=precision, steps=3)
    moved = run(replace(case, placement=1))
    assert sum(step["moved"] for step in moved.steps) > 10
    worst = differences(run(case), moved)
    assert not any(worst.values()), worst


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loss_bits_do_not_depend_on_the_layout(precision: str) -> None:
    """At equal parameters: same ep has the same bits under any pp, schedule, micro-batch and dp; exact: any ep."""
    at_ep2, exact = Case(dp=2, ep=2, precision=precision), Case(precision=precision, combine="exact", micro_batch=8)
    same_ep = [
        at_ep2,
        replace(at_ep2, micro_batch=4),
        replace(at_ep2, pp=2, schedule="gpipe"),
        replace(at_ep2, pp=2, dp=4, schedule="zb_h1"),
        replace(at_ep2, pp=2, schedule="dualpipe"),
        replace(at_ep2, schedule="overlapped_1f1b"),
    ]
    two_hops = replace(exact, dp=4, ep=4, micro_batch=2, ranks_per_node=2)
    any_ep = [
        exact,
        two_hops,
        replace(exact, dp=2, ep=2, micro_batch=2, max_recv_rows=10),
        replace(exact, dp=2, ep=2, micro_batch=2),
        replace(exact, pp=2, dp=4, ep=4, micro_batch=1),
    ]
    losses = dict(zip(same_ep + any_ep, first_losses(same_ep + any_ep), strict=True))
    for cases in (same_ep, any_ep):
        assert [case for case in cases if losses[case] != losses[cases[0]]] == []


BOUNDED = Case(dp=4, ep=4, micro_batch=2, max_recv_rows=20, steps=1)


@pytest.mark.parametrize(
    "case",
    [
        replace(BOUNDED, precision="fp8"),
        pytest.param(
            replace(BOUNDED, precision="bf16", dp=2, ep=2, combine="exact", schedule="zb_h1", recompute="full"),
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(replace(BOUNDED, precision=precision, **more), marks=pytest.mark.slow)
            for precision, more in product(
                ("fp64", "bf16", "fp8"),
                (
                    {"skew": True, "schedule": "overlapped_1f1b"},
                    {"ranks_per_node": 2, "wire": "fp8"},
                    {"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipe", "micro_batch": 1, "max_recv_rows": 7},
                ),
            )
        ),
    ],
    ids=str,
)
def test_a_bound_on_rows_changes_bits_of_experts_weight_gradients_alone(case: Case) -> None:
    """These are the sum of a product for each round, in fp32; in fp8 a tile of 128 rows is another one's rows, too."""
    free, bounded = run(replace(case, max_recv_rows=0)).steps[0], run(case).steps[0]
    differing = {
        name: float((gradient - bounded["grad"][name]).norm() / gradient.norm())
        for name, gradient in free["grad"].items()
        if not torch.equal(gradient, bounded["grad"][name])
    }
    assert all(".experts." in name for name in differing), differing
    assert differing, "no rank had further rounds"
    assert max(differing.values()) < {"fp64": 1e-14, "bf16": 1e-6, "fp8": 1e-4}[case.precision], differing
    assert [free[key] for key in ("loss", "mtp", "aux", "z")] == [bounded[key] for key in ("loss", "mtp", "aux", "z")]


def test_gradient_bits_do_not_depend_on_the_schedule() -> None:
    """Among schedules with one holder per stage, and between split and whole backward."""
    case = Case(pp=2, dp=2, ep=2, precision="fp32", steps=2)
    plain = run(case)
    for schedule in ("gpipe", "split_1f1b", "zb_h1", "overlapped_1f1b"):
        worst = differences(plain, run(replace(case, schedule=schedule)))
        assert not any(worst.values()), (schedule, worst)


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_every_schedule_has_the_bits_of_the_serial_order(pp: int) -> None:
    """Losses of all at the same ep. Raw gradients, norm and updates of those that hold each stage once.

    A tied head, and MTP's use of the table: where a rank holds both ends of the model it adds up two uses of the table
    as they come, where two ranks do their sums are added, so these two orders are compared each with its own.
    """
    serial = Case(dp=2 if pp < 8 else 1, ep=2 if pp < 8 else 1, rows=16, layers=7, tied=True, precision="fp32", steps=1)
    names = ("dualpipe",) if pp == 8 else (*STRAIGHT, *FOLDED, "dualpipe")
    cases = {name: replace(serial, pp=pp, schedule=name) for name in names}
    if pp < 8:
        cases["interleaved_1f1b"] = replace(cases["interleaved_1f1b"], virtual_stages=2)
    truth, found = run(serial), {name: run(case) for name, case in cases.items()}
    for name, record in found.items():
        worst = differences(truth, record)
        assert not any(worst[key] for key in ("loss", "mtp0", "aux", "counts", "bias")), (name, worst)
    for kind in (STRAIGHT, FOLDED) if pp < 8 else ():
        for name in kind[1:]:
            worst = differences(found[kind[0]], found[name])
            assert not any(worst.values()), (kind[0], name, worst)


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("1f1b", "full"), ("zb_h1", "norm,mla_up,swiglu,attention"), ("zbv", "full"), ("dualpipe", "full")],
)
def test_recompute_changes_no_bit(schedule: str, recompute: str) -> None:
    """Losses, gradients, counts, biases and optimizer states; and the same collectives in the same order."""
    case = Case(pp=2, dp=2, ep=2, precision="bf16", steps=2, schedule=schedule)
    plain, again = run(case), run(replace(case, recompute=recompute))
    worst = differences(plain, again)
    assert not any(worst.values()), worst
    assert plain.logs == again.logs


def _halves(rank: int, schedule: str) -> list[list[tuple[str, int, torch.Tensor]]]:
    """Raw gradients of a whole batch, or of each half of it alone, all divided by the counts of the whole."""
    case = Case(pp=2, schedule=schedule, precision="fp32")
    trainer = Trainer(config_of(case), rank, torch.device("cpu"))
    batches = rank_batches(trainer, case, 0)
    rule = LossRule(trainer.count_items(batches), 0.3)
    halves = [batches] if schedule == "dualpipe" else [batches[:4], batches[4:]]
    found = []
    for half in halves:
        trainer.optimizer.zero_grad()
        trainer.executor.run(schedules.schedule(schedule, 2, len(half)), half, rule)
        trainer.optimizer.reduce_gradients()
        found.append([(s.name, s.start, s.gradient.clone()) for s in trainer.optimizer.named_gradient_shards()])
    return found


def test_dualpipe_gradients_have_the_bits_of_the_sum_of_its_halves() -> None:
    """But for the embedding table: a rank holds both ends of the model, and adds up both gradients as they come."""

    def whole(ranks: list[list[list[tuple[str, int, torch.Tensor]]]], half: int) -> dict[str, torch.Tensor]:
        parts = sorted((name, start, part.tolist()) for rank in ranks for name, start, part in rank[half])
        names = dict.fromkeys(name for name, _, _ in parts)
        return {name: torch.tensor([x for n, _, part in parts if n == name for x in part]) for name in names}

    both, apart = run_ranks(2, _halves, "dualpipe"), run_ranks(2, _halves, "1f1b")
    gradients, first, second = whole(both, 0), whole(apart, 0), whole(apart, 1)
    assert gradients.keys() == first.keys()
    differing = [name for name in gradients if not torch.equal(gradients[name], first[name] + second[name])]
    assert differing in ([], ["embedding.weight"])


def test_two_runs_have_the_same_bits() -> None:
    case = Case(pp=2, dp=2, ep=2, precision="bf16", steps=3)
    assert not any(differences(run(case), run(case)).values())


def is_poisoned(_trainer: Trainer) -> None:
    assert torch.empty(8).isnan().all()


@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, dp=2, ep=2, schedule="dualpipe", skew=True, padding=True),
        Case(pp=2, dp=2, ep=2, schedule="zb_h1", combine="exact", recompute="full", model="qwen3", z_loss=True),
    ],
    ids=str,
)
def test_memory_that_nobody_wrote_enters_nothing(case: Case) -> None:
    """No bit of three steps changes when all uninitialised memory is NaN: buffers, idle experts, rows past the last."""
    case = replace(case, precision="bf16", steps=3)
    plain = run(case)
    with poisoned_memory():
        worst = differences(plain, run(case, is_poisoned))
    assert not any(worst.values()), worst
