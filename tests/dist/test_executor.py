"""The one executor on real stages: every small size of each schedule, memory as `check` says, wrong lists refused."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.fx.experimental.symbolic_shapes  # noqa: F401 - before the fork: 1 s at a rank's first backward
from layout_cases import PRECISIONS
from ranks import run_ranks
from torch import Tensor

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import (
    Config,
    ModelConfig,
    MoESection,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from moe_engine.distributed.collectives import CollectiveLog, CollectiveRecord
from moe_engine.model.batch import Batch, count_items
from moe_engine.model.transformer import LossRule
from moe_engine.pipeline.executor import Executor, StepSums, _Step
from moe_engine.pipeline.generate import generate
from moe_engine.schedule.action import Action, Kind
from moe_engine.schedule.check import check
from moe_engine.schedule.schedules import num_stages, schedule
from moe_engine.trainer import Trainer

ONE_STAGE_A_RANK = ("gpipe", "1f1b", "split_1f1b", "zb_h1")
VIRTUAL_STAGES = {"interleaved_1f1b": 2}
MICRO_BATCHES = range(1, 7)
RUN_ON_TWO_RANKS = {"zbv": 4, "dualpipev": 3, "dualpipe": 2, "interleaved_1f1b": 3}  # how many of them run on two ranks
LENGTH = 4


def tiny_config(
    pp: int = 1, dp: int = 1, ep: int = 1, name: str = "1f1b", micro_batches: int = 2, layers: int = 3
) -> Config:
    """The smallest model with every part: dense and MoE layers, MTP, a tied head."""
    model = ModelConfig(
        vocab_size=13, dim=8, num_layers=layers, num_dense_layers=2, dense_hidden=8, num_heads=1, kv_lora_rank=4,
        qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, num_experts=4, top_k=2, expert_hidden=4,
        mtp_depth=1, tied_head=True, init_std=0.3,
    )  # fmt: skip
    return Config(
        model=model,
        moe=MoESection(aux_loss_weight=0.01),
        parallel=ParallelConfig(pp=pp, dp=dp, ep=ep),
        pipeline=PipelineConfig(schedule=name, virtual_stages=VIRTUAL_STAGES.get(name, 1)),
        precision=PRECISIONS["fp64"],
        optim=OptimConfig(),
        train=TrainConfig(global_batch=micro_batches * dp, micro_batch=1, seq_len=LENGTH, steps=10),
    )


def rows(count: int, seed: int = 0) -> list[Batch]:
    """Micro-batches of one row."""
    stream = torch.randint(0, 13, (count, LENGTH + 2), generator=torch.Generator().manual_seed(seed))
    tokens, labels = (torch.stack([stream[:, k + i : k + i + LENGTH] for k in (0, 1)]) for i in (0, 1))
    place = torch.arange(LENGTH).expand(count, -1)
    batch = Batch(tokens, labels, place, torch.zeros_like(place, dtype=torch.int32), None)
    return [batch.slice_rows(i, i + 1) for i in range(count)]


class Watched(Executor):
    """Counts what is really alive: forward graphs, by a node in each, and weight gradients waiting."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor.stages, executor.groups)
        self.graphs: list[weakref.ref[Any]] = []
        self.peak_live = self.peak_graphs = self.peak_queued = self.peak_held = 0
        for stage in self.stages.values():
            stage.register_forward_hook(self._mark)

    def _mark(self, _stage: Any, _inputs: Any, output: Any) -> Any:
        x = _Marker.apply(output.x, self.graphs)
        loss = None if output.loss is None else _Marker.apply(output.loss, [])
        return replace(output, x=x, loss=loss)

    def _forward(self, step: _Step, stage: int, m: int) -> None:
        super()._forward(step, stage, m)
        self._count(step)

    def _backward(self, step: _Step, stage: int, m: int, defer: bool) -> None:
        super()._backward(step, stage, m, defer)
        self._count(step)

    def _count(self, step: _Step) -> None:
        alive, queued = sum(graph() is not None for graph in self.graphs), len(self.queue._batches)
        assert alive == len(step.live), "a graph outlives its backward"
        self.peak_live, self.peak_queued = max(self.peak_live, len(step.live)), max(self.peak_queued, queued)
        self.peak_held = max(self.peak_held, alive + queued)


class _Marker(torch.autograd.Function):
    """The identity, with a node whose life can be watched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nodes: list[weakref.ref[Any]]) -> Tensor:
        nodes.append(weakref.ref(ctx))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def run_once(trainer: Trainer, executor: Executor, lists: Sequence[Sequence[Action]], count: int) -> dict[str, Any]:
    """One pass over `count` micro-batches: sums and raw gradients."""
    batches = rows(count, seed=count)
    trainer.optimizer.zero_grad()
    sums: StepSums = executor.run(lists, batches, LossRule(count_items(batches), 0.3))
    counts = trainer._take_expert_counts()
    trainer.optimizer.reduce_gradients()
    gradients = {(s.name, s.start): s.gradient.clone() for s in trainer.optimizer.named_gradient_shards()}
    return {"loss_sums": sums.loss_sums, "aux": sums.aux, "gradients": gradients, "counts": counts}


def _all_sizes(
    rank: int, pp: int, names: Sequence[str], counts: Sequence[int], layers: int
) -> dict[tuple[str, int], Any]:
    """Every schedule and number of micro-batches on one set of stages."""
    found: dict[tuple[str, int], Any] = {}
    log = CollectiveLog()
    config = tiny_config(pp, name=names[0], micro_batches=2 * pp, layers=layers)
    trainer = Trainer(config, rank, torch.device("cpu"), log)
    gc.disable()  # graphs must go by themselves
    fired: Counter[str] = Counter()
    for named in trainer.named:
        named.parameter.register_post_accumulate_grad_hook(lambda _, named=named: fired.update(named.names))
    for name in names:
        virtual_stages = VIRTUAL_STAGES.get(name, 1)
        for count in counts:
            try:
                lists = schedule(name, pp, count, virtual_stages)
            except ConfigError as error:
                found[name, count] = str(error)
                continue
            report = check(lists, num_stages(name, pp, virtual_stages), count)
            executor = Watched(trainer.executor)
            log.records.clear()
            fired.clear()
            result = run_once(trainer, executor, lists, count)
            for stage in executor.stages.values():
                stage._forward_hooks.clear()
            assert executor.peak_live == report.peak_activations[rank], (name, count)
            assert executor.peak_queued == report.peak_weight_gradients[rank], (name, count)
            assert executor.peak_held == report.peak_held[rank], (name, count)
            assert len(executor.queue) == 0
            found[name, count] = result | {"log": list(log.records), "fired": Counter(fired)}
    return found


def whole_gradients(ranks: list[dict[tuple[str, int], Tensor]]) -> dict[str, Tensor]:
    """The shards of all ranks put together, by name."""
    parts: dict[str, list[Tensor]] = {}
    for (name, start), part in sorted((item for rank in ranks for item in rank.items()), key=lambda item: item[0]):
        assert start == sum(len(each) for each in parts.setdefault(name, [])), f"{name}: shards do not join"
        parts[name].append(part.reshape(-1).double())
    return {name: torch.cat(pieces) for name, pieces in parts.items()}


def assert_same_order(logs: list[list[CollectiveRecord]], where: object) -> None:
    """Each communicator was told the same by all its ranks; the messages of an edge by name, as they are tagged."""
    orders: dict[str, set[tuple[str, ...]]] = {}
    for log in logs:
        own: dict[str, list[str]] = {}
        for entry in log:
            op = "message" if entry.op in ("send", "receive") else entry.op
            own.setdefault(entry.communicator, []).append(f"{op} {entry.label} {entry.bytes}")
        for communicator, entries in own.items():
            orders.setdefault(communicator, set()).add(tuple(entries))
    assert orders, where
    assert all(len(found) == 1 for found in orders.values()), (where, orders)


@cache
def truth(layers: int, count: int) -> dict[str, Any]:
    """One rank without any schedule worth the name: forward, backward, micro-batch by micro-batch."""
    trainer = Trainer(tiny_config(layers=layers), 0, torch.device("cpu"))
    lists = [[Action(kind, m, 0) for m in range(count) for kind in (Kind.F, Kind.B)]]
    return run_once(trainer, trainer.executor, lists, count)


def assert_all_sizes(pp: int, names: Sequence[str], counts: Sequence[int]) -> Counter[str]:
    """Each (schedule, micro-batches) is refused with what works, or runs and equals one rank; how many ran, by name."""
    layers = max(3, num_stages(names[0], pp, VIRTUAL_STAGES.get(names[0], 1)) - 1)
    results = run_ranks(pp, _all_sizes, pp, names, counts, layers, time_limit=60.0 * pp)
    ran: Counter[str] = Counter()
    for name, count in product(names, counts):
        found = [result[name, count] for result in results]
        if isinstance(found[0], str):
            assert name not in (*ONE_STAGE_A_RANK, "overlapped_1f1b") and len(set(found)) == 1
            assert f"micro_batches={count}" in found[0] and "use" in found[0]
            continue
        ran[name] += 1
        expected = truth(layers, count)
        assert torch.equal(sum(each["loss_sums"] for each in found), expected["loss_sums"]), (name, count)
        assert sum(each["aux"] for each in found).tolist() == pytest.approx(expected["aux"].tolist(), rel=1e-12)
        gradients = whole_gradients([each["gradients"] for each in found])
        expected_gradients = whole_gradients([expected["gradients"]])
        assert gradients.keys() == expected_gradients.keys()
        for key, gradient in expected_gradients.items():
            error = (gradients[key] - gradient).norm()
            assert error <= 1e-12 * gradient.norm(), (name, count, key)
        fired = sum((each["fired"] for each in found), Counter())
        assert fired.pop("embedding.weight") >= count
        assert fired == dict.fromkeys(gradients.keys() - {"embedding.weight"}, count), (name, count)
        loads = {key: value for each in found for key, value in each["counts"].items()}
        assert {key: value.tolist() for key, value in loads.items()} == {
            key: value.tolist() for key, value in expected["counts"].items()
        }
        if pp > 1:
            assert_same_order([each["log"] for each in found], (name, count))
    return ran


@pytest.mark.parametrize(
    ("pp", "names"),
    [
        (1, ("gpipe", "split_1f1b")),  # on one rank, 1f1b is the truth itself and zb_h1 nearly split_1f1b
        (2, (*ONE_STAGE_A_RANK, "overlapped_1f1b")),
        (4, ONE_STAGE_A_RANK),
        (2, ("zbv", "dualpipev")),
        (2, ("dualpipe",)),
        (2, ("interleaved_1f1b",)),
    ],
    ids=["pp1", "pp2", "pp4", "pp2_in_a_v", "pp2_both_ways", "pp2_in_turns"],
)
def test_every_size_runs_or_is_refused_and_gives_the_same(pp: int, names: tuple[str, ...]) -> None:
    """Fewer micro-batches than stages too. Refused sizes say what works; those that run equal one rank's gradients.

    A hook on a parameter fires once a micro-batch, also where its weight gradient waits; the table of a tied head has
    several uses, each with a gradient of its own.
    """
    ran = assert_all_sizes(pp, names, MICRO_BATCHES)
    assert ran == {name: RUN_ON_TWO_RANKS.get(name, len(MICRO_BATCHES)) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pp", "names"),
    [
        (3, (*ONE_STAGE_A_RANK, "overlapped_1f1b")),
        (3, ("zbv", "dualpipev")),
        (3, ("interleaved_1f1b",)),
        (4, ("overlapped_1f1b",)),
        (4, ("zbv", "dualpipev")),
        (4, ("dualpipe",)),
        (4, ("interleaved_1f1b",)),
        (8, (*ONE_STAGE_A_RANK, "overlapped_1f1b")),
        (8, ("dualpipe",)),
    ],
    ids=lambda value: f"pp{value}" if isinstance(value, int) else value[0],
)
def test_every_size_runs_or_is_refused_on_more_ranks(pp: int, names: tuple[str, ...]) -> None:
    """Case 27 on real ranks: from one micro-batch to more than two for each stage; none hangs."""
    ran = assert_all_sizes(pp, names, sorted({1, 2, 3, pp - 1, pp, pp + 1, 2 * pp - 1, 2 * pp, 2 * pp + 2}))
    assert ran.keys() == set(names), "a schedule that ran at no size"


def actions(text: str) -> list[Action]:
    """`F0 I0 W0 F1@3`: kind, micro-batch, stage (0 where it is not said)."""
    found = []
    for word in text.split():
        micro_batch, _, stage = word[1:].partition("@")
        found.append(Action(Kind(word[0]), int(micro_batch), int(stage or 0)))
    return found


@pytest.mark.parametrize("text", [
    "F0 F1 B0", "F0 B0 F1 I1", "F0 F1 I0 I1 W0", "B0", "F0 B0 B0", "F0 W0", "F0 B0 W0", "F0 I0 W0 W0", "F0 F0 B0",
    "F0 F1 I0 I0", "F0@5", "F0 B0@1", "F7 B7",
])  # fmt: skip
def test_lists_that_do_not_add_up_raise(text: str) -> None:
    trainer = Trainer(tiny_config(), 0, torch.device("cpu"))
    trainer.optimizer.zero_grad()
    batches = rows(2)
    with pytest.raises((ValueError, KeyError, IndexError)):
        trainer.executor.run([actions(text)], batches, LossRule(count_items(batches), 0.3))


def test_a_job_refuses_another_number_of_micro_batches() -> None:
    trainer = Trainer(tiny_config(micro_batches=2), 0, torch.device("cpu"))
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"{count} micro-batches: this job has 2"):
            trainer.step(rows(count))
    assert trainer.step(rows(2)).items.tokens == 2 * LENGTH


def _generate(rank: int, pp: int, dp: int, ep: int, name: str) -> list[list[int]]:
    trainer = Trainer(tiny_config(pp, dp, ep, name, micro_batches=4), rank, torch.device("cpu"))
    found = [generate(trainer.executor, [1, 2, 3], 5, 64, seed=seed) for seed in (0, 1)]
    return [*found, generate(trainer.executor, [1, 2, 3], 50, max_len=5)]


def test_all_ranks_of_any_layout_draw_the_same_text() -> None:
    expected = _generate(0, 1, 1, 1, "1f1b")
    assert [len(text) for text in expected] == [8, 8, 5] and expected[0] != expected[1]
    assert run_ranks(4, _generate, 2, 2, 2, "1f1b") == [expected] * 4
    assert run_ranks(2, _generate, 2, 1, 1, "zbv") == [expected] * 2
    assert run_ranks(4, _generate, 2, 2, 2, "dualpipe") == [expected] * 4
