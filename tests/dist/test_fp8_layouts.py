"""fp8 training over layouts: what of it has the same bits everywhere, and how near the rest is.

A row's codes depend on that row alone, so forward and input gradients are those of one process. The tiles of a weight
gradient run along tokens, which layouts group otherwise: it agrees by calc_diff.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_cases import Case, config_of
from layouts import differences, one_process, rank_batches, run
from measures import calc_diff
from ranks import run_ranks

import moe_kernels
from moe_engine.model import attention, core_attention
from moe_engine.ops import attention as attention_of_blocks
from moe_engine.trainer import Trainer

LAYOUTS = [
    Case(pp=2, dp=2, ep=2, micro_batch=2, combine="exact", tied=True),
    Case(pp=2, dp=2, ep=2, schedule="dualpipe", combine="exact", padding=True),
    Case(dp=4, ep=4, schedule="overlapped_1f1b", combine="exact", skew=True, wire="fp8"),
    Case(pp=2, dp=4, ep=2, schedule="zb_h1", combine="exact", model="qwen2_olmoe_glm4", z_loss=True),
    Case(cp=2, ep=2, exchange="ulysses", combine="exact", padding=True),
    Case(pp=2, cp=2, ep=2, schedule="zb_h1", combine="exact", model="qwen2_olmoe_glm4"),
]
MORE = [
    Case(pp=2, dp=2, ep=2, schedule="zb_h1", combine="exact", model="gpt_oss", recompute="full"),
    Case(cp=2, ep=2, exchange="all_gather", combine="exact", padding=True),
    Case(cp=2, ep=2, exchange="ulysses", combine="exact", model="qwen2_olmoe_glm4"),
    Case(cp=4, ep=4, combine="exact"),
    Case(pp=2, cp=2, ep=2, schedule="dualpipe", combine="exact", model="gpt_oss", recompute="full"),
]


def in_fp8(case: Case, precision: str = "fp8") -> Case:
    return replace(case, precision=precision, steps=1)


def alone(case: Case) -> Case:
    return replace(one_process(case), combine="exact", micro_batch=2)


def attends_in_blocks(_trainer: Trainer) -> None:
    """One process computes attention as ranks do among which blocks go, however short the sequence (in a process of its
    own: nobody else is changed)."""
    core_attention.is_short = attention_of_blocks.is_short = lambda *_: False


def attends_to_whole_keys(_trainer: Trainer) -> None:
    """... or as ranks among which heads go: latent attention of keys that exist whole."""
    attention.reads_latent_projections = lambda *_: False


def nudges_gradients(_trainer: Trainer) -> None:
    """Every gradient that leaves attention's core goes to the next number of bf16, up or down at random."""
    core, chance = attention.Attention.core, torch.Generator().manual_seed(3)

    def nudged(gradient: torch.Tensor) -> torch.Tensor:
        bits = gradient.view(torch.int16)
        step = torch.randint(0, 2, bits.shape, generator=chance, dtype=torch.int16) * 2 - 1
        return torch.where(gradient == 0, bits, bits + step).view(gradient.dtype)

    def watched(self: Any, projected: tuple[torch.Tensor, ...], *args: Any, **options: Any) -> torch.Tensor:
        projected = tuple(x.view_as(x) for x in projected)
        for x in projected:
            x.register_hook(nudged)
        out: torch.Tensor = core(self, projected, *args, **options)
        return out

    attention.Attention.core = watched


def one_way(case: Case) -> Callable[[Trainer], None] | None:
    """What makes one process compute attention as the ranks of `case` do."""
    if case.cp == 1:
        return None
    return attends_to_whole_keys if case.exchange == "ulysses" else attends_in_blocks


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        *((case, "fp8") for case in LAYOUTS),
        (LAYOUTS[1], "fp8_wide_wgrad"),
        *(pytest.param(case, "fp8", marks=pytest.mark.slow) for case in MORE),
        *(pytest.param(case, "fp8_wide_wgrad", marks=pytest.mark.slow) for case in (LAYOUTS[4], MORE[1])),
    ],
    ids=str,
)
def test_losses_are_equal_and_gradients_near(case: Case, precision: str) -> None:
    """One process computes attention as the ranks do: `test_ways_of_attention_differ_by_last_bits_of_its_gradients`."""
    case = in_fp8(case, precision)
    whole, step = run(alone(case), one_way(case)).steps[0], run(case).steps[0]
    assert (step["loss"], step["mtp"]) == (whole["loss"], whole["mtp"])
    assert all(torch.equal(whole["counts"][name], counts) for name, counts in step["counts"].items())
    worst = max(calc_diff(whole["grad"][name], gradient) for name, gradient in step["grad"].items())
    assert worst < (1e-4 if precision == "fp8" else 1e-5), worst


def mean_diff(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """calc_diff, the mean over parameters."""
    return sum(calc_diff(gradient, other[name]) for name, gradient in one.items()) / len(one)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["v3", "qwen2_olmoe_glm4"])
def test_ways_of_attention_differ_by_last_bits_of_its_gradients(model: str) -> None:
    """In one process: blocks take a softmax's mean gradient from the output that is kept, which is rounded, and not
    from the softmax. It is as if the gradients of queries, keys and values were rounded otherwise, and codes flip.
    """
    case = alone(in_fp8(Case(combine="exact", model=model)))
    plain, blocks, nudged = (run(case, way).steps[0] for way in (None, attends_in_blocks, nudges_gradients))
    wide = run(replace(case, precision="bf16")).steps[0]
    assert blocks["loss"] == nudged["loss"] == plain["loss"]
    assert 0 < mean_diff(plain["grad"], blocks["grad"]) < mean_diff(plain["grad"], nudged["grad"])
    assert mean_diff(blocks["grad"], wide["grad"]) < 1.05 * mean_diff(plain["grad"], wide["grad"])


@pytest.mark.slow
def test_latents_made_up_again_in_fp8_are_as_near_to_bf16_as_one_process() -> None:
    """A block's share of the latents' gradient is quantised by itself, and a last bit flips codes behind it: noise, far
    below what fp8 is from bf16, and not more of that.
    """
    case = in_fp8(Case(cp=2, ep=2, payload="latent", combine="exact", model="v3_blocks"))
    whole, wide = run(alone(case)).steps[0], run(alone(replace(case, precision="bf16"))).steps[0]

    noise = mean_diff(whole["grad"], wide["grad"])
    for exchange in ("ring", "all_gather", "ulysses"):
        step = run(replace(case, exchange=exchange)).steps[0]
        assert step["loss"] == whole["loss"]
        assert mean_diff(step["grad"], whole["grad"]) < noise / 20
        assert mean_diff(step["grad"], wide["grad"]) < 1.05 * noise


def _rows_of_codes(rank: int, case: Case) -> tuple[int, int]:
    """How many rows of codes the products of a step met, and a sum of hashes that tells which, in any order."""
    product, count, total = moe_kernels.grouped_gemm_fp8, 0, torch.zeros((), dtype=torch.int64)

    def counting(a: torch.Tensor, a_scale: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal count
        bits = torch.cat((a.view(torch.uint8).long(), a_scale.T.contiguous().view(torch.int32).long()), dim=1)
        keys = torch.randint(1, 2**62, (bits.shape[1],), generator=torch.Generator().manual_seed(bits.shape[1]))
        hashes = (bits * keys).sum(1)
        hashes = (hashes ^ (hashes >> 29)) * 0x1B873593CC9E2D51
        source = args[3]
        hashes = hashes if source is None else hashes[source]
        count += len(hashes)
        total.add_(hashes.sum())
        return product(a, a_scale, *args, **options)

    trainer = Trainer(config_of(case), rank, torch.device("cpu"))
    for layer in trainer.moe_layers().values() if case.skew else ():
        layer.router.expert_bias[: trainer.config.model.top_k] = 10.0
    moe_kernels.grouped_gemm_fp8 = counting  # in a process of its own
    trainer.accumulate(rank_batches(trainer, case, 0))
    return count, int(total)


@pytest.mark.parametrize("case", LAYOUTS[:3], ids=str)
def test_codes_of_every_row_are_those_of_one_process(case: Case) -> None:
    case = in_fp8(case)
    ranks, whole = run_ranks(case.world, _rows_of_codes, case), run_ranks(1, _rows_of_codes, alone(case))[0]
    assert whole[0] > 10_000
    assert (sum(rank[0] for rank in ranks), sum(rank[1] for rank in ranks) % 2**64) == (whole[0], whole[1] % 2**64)


@pytest.mark.parametrize(
    ("schedule", "precision", "wire"), [("zb_h1", "fp8", "model"), ("overlapped_1f1b", "fp8_wide_wgrad", "fp8")]
)
def test_schedules_and_recompute_change_no_bit(schedule: str, precision: str, wire: str) -> None:
    """Weight gradients that wait, pairs phase by phase, and codes made again in backward."""
    case = Case(pp=2, dp=2, ep=2, precision=precision, wire=wire, steps=2)
    worst = differences(run(case), run(replace(case, schedule=schedule, recompute="full")))
    assert not any(worst.values()), worst


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8", "fp8_wide_wgrad"])
@pytest.mark.parametrize("recompute", ["none", "selective", "norm,mla_up,swiglu,attention", "full"])
@pytest.mark.parametrize("schedule", ["gpipe", "split_1f1b", "zb_h1", "overlapped_1f1b"])
def test_every_schedule_and_recompute_change_no_bit(schedule: str, recompute: str, precision: str) -> None:
    case = Case(pp=2, dp=2, ep=2, precision=precision, steps=2)
    worst = differences(run(case), run(replace(case, schedule=schedule, recompute=recompute)))
    assert not any(worst.values()), worst


def test_going_on_from_a_checkpoint_changes_no_bit(tmp_path: Path) -> None:
    """Codes are not saved: they are made from the parameters, which are made from the masters."""
    case = Case(pp=2, dp=2, ep=2, micro_batch=2, precision="fp8", steps=4)
    whole = run(case)
    run(replace(case, steps=2), save_to=tmp_path)
    assert not any(differences(whole, run(replace(case, steps=2), load_from=tmp_path), first=2).values())
