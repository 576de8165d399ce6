"""Any layout equals one process. Bits: test_layout_bits.py; the faults that must be seen: test_layout_faults.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, product

import pytest
from layout_cases import GLOBAL_BATCH, Case
from layouts import Record, differences, run, truth

TOLERANCE = {"fp64": 1e-10, "fp64_moments": 1e-10, "fp32": 1e-5}


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
    Case(pp=2, dp=2, ep=2, schedule="dualpipe", placement=2, precision="fp64_moments", steps=3, total_steps=3),
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
    Case(pp=2, cp=2, ep=2, schedule="zb_h1", model="gpt_oss", padding=True, steps=2),
    Case(cp=4, exchange="all_gather", payload="latent", model="v3_yarn", ep=2, mtp_depth=2, micro_batch=4, steps=2),
    Case(cp=4, exchange="ulysses", payload="latent", model="v3_heads", tied=True, micro_batch=4, steps=2),
    Case(cp=4, exchange="ulysses", model="qwen3_heads", ep=4, z_loss=True, padding=True, micro_batch=4, steps=2),
    Case(pp=2, cp=2, ep=2, schedule="dualpipe", payload="latent", recompute="full", tied=True, steps=2),
    Case(dp=2, cp=2, ep=4, schedule="overlapped_1f1b", skew=True, steps=2),
    Case(dp=4, ep=4, schedule="overlapped_1f1b", ranks_per_node=2, padding=True),
    Case(pp=2, dp=2, ep=2, schedule="dualpipe", max_recv_rows=6, skew=True, steps=2),
    Case(pp=2, dp=2, ep=2, model="experts_between", layers=5, steps=2),
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
    found += [
        Case(cp=2, ep=2, exchange="all_gather", model="gpt_oss", schedule="overlapped_1f1b", recompute="full"),
        Case(pp=2, cp=2, exchange="ulysses", model="gpt_oss", schedule="dualpipe", padding=True),
        Case(cp=4, ep=4, model="gpt_oss", schedule="dualpipev", combine="exact"),
        Case(pp=2, cp=2, ep=2, schedule="zb_h1", model="qwen2_olmoe_glm4", recompute="full"),
        Case(pp=2, dp=2, ep=2, schedule="dualpipe", model="qwen2_olmoe_glm4", tied=True, padding=True),
    ]
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


def dense_anywhere() -> list[Case]:
    """Layers with experts and without in any order, also stages that have none of one kind."""
    return [
        Case(pp=4, dp=2, ep=2, schedule="zb_h1", model="dense_between", layers=6, recompute="full", tied=True),
        Case(pp=2, dp=2, ep=2, schedule="dualpipe", model="dense_between", layers=5, padding=True),
        Case(pp=2, dp=2, ep=2, schedule="dualpipev", model="experts_between", layers=5, skew=True),
        Case(
            pp=2, dp=2, ep=2, schedule="interleaved_1f1b", virtual_stages=3, model="dense_between", layers=6, tied=True
        ),
        Case(
            dp=4, ep=4, schedule="overlapped_1f1b", model="dense_between", layers=5, recompute="selective", padding=True
        ),
        Case(pp=2, cp=2, ep=2, schedule="zbv", model="experts_between", layers=5, payload="latent"),
        Case(pp=2, dp=4, ep=2, model="experts_between", layers=5, placement=2, skew=True),
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
@pytest.mark.parametrize("case", in_pairs() + uneven() + other_ways() + dense_anywhere(), ids=str)
def test_pairs_uneven_stages_and_other_ways_equal_one_process(case: Case) -> None:
    record = run(case)
    assert_equal(case, record)
    assert_same_order(record)


def test_layout_equals_one_process_in_fp32() -> None:
    case = Case(pp=2, dp=2, ep=2, micro_batch=2, precision="fp32")
    assert_equal(case, run(case))


def rounded_moments() -> list[Case]:
    """AdamW's moments in bf16: over replicas, holders, schedules, shards cut anywhere, experts that move."""
    cases = [
        Case(dp=4, ep=2, tied=True),
        Case(pp=2, dp=2, schedule="zb_h1", recompute="full", padding=True),
        Case(pp=2, dp=4, ep=2, placement=1, schedule="dualpipe", skew=True, rows=16),
        Case(pp=2, cp=2, ep=2, schedule="overlapped_1f1b"),
        Case(pp=2, dp=2, ep=2, schedule="zbv", model="qwen3", tied=True),
    ]
    return [replace(case, precision="fp64_moments") for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("case", rounded_moments(), ids=str)
def test_rounded_moments_equal_one_process(case: Case) -> None:
    record = run(case)
    assert_equal(case, record)
    assert_same_order(record)


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
