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
from ranks import run_ranks
from torch import Tensor

from moe_engine.config.schema import (
    Config,
    ContextParallelConfig,
    ModelConfig,
    MoESection,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PlacementSection,
    PrecisionConfig,
    RecomputeConfig,
    TrainConfig,
)
from moe_engine.distributed.collectives import CollectiveLog, CollectiveRecord
from moe_engine.model.batch import IGNORE, Batch
from moe_engine.trainer import Trainer

PRECISIONS = {
    "fp64": PrecisionConfig("fp64", "float64", "float64", "float64"),
    "fp32": PrecisionConfig("fp32", "float32", "float32", "float32"),
    "bf16": PrecisionConfig("bf16", "bfloat16", "float32", "float32"),
    "fp8": PrecisionConfig("fp8", "bfloat16", "float32", "float32"),
    "fp8_wide_wgrad": PrecisionConfig("fp8", "bfloat16", "float32", "float32", wgrad="bf16", bf16_first_layers=1),
}
GLOBAL_BATCH = 8
SEQ_LEN = 16


@dataclass(frozen=True)
class Case:
    """One layout and variant of the small training job."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    schedule: str = "1f1b"
    micro_batch: int = 1
    combine: str = "dedup"
    tied: bool = False
    precision: str = "fp64"
    steps: int = 5
    total_steps: int = 5  # of the learning-rate schedule
    mtp_depth: int = 1
    skew: bool = False  # all tokens choose the same experts: most experts, and at ep > 1 whole ranks, have none
    padding: bool = False  # rows end in padding tokens
    virtual_stages: int = 1
    overlap: bool = True
    recompute: str = "none"  # a mode, or parts with commas between
    stages: tuple[str, ...] = ()
    layers: int = 4
    rows: int = GLOBAL_BATCH  # sequences a step, over all ranks
    model: str = "v3"  # a key of MODELS
    z_loss: bool = False
    wire: str = "model"
    placement: int = 0  # experts move every so many steps
    cp: int = 1
    exchange: str = "ring"
    payload: str = "kv"
    ranks_per_node: int | None = None  # with it, rows travel by two hops
    max_recv_rows: int = 0

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp

    def __str__(self) -> str:
        words = [f"pp{self.pp}", f"dp{self.dp}", f"ep{self.ep}", self.schedule, f"mb{self.micro_batch}", self.combine]
        words += [f"v{self.virtual_stages}"] if self.virtual_stages > 1 else []
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += [word for word, on in (("tied", self.tied), ("skew", self.skew), ("padding", self.padding)) if on]
        words += [] if self.overlap else ["plain"]
        words += [":".join(self.stages)] if self.stages else []
        words += [f"layers{self.layers}"] if self.layers != 4 else []
        words += [self.model] if self.model != "v3" else []
        words += ["z"] if self.z_loss else []
        words += [f"{self.wire} wire"] if self.wire != "model" else []
        words += [f"placement{self.placement}"] if self.placement else []
        words += [f"cp{self.cp}", self.exchange, self.payload] if self.cp > 1 else []
        words += [f"nodes of {self.ranks_per_node}"] if self.ranks_per_node else []
        words += [f"{self.max_recv_rows} rows"] if self.max_recv_rows else []
        return "-".join([*words, self.precision])


# What other families change of the model in `config_of`.
MODELS: dict[str, dict[str, Any]] = {
    "v3": {},
    "v3_yarn": {
        "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 16, "rope_beta_fast": 2.0,
        "rope_beta_slow": 0.5, "rope_mscale_all_dim": 1.0, "rope_theta": 50.0, "qk_rope_head_dim": 8,
    },
    "qwen3": {
        "attention": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": True, "rope_style": "halves",
        "num_dense_layers": 0, "num_shared_experts": 0, "score_function": "softmax", "num_groups": 1, "top_groups": 1,
        "route_scale": 1.0,
    },
    "v3_heads": {"num_heads": 4},  # enough to share out over four ranks
    "qwen3_heads": {  # fewer heads of keys than ranks
        "attention": "gqa", "num_heads": 8, "num_kv_heads": 2, "head_dim": 8, "qk_norm": True, "rope_style": "halves",
        "num_dense_layers": 0, "num_shared_experts": 0, "score_function": "softmax", "num_groups": 1, "top_groups": 1,
        "route_scale": 1.0,
    },
}  # fmt: skip


@dataclass
class Record:
    """What a run did. `steps[n]` holds plain floats and merged tensors by global name.

    buckets: by rank, how many gradient buffers it shares with other ranks.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    logs: list[list[CollectiveRecord]] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    margin: float = float("inf")


def recompute_of(case: Case) -> RecomputeConfig:
    if case.recompute in ("none", "selective", "full"):
        return RecomputeConfig(mode=case.recompute)
    return RecomputeConfig("selective", case.recompute.split(","))


def config_of(case: Case) -> Config:
    """A model with every part in small: 1 dense and 3 (or more) MoE layers, node-limited routing, MTP."""
    model = ModelConfig(
        vocab_size=61, dim=32, num_layers=case.layers, num_dense_layers=1, dense_hidden=48,
        num_heads=2, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        num_experts=8, top_k=3, expert_hidden=16, num_shared_experts=1, num_groups=4, top_groups=2,
        route_scale=1.5, mtp_depth=case.mtp_depth, tied_head=case.tied, init_std=0.1,
    )  # fmt: skip
    model = replace(model, **MODELS[case.model])
    return Config(
        model=model,
        moe=MoESection(
            combine=case.combine,
            wire=case.wire,
            dispatch="hierarchical" if case.ranks_per_node else "all_to_all",
            max_recv_rows=case.max_recv_rows,
            aux_loss_weight=0.01,
            z_loss_weight=0.01 * case.z_loss,
            bias_step=1e-3,
            placement=PlacementSection(every=case.placement, least_gain=0.0),
        ),
        parallel=ParallelConfig(pp=case.pp, dp=case.dp, cp=case.cp, ep=case.ep, ranks_per_node=case.ranks_per_node),
        cp=ContextParallelConfig(case.exchange, case.payload),
        pipeline=PipelineConfig(overlap=case.overlap, schedule=case.schedule, virtual_stages=case.virtual_stages),
        precision=PRECISIONS[case.precision],
        recompute=recompute_of(case),
        # A large eps: with AdamW's usual one the first updates are the signs of the gradients, also of elements that
        # are nothing but rounding, and in fp32 that noise (3e-7 of a gradient) grows a hundredfold in three steps.
        optim=OptimConfig(lr=3e-3, warmup_steps=2, clip=0.5, eps=1e-3),
        train=TrainConfig(
            steps=case.total_steps, global_batch=case.rows, micro_batch=case.micro_batch, seq_len=SEQ_LEN, seed=1
        ),
    )


def global_batch(case: Case, step: int) -> Batch:
    """All rows of a step: several documents a row, ragged label masks, one row with a single valid target."""
    chance = torch.Generator().manual_seed(100 + step)
    depths = 1 + case.mtp_depth
    stream = torch.randint(0, 61, (case.rows, SEQ_LEN + depths), generator=chance)
    border = torch.randint(1, SEQ_LEN, (case.rows, 1), generator=chance)
    place = torch.arange(SEQ_LEN + depths)[None]
    documents = (place >= border).int()
    positions = torch.where(place >= border, place - border, place)
    tokens = torch.stack([stream[:, k : k + SEQ_LEN] for k in range(depths)])
    labels = torch.stack([stream[:, k + 1 : k + 1 + SEQ_LEN] for k in range(depths)])
    for k in range(depths):
        crosses = documents[:, k + 1 : k + 1 + SEQ_LEN] != documents[:, :SEQ_LEN]
        dropped = torch.rand(case.rows, SEQ_LEN, generator=chance) < torch.linspace(0, 0.9, case.rows)[:, None]
        labels[k][crosses | dropped] = IGNORE
    labels[:, 5] = IGNORE
    labels[0, 5, 3] = 7
    mask = None
    if case.padding:
        lengths = torch.randint(4, SEQ_LEN + 1, (case.rows, 1), generator=chance)
        mask = place[:, :SEQ_LEN] < lengths
        labels[:, ~mask] = IGNORE
    return Batch(tokens, labels, positions[:, :SEQ_LEN], documents[:, :SEQ_LEN], mask)


def run(
    case: Case,
    fault: Callable[[Trainer], None] | None = None,
    load_from: Path | None = None,
    save_to: Path | None = None,
    time_limit: float = 60.0,
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
