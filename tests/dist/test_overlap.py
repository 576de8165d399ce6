"""The overlapped pair on real ranks: the bits of the plain order, exchanges in flight, one order of collectives."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layout_cases import Case, config_of
from layouts import differences, rank_batches, run
from ranks import run_ranks
from torch import Tensor

import moe_kernels
from moe_engine.config.schema import Config
from moe_engine.distributed.collectives import CollectiveLog
from moe_engine.distributed.device import pair_sms
from moe_engine.model.transformer import LossRule
from moe_engine.ops import grouped_linear
from moe_engine.pipeline.executor import Executor
from moe_engine.schedule import pair
from moe_engine.trainer import Trainer

# A dense block at the front, MTP and the loss at the end, stages of different numbers of blocks.
CASES = [
    Case(dp=2, ep=2, schedule="overlapped_1f1b", precision="fp32", tied=True, recompute="selective"),
    Case(dp=2, ep=2, schedule="dualpipev", precision="bf16", combine="exact", mtp_depth=2, tied=True),
    Case(pp=2, dp=2, ep=2, schedule="dualpipe", precision="bf16", tied=True, padding=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_overlapped_pair_has_the_bits_of_the_plain_order(case: Case) -> None:
    case = replace(case, steps=2)
    woven, plain = run(case), run(replace(case, overlap=False))
    worst = differences(woven, plain)
    assert not any(worst.values()), worst
    assert [record.label for record in woven.logs[0]] != [record.label for record in plain.logs[0]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 2, 2, "overlapped_1f1b", precision="bf16", skew=True),
        Case(2, 2, 2, "overlapped_1f1b", precision="fp32", mtp_depth=2, tied=True,
             stages=("embedding+1L", "3L+head+mtp")),
        Case(1, 4, 4, "dualpipev", precision="fp32", mtp_depth=2, tied=True, skew=True, padding=True),
        Case(2, 2, 2, "dualpipev", precision="bf16", mtp_depth=0, padding=True, recompute="full"),
        Case(4, 2, 2, "dualpipe", precision="fp32", mtp_depth=2, tied=True, layers=7, rows=16),
    ],
    ids=str,
)  # fmt: skip
def test_bits_of_the_plain_order_in_other_layouts(case: Case) -> None:
    worst = differences(run(replace(case, steps=2)), run(replace(case, steps=2, overlap=False)))
    assert not any(worst.values()), worst


class Times:
    """A recorder: when each label starts and ends."""

    def __init__(self) -> None:
        self.started: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    def start(self, label: str) -> None:
        self.started[label] = time.perf_counter()

    def end(self, label: str) -> None:
        self.ended[label] = time.perf_counter()


def _in_flight(rank: int, order: str) -> list[bool]:
    """For each attn(F) of each pair: whether a combine(B) was started before it and waited for after it."""
    case = Case(dp=2, ep=2, schedule="overlapped_1f1b", precision="fp32")
    trainer, times = Trainer(config_of(case), rank, torch.device("cpu")), Times()
    executor = Executor(trainer.stages, trainer.groups, order, times)
    batches = rank_batches(trainer, case, 0)
    trainer.optimizer.zero_grad()
    executor.run(trainer.lists, batches, LossRule(trainer.count_items(batches), 0.3))
    blocks = trainer.stages[0].num_blocks
    found = []
    for label in times.started:
        forward = re.fullmatch(r"F(\d+)@0 attn (\d+)", label)
        if forward and int(forward[1]) > 0:  # the first forward is alone
            combine = f"B{int(forward[1]) - 1}@0 combine {blocks - 1 - int(forward[2])}"
            if combine in times.started:  # a dense block has none
                before = times.started[combine] <= times.started[label]
                found.append(before and times.ended[label] <= times.started[f"{combine} wait"])
    return found


def test_attn_of_the_forward_runs_while_combine_of_the_backward_is_in_flight() -> None:
    for found in run_ranks(2, _in_flight, pair.BLOCKING):
        assert len(found) == 3 * 4 and all(found)  # 3 pairs; of 5 blocks, one is dense


def test_the_plain_order_has_nothing_in_flight() -> None:
    for found in run_ranks(2, _in_flight, pair.ONE_AFTER_THE_OTHER):
        assert len(found) == 3 * 4 and not any(found)


def _programs(rank: int, precision: str) -> set[tuple[bool, int | None]]:
    """Of all grouped products of a pass: whether it ran in a pair, and how many multiprocessors it was told to use."""
    case = Case(dp=2, ep=2, schedule="overlapped_1f1b", precision=precision)
    trainer, times = Trainer(config_of(case), rank, torch.device("cpu")), Times()
    told: set[tuple[bool, int | None]] = set()

    def watched(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run_it(*args: Any, num_sms: int | None = None, **options: Any) -> Tensor:
            in_pair = any(label.startswith("[") for label in times.started.keys() - times.ended.keys())
            told.add((in_pair, num_sms))
            return product(*args, num_sms=num_sms, **options)

        return run_it

    for name in ("grouped_gemm", "grouped_wgrad", "grouped_gemm_fp8", "grouped_wgrad_fp8"):
        for place in (moe_kernels, grouped_linear):
            if hasattr(place, name):
                setattr(place, name, watched(getattr(place, name)))
    executor = Executor(trainer.stages, trainer.groups, pair.LAUNCHING, times, pair_sms=7)
    batches = rank_batches(trainer, case, 0)
    trainer.optimizer.zero_grad()
    executor.run(trainer.lists, batches, LossRule(trainer.count_items(batches), 0.3))
    return told


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_products_of_a_pair_leave_multiprocessors_to_its_exchanges(precision: str) -> None:
    """Forward, backward and waiting weight gradients alike; outside of pairs they have them all."""
    for told in run_ranks(2, _programs, precision):
        assert told == {(True, 7), (False, None)}


def test_how_many_multiprocessors_a_pair_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pair_sms(torch.device("cpu"), 20) is None
    for there, used in ((132, 112), (20, 1)):
        properties = SimpleNamespace(multi_processor_count=there)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, properties=properties: properties)
        assert pair_sms(torch.device("cuda", 0), 20) == used


@pytest.mark.parametrize("order", [pair.BLOCKING, pair.LAUNCHING, None])
def test_exchanges_of_two_hops_have_one_order_on_all_ranks(order: str | None) -> None:
    """Case 26: between nodes, within nodes and counts together, with and without a second thread."""
    case = Case(dp=4, ep=4, schedule="overlapped_1f1b", ranks_per_node=2)
    found = [enqueued for enqueued, _ in run_ranks(4, _orders, config_of(case), case, order)]
    assert all(enqueued == found[0] for enqueued in found)
    assert sum(label.endswith("micro_batch 0 combine") for label in found[0]) == 2 * 4  # hops, blocks with experts
    if order == pair.BLOCKING:  # nothing comes between the hops of an exchange
        hops = [label for label in found[0] if label.endswith((" combine", " combine backward"))]
        assert hops[::2] == hops[1::2]


def _orders(rank: int, config: Config, case: Case, order: str | None) -> tuple[list[str], list[str]]:
    """The exchanges of a rank as enqueued, and as its list says."""
    log = CollectiveLog()
    trainer = Trainer(config, rank, torch.device("cpu"), log)
    executor = Executor(trainer.stages, trainer.groups, order)
    batches = rank_batches(trainer, case, 0)
    rule = LossRule(trainer.count_items(batches), 0.3)
    log.records.clear()
    trainer.optimizer.zero_grad()
    executor.run(trainer.lists, batches, rule)
    enqueued = [record.label for record in log.records if record.communicator.startswith("ep")]
    words = {
        ("counts", "F"): ["counts"],
        ("dispatch", "F"): ["dispatch slots", "dispatch x"],
        ("combine", "F"): ["combine"],
        ("combine", "B"): ["combine backward"],
        ("dispatch", "B"): ["dispatch x backward", "dispatch slots backward"],
    }
    blocks = {
        stage: [*(f"layers.{i}" for i in held.layers), *(f"mtp.{k}" for k in held.mtp)]
        for stage, held in trainer.stages.items()
    }
    expected = [
        f"{blocks[e.stage][e.block]} micro_batch {e.micro_batch} {word}"
        for e in pair.exchanges(trainer.lists[executor.here], {s: len(b) for s, b in blocks.items()}, order)
        if blocks[e.stage][e.block] != "layers.0"  # dense
        for word in words[e.phase, e.part]
    ]
    return enqueued, expected


@pytest.mark.parametrize("order", [pair.BLOCKING, pair.WITHOUT_COURIER, pair.LAUNCHING, None])
def test_each_rank_enqueues_in_the_order_of_its_list(order: str | None) -> None:
    """Case 26: over all communicators of the expert-parallel ranks together, so equal on all of them."""
    case = Case(pp=2, dp=2, ep=2, schedule="dualpipe")
    results = run_ranks(4, _orders, config_of(case), case, order)
    for enqueued, expected in results:
        assert enqueued == expected
    assert results[0] == results[1] and results[2] == results[3]
    assert results[0] != results[2]
