"""Any layout equals one process: the harness over layouts, and the faults it must catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby, product

import pytest
import torch
from layouts import GLOBAL_BATCH, Case, Record, config_of, differences, first_losses, rank_batches, run, truth
from ranks import run_ranks

from moe_engine.model.batch import Batch, ItemCounts, count_items
from moe_engine.model.transformer import LossRule
from moe_engine.moe.balance import update_expert_bias
from moe_engine.planner.flops import parameter_count
from moe_engine.schedule import schedules
from moe_engine.trainer import StepGradients, StepResult, Trainer

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}


def assert_equal(case: Case, record: Record) -> None:
    assert not case.placement or any(step["moved"] for step in record.steps), "no expert moved"
    worst = {key: value for key, value in differences(truth(case), record).items() if value > TOLERANCE[case.precision]}
    assert not worst, f"{case} differs from one process: {worst}"


def assert_same_order(record: Record) -> None:
    """Every communicator saw the same operations in the same order on all its ranks (a send meets its receive)."""
    orders: dict[str, set[tuple[str, ...]]] = {}
    for log in record.logs:
        own: dict[str, list[str]] = {}
        for entry in log:
            size = "" if entry.op == "all_to_all" else str(entry.bytes)
            op = "message" if entry.op in ("send", "receive") else entry.op
            own.setdefault(entry.communicator, []).append(f"{op} {entry.label} {size}")
        for name, entries in own.items():
            orders.setdefault(name, set()).add(tuple(entries))
    assert orders or len(record.logs) == 1
    for name, found in orders.items():
        assert len(found) == 1, f"{name}: its ranks enqueued in different orders"


def assert_reduced_once(record: Record) -> None:
    """In each step every gradient buffer is reduced once, after all that its backwards wait for."""
    for log, buckets in zip(record.logs, record.buckets, strict=True):
        runs = [(reducing, list(group)) for reducing, group in groupby(log, lambda entry: entry.label == "gradients")]
        assert [len(group) for reducing, group in runs if reducing] == [buckets] * (len(record.steps) if buckets else 0)
        after = runs[-1][1] if runs and runs[-1][0] is False and buckets else []
        assert not [entry for entry in after if entry.op in ("send", "receive", "all_to_all")]


FEW = [
    Case(dp=2, ep=2, micro_batch=2),
    Case(pp=2, dp=1, micro_batch=2, tied=True),
    Case(pp=2, dp=2, ep=2, schedule="gpipe", combine="exact"),
    Case(pp=2, dp=2, ep=1, schedule="split_1f1b", padding=True),
    Case(pp=4, dp=1, tied=True, schedule="zbv"),
    Case(pp=2, dp=4, ep=2, skew=True, placement=2),
]
FEATURES = [
    Case(pp=2, dp=2, ep=2, schedule="interleaved_1f1b", virtual_stages=2, tied=True, steps=3),
    Case(pp=2, dp=2, ep=2, schedule="dualpipe", tied=True, padding=True, placement=2, steps=3),
    Case(pp=4, dp=1, schedule="dualpipe", stages=("embedding", "3L", "1L+head", "mtp"), mtp_depth=2, steps=3),
    Case(pp=2, dp=2, ep=2, model="qwen3", z_loss=True, padding=True, tied=True, steps=3),
    Case(pp=2, dp=2, ep=2, schedule="zb_h1", model="v3_yarn", combine="exact", steps=3),
    Case(pp=2, dp=2, ep=2, schedule="zb_h1", recompute="full", skew=True, steps=3),
    Case(pp=2, dp=1, schedule="dualpipe", recompute="selective", steps=3),
    Case(pp=2, dp=2, ep=2, schedule="dualpipe", wire="fp8", padding=True, steps=3),
    Case(cp=2, ep=2, micro_batch=2, padding=True, steps=2),
    Case(cp=4, exchange="all_gather", payload="latent", model="v3_yarn", ep=2, mtp_depth=2, steps=2),
    Case(cp=4, exchange="ulysses", payload="latent", model="v3_heads", tied=True, steps=2),
    Case(cp=4, exchange="ulysses", model="qwen3_heads", ep=4, z_loss=True, padding=True, steps=2),
    Case(pp=2, cp=2, ep=2, schedule="dualpipe", payload="latent", recompute="full", tied=True, steps=2),
    Case(dp=2, cp=2, ep=4, schedule="overlapped_1f1b", skew=True, steps=2),
    Case(dp=4, ep=4, schedule="overlapped_1f1b", ranks_per_node=2, padding=True),
    Case(pp=2, dp=2, ep=2, schedule="dualpipe", max_recv_rows=6, skew=True, steps=2),
]


def over_contexts() -> list[Case]:
    """Every exchange of every payload at 2 and 4 ranks, each with another schedule, fold of experts and variant."""
    schedules_ = ("1f1b", "split_1f1b", "zb_h1", "dualpipe", "overlapped_1f1b", "zbv", "dualpipev", "gpipe")
    variants: tuple[dict[str, object], ...] = (
        {"padding": True}, {"tied": True}, {"skew": True}, {"recompute": "full"}, {"recompute": "selective"},
        {"mtp_depth": 2}, {"combine": "exact"}, {"z_loss": True, "micro_batch": 2, "tied": True},
    )  # fmt: skip
    found = []
    forms = [("v3_heads", "kv"), ("v3_heads", "latent"), ("v3_yarn", "latent"), ("qwen3_heads", "kv")]
    for number, (cp, exchange, (model, payload)) in enumerate(
        product((2, 4), ("ring", "all_gather", "ulysses"), forms)
    ):
        if exchange == "ulysses" and model == "v3_yarn" and cp == 4:
            continue  # it has two heads
        schedule = schedules_[number % 8]
        pp, ep = 1 + (cp == 2 and schedule != "dualpipev"), (1, 2, cp)[number % 3]
        if pp == 1:  # which some schedules are not for
            schedule = {"zbv": "zb_h1", "dualpipe": "dualpipev"}.get(schedule, schedule)
        case = Case(pp=pp, cp=cp, ep=ep, schedule=schedule, model=model, exchange=exchange, payload=payload)
        found.append(replace(case, **variants[(number + number // 8) % 8]))
    found.append(Case(dp=2, cp=2, ep=4, pp=2, schedule="dualpipe", payload="latent", padding=True))
    return [replace(case, steps=3, total_steps=3) for case in found]


@pytest.mark.parametrize("case", FEW + FEATURES, ids=str)
def test_layout_equals_one_process(case: Case) -> None:
    record = run(case)
    assert_equal(case, record)
    assert_same_order(record)
    assert_reduced_once(record)


def all_layouts() -> list[Case]:
    found = []
    for pp, dp in product((1, 2, 4), (1, 2, 4)):
        for ep in (1, 2, 4):
            if pp * dp <= 8 and dp % ep == 0:
                for number, (tied, combine) in enumerate(product((False, True), ("dedup", "exact"))):
                    turn = number + pp + dp + ep
                    schedule = ("1f1b", "gpipe", "split_1f1b", "zb_h1", "zbv", "interleaved_1f1b")[turn % 6]
                    micro_batch = 2 if number % 2 and dp < 4 else 1
                    micro_batches = GLOBAL_BATCH // (dp * micro_batch)
                    if schedule == "zbv" and micro_batches < 2 * pp - 1:
                        schedule = "zb_h1"  # runs at any size
                    if schedule == "interleaved_1f1b" and micro_batches % pp:
                        schedule = "1f1b"
                    case = Case(pp, dp, ep, schedule, micro_batch, combine, tied)
                    stages = 2 if schedule == "interleaved_1f1b" else 1
                    again = ("none", "full", "none", "selective", "attention")[turn % 5]
                    extra = {"padding": number == 1, "skew": number == 2, "recompute": again}
                    found.append(replace(case, virtual_stages=stages, **extra))
    return found


def uneven() -> list[Case]:
    """Stages of any size: embedding, head and MTP by themselves or together, several stages a rank."""
    apart, full, front = (
        ("embedding", "4L", "head", "mtp"),
        ("embedding+3L", "1L+head+mtp"),
        ("embedding+4L", "mtp+head"),
    )
    return [
        Case(4, 1, 1, "1f1b", stages=apart),
        Case(4, 2, 2, "zb_h1", stages=("embedding+1L", "2L", "1L+head", "mtp"), tied=True),
        Case(2, 2, 2, "dualpipe", stages=front, skew=True),
        Case(2, 2, 2, "dualpipev", stages=apart, tied=True, padding=True),
        Case(2, 2, 1, "interleaved_1f1b", virtual_stages=2, stages=("embedding", "1L", "3L", "head+mtp"), tied=True),
        Case(2, 2, 2, "overlapped_1f1b", stages=full),
        Case(1, 2, 2, "dualpipev", stages=("embedding+4L+head", "mtp"), mtp_depth=2),
    ]


def in_pairs() -> list[Case]:
    """DualPipe, each stage on two ranks, up to eight stages; and the other schedules with pairs."""
    small = [
        Case(2, 1, 1, "dualpipe", combine="exact", tied=True, padding=True),
        Case(2, 2, 1, "dualpipe", tied=True, skew=True),
        Case(2, 2, 2, "dualpipe", combine="exact", padding=True),
        Case(2, 2, 2, "dualpipe", tied=True, skew=True),
        Case(4, 1, 1, "dualpipe", tied=True, padding=True),
    ]
    small += [Case(1, 2, 2, "dualpipev", tied=True, padding=True), Case(1, 4, 4, "overlapped_1f1b", skew=True)]
    small += [Case(2, 2, 2, "dualpipev", combine="exact"), Case(4, 2, 2, "overlapped_1f1b", tied=True)]
    large = [Case(4, 2, ep, "dualpipe", tied=tied, rows=16) for ep, tied in ((1, True), (2, False), (2, True))] + [
        Case(8, 1, 1, "dualpipe", tied=tied, rows=16, layers=8) for tied in (False, True)
    ]
    return small + large


def other_models() -> list[Case]:
    """Grouped queries, softmax routing, YaRN and the z-loss, over layouts and schedules."""
    layouts = [
        Case(dp=4, ep=4, micro_batch=2, padding=True),
        Case(pp=2, dp=4, ep=2, schedule="split_1f1b", tied=True),
        Case(pp=2, dp=2, schedule="zbv", skew=True),
        Case(pp=2, dp=2, ep=2, schedule="dualpipe", tied=True, padding=True),
    ]
    return [replace(case, model=model, z_loss=True) for model in ("qwen3", "v3_yarn") for case in layouts]


def other_ways() -> list[Case]:
    """Rows in fp8 and by two hops, in whole micro-batches and in pairs."""
    return [
        Case(pp=2, dp=4, ep=4, schedule="dualpipe", ranks_per_node=2, wire="fp8", tied=True, rows=16),
        Case(pp=2, dp=4, ep=4, schedule="zb_h1", ranks_per_node=2, combine="exact", recompute="full", padding=True),
        Case(dp=8, ep=8, ranks_per_node=4, wire="fp8", skew=True),
        Case(dp=8, ep=8, schedule="dualpipev", ranks_per_node=2, rows=16, combine="exact"),
        Case(pp=2, dp=2, ep=2, schedule="split_1f1b", wire="fp8", combine="exact", recompute="selective"),
        Case(dp=4, ep=2, ranks_per_node=4, wire="fp8", model="qwen3"),
        Case(pp=2, dp=1, schedule="dualpipe", wire="fp8", skew=True),
        Case(dp=4, ep=4, schedule="overlapped_1f1b", max_recv_rows=8, skew=True, recompute="full"),
        Case(dp=4, ep=4, schedule="overlapped_1f1b", ranks_per_node=2, max_recv_rows=5, wire="fp8", skew=True),
        Case(pp=2, dp=2, ep=2, schedule="zb_h1", combine="exact", max_recv_rows=7, padding=True),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("case", all_layouts() + other_models(), ids=str)
def test_every_layout_equals_one_process(case: Case, precision: str) -> None:
    case = replace(case, precision=precision)
    record = run(case)
    assert_equal(case, record)
    assert_same_order(record)
    assert_reduced_once(record)


@pytest.mark.slow
@pytest.mark.parametrize("case", over_contexts(), ids=str)
def test_shared_sequences_equal_one_process(case: Case) -> None:
    record = run(case)
    assert_equal(case, record)
    assert_same_order(record)
    assert_reduced_once(record)


@pytest.mark.slow
@pytest.mark.parametrize("case", in_pairs() + uneven() + other_ways(), ids=str)
def test_pairs_uneven_stages_and_other_ways_equal_one_process(case: Case) -> None:
    record = run(case)
    assert_equal(case, record)
    assert_same_order(record)


def test_layout_equals_one_process_in_fp32() -> None:
    case = Case(pp=2, dp=2, ep=2, micro_batch=2, precision="fp32")
    assert_equal(case, run(case))


def moving() -> list[Case]:
    """Experts move between steps: over schedules, replicas, two holders, several stages a rank, uneven shards."""
    return [
        Case(dp=4, ep=4, placement=1, tied=True),
        Case(dp=8, ep=2, placement=1, combine="exact"),
        Case(dp=4, ep=4, placement=2, ranks_per_node=2),
        Case(dp=1, cp=2, ep=2, placement=2),
        Case(pp=2, dp=4, ep=2, placement=1, schedule="dualpipe", skew=True, rows=16),
        Case(pp=4, dp=2, ep=2, placement=2, schedule="dualpipe", rows=16),
        Case(pp=2, dp=2, ep=2, placement=1, schedule="zbv", recompute="full"),
        Case(pp=2, dp=2, ep=2, placement=2, schedule="dualpipev", padding=True),
        Case(pp=2, dp=2, ep=2, placement=2, schedule="interleaved_1f1b", virtual_stages=2, model="qwen3"),
        Case(pp=2, dp=4, ep=4, placement=1, schedule="overlapped_1f1b", model="v3_yarn", z_loss=True, rows=16),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", moving(), ids=str)
def test_moving_experts_changes_no_mathematics(case: Case) -> None:
    record = run(case)
    assert_equal(case, record)
    assert_same_order(record)


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
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


def test_gradient_bits_do_not_depend_on_the_schedule() -> None:
    """Among schedules with one holder per stage, and between split and whole backward."""
    case = Case(pp=2, dp=2, ep=2, precision="fp32", steps=2)
    plain = run(case)
    for schedule in ("gpipe", "split_1f1b", "zb_h1", "overlapped_1f1b"):
        worst = differences(plain, run(replace(case, schedule=schedule)))
        assert not any(worst.values()), (schedule, worst)


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


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, here and in the ranks forked here."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


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


# The harness must go red under each of these.


def expert_gradient_times_ep(trainer: Trainer) -> None:
    for named in trainer.named:
        if named.expert:
            named.parameter.register_hook(lambda grad: grad * trainer.groups.ep.size)


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
