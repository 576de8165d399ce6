"""Recompute in a block and a stage: what is kept, the same bits, routing and counting once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from layout_cases import Case, config_of, global_batch
from live_bytes import LiveBytes
from torch import Tensor

from moe_engine.config.schema import Config, ModelConfig, MoESection, RecomputeConfig
from moe_engine.model.attention import sequence_context
from moe_engine.model.batch import Batch, count_items
from moe_engine.model.block import Block
from moe_engine.model.transformer import LossRule
from moe_engine.ops.recompute import recomputed_names
from moe_engine.ops.route import route
from moe_engine.ops.wgrad_queue import WgradQueue
from moe_engine.schedule.action import Action, Kind
from moe_engine.schedule.check import count_memory
from moe_engine.trainer import Trainer

MODES = {
    "none": RecomputeConfig(),
    "norm": RecomputeConfig("selective", ["norm"]),
    "mla_up": RecomputeConfig("selective", ["mla_up"]),
    "swiglu": RecomputeConfig("selective", ["swiglu"]),
    "attention": RecomputeConfig("selective", ["attention"]),
    "selective": RecomputeConfig("selective"),
    "all four": RecomputeConfig("selective", ["norm", "mla_up", "swiglu", "attention"]),
    "full": RecomputeConfig("full"),
}
B, S, T = 2, 32, 64
MODEL = ModelConfig(
    dim=64, num_heads=2, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    num_experts=8, top_k=2, expert_hidden=32, num_shared_experts=1, dense_hidden=96,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def no_collector() -> Iterator[None]:
    """Graphs must go by themselves. (torch leaves circles at a process's first backward: that one comes before.)"""
    with LiveBytes():
        one_backward("none", dense=False)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def block_of(mode: str, dense: bool) -> Block:
    block = Block(MODEL, MoESection(), dense, None, torch.float32, None, recomputed_names(MODES[mode]))
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=chance) * 0.1)
    return block


def one_backward(mode: str, dense: bool) -> tuple[dict[str, int], list[Tensor]]:
    """Bytes alive after the forward, the input gradients and the weight gradients; outputs and gradients."""
    block, queue = block_of(mode, dense), WgradQueue()
    place = torch.arange(S).expand(B, S)
    zeros = torch.zeros(1, B, S, dtype=torch.int64)
    batch = Batch(zeros, zeros, place, torch.zeros(B, S, dtype=torch.int32), None)
    context = sequence_context(batch, MODEL, torch.float32)
    x = torch.randn(T, MODEL.dim, generator=torch.Generator().manual_seed(1), requires_grad=True)
    d_y = torch.ones(T, MODEL.dim)
    with torch.no_grad():
        block(x, context)  # makes the masks of attention, which all layers share
    held = {}
    with LiveBytes() as live:
        y, aux = block(x, context, queue)
        held["F"] = live.bytes()
        result = y.detach().clone()
        with queue.defer(""):
            torch.autograd.backward([y] if aux is None else [y, aux.sum()], [d_y] if aux is None else [d_y, None])
        del y, aux
        held["I"] = live.bytes()
        queue.run("")
        held["W"] = live.bytes()
    return held, [result, *(p.grad for p in (x, *block.parameters()) if p.grad is not None)]


def test_kept_bytes_of_a_dense_block() -> None:
    """By arithmetic, in fp32: what each name takes away from what a block keeps for backward."""
    kept = {mode: one_backward(mode, dense=True)[0]["F"] for mode in MODES}
    model, number = MODEL, 4
    norms = 2 * (model.dim + 1) + (model.q_lora_rank + 1) + (model.kv_lora_rank + 1)  # outputs, and 1/rms
    assert kept["none"] - kept["norm"] == number * T * norms
    assert kept["none"] - kept["swiglu"] == number * T * model.dense_hidden
    assert kept["attention"] < kept["none"]
    # everything: the output of the block beside what its segments were given
    assert kept["full"] == number * T * model.dim


def test_kept_bytes_of_attention() -> None:
    """It keeps queries, keys, values, its output and a number per row and head."""
    kept = {mode: one_backward(mode, dense=True)[0]["F"] for mode in ("none", "mla_up", "attention", "all four")}
    heads, head = MODEL.num_heads, MODEL.qk_nope_head_dim + MODEL.qk_rope_head_dim
    rope = 4 * T * MODEL.qk_rope_head_dim  # what mla_up is given and nothing else keeps
    assert kept["none"] - kept["mla_up"] >= 4 * T * heads * 2 * head - rope
    assert kept["none"] - kept["attention"] >= 4 * T * heads * (MODEL.v_head_dim + 1)
    # with both, nothing of the attention is left but the latents that its segments were given
    without = kept["none"] - kept["all four"]
    assert without >= 4 * T * heads * (2 * (head + MODEL.v_head_dim)) + 4 * T * MODEL.dense_hidden


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "moe"])
def test_more_recompute_keeps_less_and_leaves_nothing_behind(dense: bool) -> None:
    found = {mode: one_backward(mode, dense) for mode in MODES}
    held = {mode: each[0] for mode, each in found.items()}
    kept = [held[mode]["F"] for mode in ("none", "norm", "selective", "all four", "full")]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 5
    assert kept[0] > (8 if dense else 4) * kept[-1]
    # between I and W, and after, recompute holds no byte more
    assert len({each["I"] for each in held.values()}) == 1
    assert len({each["W"] for each in held.values()}) == 1
    # and after W nothing is left but the output and the gradients
    assert held["none"]["W"] == sum(tensor.nbytes for tensor in found["none"][1])


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "moe"])
def test_same_bits(mode: str, dense: bool) -> None:
    plain, again = one_backward("none", dense)[1], one_backward(mode, dense)[1]
    assert len(plain) == len(again) >= 10
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def config(mode: str) -> Config:
    case = Case(precision="fp32", micro_batch=2)
    found = config_of(case)
    found.recompute = MODES[mode]
    return found


def micro_batches(count: int) -> list[Batch]:
    rows = global_batch(Case(precision="fp32"), 0)
    return [rows.slice_rows(2 * i, 2 * i + 2) for i in range(count)]


@pytest.mark.parametrize("mode", ["selective", "all four", "full"])
def test_routing_and_counting_happen_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied logits everywhere, so that a second choice could differ; each is made once and counted once."""
    calls = [0]

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return route(*args)

    monkeypatch.setattr("moe_engine.moe.router.route", counted)
    results = {}
    for name in ("none", mode):
        trainer = Trainer(config(name), 0, torch.device("cpu"))
        for layer in trainer.moe_layers().values():
            layer.router.weight.data.zero_()
        calls[0] = 0
        result = trainer.step(micro_batches(4))
        assert calls[0] == 4 * len(trainer.moe_layers())
        for counts in result.expert_counts.values():
            assert int(counts.sum()) == 8 * 16 * trainer.config.model.top_k
        biases = [layer.router.expert_bias for layer in trainer.moe_layers().values()]
        results[name] = [
            torch.tensor(result.loss),
            torch.tensor(result.grad_norm),
            *result.expert_counts.values(),
            *biases,
        ]
    assert all(torch.equal(a, b) for a, b in zip(results["none"], results[mode], strict=True))


def actions(text: str) -> list[Action]:
    return [Action(Kind(word[0]), int(word[1:]), 0) for word in text.split()]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_memory_between_actions_is_what_check_says(mode: str) -> None:
    """A split backward with weight gradients waiting: activations alive and queued ones, times their sizes."""
    trainer = Trainer(config(mode), 0, torch.device("cpu"))
    batches = micro_batches(4)
    rule = LossRule(count_items(batches), 0.3)
    lists = [actions("F0 F1 F2 I0 I1 W0 F3 I2 W1 I3 W2 W3")]
    trainer.optimizer.zero_grad()
    found: list[int] = []
    act = trainer.executor._act
    with LiveBytes() as live:

        def watched(step: object, action: Action) -> None:
            act(step, action)  # type: ignore[arg-type]
            found.append(live.bytes())

        trainer.executor._act = watched  # type: ignore[method-assign, assignment]
        before = live.bytes()
        trainer.executor.run([actions("F0 I0 W0")], batches, rule)
        small = before + found[2]  # what a pass itself holds: its sums
        activation, weight_gradient = found[0] - small, found[1] - small
        found.clear()
        trainer.executor.run(lists, batches, rule)
    expected = [count_memory([lists[0][: n + 1]], activation, weight_gradient) for n in range(len(lists[0]))]
    peaks = [report.peak_held[0] + small for report in expected]
    for n, bytes_now in enumerate(found):
        assert bytes_now <= 1.02 * peaks[n], (mode, lists[0][n])
    assert max(found) >= 0.98 * peaks[-1]
