"""The central harness: any layout equals one process.

`run(case)` trains a small model for some steps on the case's ranks and brings back everything that must not
depend on the layout: losses, every raw gradient (before clipping), the gradient norm, counts and balancing
biases, master weights and moments; also each rank's order of collectives and the smallest routing margin (a
near-tie would flip between layouts for no fault of the engine).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from layout_cases import Case, config_of, global_batch
from ranks import run_ranks
from torch import Tensor

from moe_engine.distributed.collectives import CollectiveLog, CollectiveRecord
from moe_engine.model.batch import Batch
from moe_engine.trainer import Trainer


@dataclass
class Record:
    """What a run did. `steps[n]` holds plain floats and merged tensors by global name.

    buckets: by rank, how many gradient buffers it shares with other ranks.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    logs: list[list[CollectiveRecord]] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    margin: float = float("inf")


def run(
    case: Case,
    fault: Callable[[Trainer], None] | None = None,
    load_from: Path | None = None,
    save_to: Path | None = None,
    time_limit: float = 120.0,  # eight ranks on two cores, beside another test
) -> Record:
    """Train `case` on its ranks for `case.steps` steps, from the start or from the newest checkpoint in `load_from`.

    `fault` breaks a rank's trainer before the first step (to see the harness go red); `save_to` gets a checkpoint
    after the last one.
    """
    results = run_ranks(case.world, _rank, case, fault, load_from, save_to, time_limit=time_limit)
    logs, buckets = ([result[key] for result in results] for key in ("log", "buckets"))
    record = Record(logs=logs, buckets=buckets, margin=min(result["margin"] for result in results))
    for step in range(case.steps):
        merged = dict(results[0]["steps"][step])
        for key in ("loss", "mtp", "aux", "z", "norm"):  # also of ranks that hold no loss
            assert all(result["steps"][step][key] == merged[key] for result in results), f"{key} differs between ranks"
        for key in ("grad", "master", "exp_avg", "exp_avg_sq", "counts", "bias"):
            merged[key] = _merge([result["steps"][step][key] for result in results])
        record.steps.append(merged)
    return record


def _rank(
    rank: int, case: Case, fault: Callable[[Trainer], None] | None, load_from: Path | None, save_to: Path | None
) -> dict[str, Any]:
    log = CollectiveLog()
    trainer = Trainer(config_of(case), rank, torch.device("cpu"), log)
    for layer in trainer.moe_layers().values() if case.skew else ():
        layer.router.expert_bias[: trainer.config.model.top_k] = 10.0
    if fault is not None:
        fault(trainer)
    if load_from is not None:
        trainer.load_newest(load_from)
    margins = _watch_margins(trainer)
    first = trainer.steps_done
    steps = [_step(trainer, case, step) for step in range(first, first + case.steps)]
    if save_to is not None:
        trainer.save(save_to)
    buckets = sum(bucket.communicator.size > 1 for bucket in trainer.optimizer._buckets)
    return {"steps": steps, "log": log.records, "buckets": buckets, "margin": min(margins, default=float("inf"))}


def rank_batches(trainer: Trainer, case: Case, step: int) -> list[Batch]:
    """The micro-batches of this rank: its contiguous slice of the global rows, and its shard of their tokens."""
    rows, groups = global_batch(case, step), trainer.groups
    own = case.rows // case.dp
    first = groups.layout.coordinate(groups.rank).dp * own
    return [
        rows.slice_rows(i, i + case.micro_batch).share(groups.cp.rank, groups.cp.size)
        for i in range(first, first + own, case.micro_batch)
    ]


def _step(trainer: Trainer, case: Case, step: int) -> dict[str, Any]:
    gradients = trainer.accumulate(rank_batches(trainer, case, step))
    raw = {
        (name, start): (shape, part.clone())
        for name, start, _, shape, part in trainer.optimizer.named_gradient_shards()
    }
    result = trainer.update(gradients)
    found: dict[str, Any] = {
        "loss": result.loss,
        "mtp": list(result.mtp_losses),
        "aux": result.aux_loss,
        "z": result.z_loss,
        "norm": result.grad_norm,
        "moved": result.rearranged and result.rearranged.moved,
        "grad": raw,
        "counts": {(name, 0): (c.shape, c.clone()) for name, c in result.expert_counts.items()},
        "bias": {
            (name, 0): (layer.router.expert_bias.shape, layer.router.expert_bias.clone())
            for name, layer in trainer.moe_layers().items()
        },
        "master": {}, "exp_avg": {}, "exp_avg_sq": {},
    }  # fmt: skip
    for name, start, _, shape, state in trainer.optimizer.named_shards():
        for key, values in state.items():
            found[key][name, start] = (shape, values.clone())
    return found


def _merge(parts: list[dict[tuple[str, int], tuple[Any, Tensor]]]) -> dict[str, Tensor]:
    """Put the ranks' pieces together. Pieces that several ranks hold must have the same bits."""
    whole: dict[str, Tensor] = {}
    covered: dict[str, Tensor] = {}
    for part in parts:
        for (name, start), (shape, values) in part.items():
            flat = values.reshape(-1)
            if name not in whole:
                whole[name] = torch.empty(shape, dtype=values.dtype)
                covered[name] = torch.zeros(whole[name].numel(), dtype=torch.bool)
            place = slice(start, start + flat.numel())
            seen = covered[name][place]
            assert torch.equal(whole[name].view(-1)[place][seen], flat[seen]), f"copies of {name} differ"
            whole[name].view(-1)[place] = flat
            covered[name][place] = True
    missing = [name for name, seen in covered.items() if not bool(seen.all())]
    assert not missing, f"no rank holds all of {missing}"
    return whole


def _watch_margins(trainer: Trainer) -> list[float]:
    """Collect, over all tokens, the distance between the last chosen and the first refused biased score and group."""
    margins: list[float] = []
    model = trainer.config.model

    def margin(values: Tensor, k: int) -> float:
        top = values.sort(dim=-1, descending=True).values
        return float((top[:, k - 1] - top[:, k]).min()) if k < values.shape[1] and len(values) else float("inf")

    for layer in trainer.moe_layers().values():

        def watch(router: Any, _inputs: Any, routing: Any) -> None:
            biased = routing.scores.detach() + router.expert_bias
            groups = biased.unflatten(-1, (model.num_groups, -1))
            group_scores = groups.topk(2, dim=-1).values.sum(-1)
            kept = group_scores.topk(model.top_groups, dim=-1).indices
            allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, kept, True)
            chosen = groups.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
            margins.extend((margin(group_scores, model.top_groups), margin(chosen, model.top_k)))

        layer.router.register_forward_hook(watch)
    return margins


def differences(one: Record, other: Record, first: int = 0) -> dict[str, float]:
    """The largest relative difference of each kind of figure, over steps (and names); all zero when bits agree.

    `other` has the steps of `one` from `first` on, or fewer.
    """
    worst: dict[str, float] = {}
    for a, b in zip(one.steps[first:], other.steps, strict=False):
        for key in ("loss", "aux", "z", "norm"):
            worst[key] = max(worst.get(key, 0.0), abs(a[key] - b[key]) / max(abs(a[key]), 1e-300))
        for k, (x, y) in enumerate(zip(a["mtp"], b["mtp"], strict=True)):
            worst[f"mtp{k}"] = max(worst.get(f"mtp{k}", 0.0), abs(x - y) / max(abs(x), 1e-300))
        for key in ("grad", "master", "exp_avg", "exp_avg_sq", "counts", "bias"):
            assert a[key].keys() == b[key].keys(), f"{key}: different names {a[key].keys() ^ b[key].keys()}"
            for name in a[key]:
                worst[key] = max(worst.get(key, 0.0), _relative(a[key][name], b[key][name]))
    return worst


def _relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |a| in the Euclidean norm; exact zeros must be zeros."""
    if torch.equal(a, b):
        return 0.0
    a, b = a.double(), b.double()
    return float((a - b).norm() / a.norm()) if a.norm() > 0 else float("inf")


def one_process(case: Case) -> Case:
    """The same job on one rank: the truth that `case` is held against."""
    return replace(
        case,
        pp=1,
        dp=1,
        ep=1,
        cp=1,
        exchange="ring",
        payload="kv",
        schedule="1f1b",
        virtual_stages=1,
        micro_batch=case.rows,
        combine="dedup",
        placement=0,
        recompute="none",
        stages=(),
        overlap=True,
        ranks_per_node=None,
        max_recv_rows=0,
    )


def truth(case: Case) -> Record:
    """One process on the same job, for all its steps; made once for all layouts of the job."""
    return _truth(one_process(replace(case, steps=case.total_steps)))


@cache
def _truth(case: Case) -> Record:
    record = run(case)
    assert record.margin > 1e-6, "a near-tie in the routing: choose another seed for the test data"
    return record


def first_losses(cases: Sequence[Case]) -> list[tuple[float, list[float]]]:
    """Loss and MTP losses of each case's first step; cases of as many ranks share one start of them."""
    found: dict[Case, tuple[float, list[float]]] = {}
    for world in sorted({case.world for case in cases}):
        own = [case for case in cases if case.world == world]
        results = run_ranks(world, _first_losses, own)
        assert all(result == results[0] for result in results), "losses differ between ranks"
        found |= dict(zip(own, results[0], strict=True))
    return [found[case] for case in cases]


def _first_losses(rank: int, cases: Sequence[Case]) -> list[tuple[float, list[float]]]:
    found = []
    for case in cases:
        trainer = Trainer(config_of(case), rank, torch.device("cpu"))
        result = trainer.update(trainer.accumulate(rank_batches(trainer, case, 0)))
        found.append((result.loss, list(result.mtp_losses)))
    return found
