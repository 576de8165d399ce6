"""The jobs of the layout harness (`layouts`): a small model with every part, its layouts and variants, its batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

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
from moe_engine.model.batch import IGNORE, Batch

PRECISIONS = {
    "fp64": PrecisionConfig("fp64", "float64", "float64", "float64"),
    "fp32": PrecisionConfig("fp32", "float32", "float32", "float32"),
    "bf16": PrecisionConfig("bf16", "bfloat16", "float32", "float32"),
    # AdamW's moments in bf16, under masters whose last bits round few of them otherwise
    "fp64_moments": PrecisionConfig("fp64", "float64", "float64", "float64", "bfloat16"),
    "bf16_moments": PrecisionConfig("bf16", "bfloat16", "float32", "float32", "bfloat16"),
    "fp8_moments": PrecisionConfig("fp8", "bfloat16", "float32", "float32", "bfloat16"),
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
    "qwen2_olmoe_glm4": {  # what each has that the others lack
        "attention": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": True, "rope_style": "halves",
        "qk_norm_whole": True, "rotary_dim": 4, "attention_bias": True, "attention_out_bias": True, "shared_gate": True,
        "num_shared_experts": 2, "score_function": "softmax", "num_groups": 1, "top_groups": 1, "route_scale": 1.0,
        "normalize_weights": False,
    },
    "gpt_oss": {
        "attention": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope_style": "halves",
        "attention_bias": True, "attention_out_bias": True, "attention_sinks": True, "sliding_window": 5,
        "sliding_window_every": 2, "expert_biases": True, "swiglu_limit": 0.5, "num_dense_layers": 0,
        "num_shared_experts": 0, "score_function": "softmax", "num_groups": 1, "top_groups": 1, "route_scale": 1.0,
    },
    "experts_between": {"num_dense_layers": 1, "dense_layers": [2]},
    "dense_between": {  # stages begin and end with dense layers, or have no others
        "attention": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": True, "rope_style": "halves",
        "num_dense_layers": 0, "dense_layers": [1, 3, 4], "num_shared_experts": 0, "score_function": "softmax",
        "num_groups": 1, "top_groups": 1, "route_scale": 1.0,
    },
    "v3_heads": {"num_heads": 4},  # enough to share out over four ranks
    "v3_blocks": {"num_heads": 4, "qk_nope_head_dim": 40, "v_head_dim": 24},  # two heads are a block of fp8's rows
    "qwen3_heads": {  # fewer heads of keys than ranks
        "attention": "gqa", "num_heads": 8, "num_kv_heads": 2, "head_dim": 8, "qk_norm": True, "rope_style": "halves",
        "num_dense_layers": 0, "num_shared_experts": 0, "score_function": "softmax", "num_groups": 1, "top_groups": 1,
        "route_scale": 1.0,
    },
}  # fmt: skip


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
