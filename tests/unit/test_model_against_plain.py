"""One rank of the engine, in float64, equals a plain model written from the paper: the truth behind the layouts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from layout_cases import Case, config_of
from plain_v3 import PlainResult, PlainRows, PlainV3
from torch import Tensor

from moe_engine.config.schema import Config
from moe_engine.model.batch import IGNORE, Batch
from moe_engine.trainer import StepGradients, Trainer

ROWS, LENGTH, VOCAB = 4, 9, 61
TOLERANCE = 1e-10
UNDECAYED = ("router.weight", "shared_gate.weight")  # of the matrices


@dataclass(frozen=True)
class Variant:
    """What differs from the harness's model, and how its rows look."""

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    documents: int = 3  # at most this many in a row
    padding: bool = False
    bias: float = 0.0  # spread of the balancing biases
    z_loss: float = 0.0
    micro_batch: int = 2
    steps: int = 1

    def __str__(self) -> str:
        return self.name


# Mixtral's and Qwen3's: grouped queries, rotary halves, softmax over all experts, no shared one.
GROUPED = {
    "attention": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope_style": "halves",
    "score_function": "softmax", "num_groups": 1, "top_groups": 1, "num_shared_experts": 0, "route_scale": 1.0,
}  # fmt: skip
GPT_OSS = {
    **GROUPED,
    "attention_bias": True,
    "attention_out_bias": True,
    "attention_sinks": True,
    "sliding_window": 3,
    "sliding_window_every": 2,
    "expert_biases": True,
    "swiglu_limit": 0.2,
    "num_dense_layers": 0,
}
# So short an original length that some pairs are kept, some slowed, some between, within rows of 9 tokens.
YARN = {
    "rope_scaling": "yarn", "rope_factor": 8.0, "rope_original_length": 16, "rope_beta_fast": 2.0,
    "rope_beta_slow": 0.5, "rope_mscale": 1.0, "rope_mscale_all_dim": 1.0, "rope_theta": 50.0, "qk_rope_head_dim": 8,
}  # fmt: skip
VARIANTS = [
    Variant("as_it_is", bias=0.05, steps=2),
    Variant("tied_head", {"tied_head": True, "mtp_depth": 2}),
    Variant("direct_queries_without_mtp", {"q_lora_rank": 0, "mtp_depth": 0}, documents=1),
    Variant("two_mtp_depths_and_padding", {"mtp_depth": 2}, padding=True, bias=0.05, steps=2, z_loss=0.01),
    Variant("softmax_not_normalised", {"score_function": "softmax", "group_score": "max", "normalize_weights": False}),
    Variant("softmax_normalised_one_group", {"score_function": "softmax", "num_groups": 1, "top_groups": 1}, bias=0.02),
    Variant("sigmoid_not_normalised", {"normalize_weights": False, "num_shared_experts": 2}, documents=6),
    Variant("all_experts", {"top_k": 8, "num_groups": 1, "top_groups": 1, "num_shared_experts": 0}, micro_batch=4),
    Variant("mixtral", {**GROUPED, "num_dense_layers": 0, "mtp_depth": 0}, documents=2),
    Variant("qwen3", {**GROUPED, "qk_norm": True, "num_kv_heads": 1, "norm_eps": 1e-3}, padding=True, z_loss=0.1),
    Variant("qwen2", {**GROUPED, "attention_bias": True, "shared_gate": True, "num_shared_experts": 2}, padding=True),
    Variant("olmoe", {**GROUPED, "qk_norm": True, "qk_norm_whole": True, "attention_out_bias": True}),
    Variant("glm4", {**GROUPED, "rotary_dim": 4, "score_function": "sigmoid", "attention_bias": True}, bias=0.05),
    Variant("sinks", {**GROUPED, "attention_sinks": True, "attention_bias": True}, documents=2, padding=True),
    Variant("windows", {**GROUPED, "sliding_window": 3, "sliding_window_every": 2}, documents=2),
    Variant("gpt_oss", GPT_OSS, padding=True),
    Variant("grouped_yarn", {**GROUPED, **YARN, "qk_norm": True, "rope_mscale_all_dim": 0.0, "rope_truncate": False}),
    Variant("latent_yarn", {**YARN, "rope_mscale": 0.7, "latent_norm_eps": 1e-3}, documents=1, bias=0.05),
    Variant("latent_yarn_halves", {**YARN, "q_lora_rank": 0, "rope_style": "halves", "rope_beta_fast": 1.0}),
    Variant("dense_between", {**GROUPED, "num_dense_layers": 0, "dense_layers": [1, 3], "qk_norm": True}, padding=True),
    Variant("one_expert_dense_everywhere_else", {"top_k": 1, "num_dense_layers": 3, "tied_head": True}, padding=True),
]  # fmt: skip


def make_config(variant: Variant) -> Config:
    config = config_of(Case())
    config.model = replace(config.model, **variant.model)
    config.moe.z_loss_weight = variant.z_loss
    config.train = replace(config.train, global_batch=ROWS, micro_batch=variant.micro_batch, seq_len=LENGTH)
    return config


def make_batch(variant: Variant, depths: int, step: int = 0) -> Batch:
    """Ragged documents (also of one token) and targets; by option rows end in padding, one of them is nothing else."""
    chance = torch.Generator().manual_seed(step)
    shape = (ROWS, LENGTH)
    stream = torch.randint(0, VOCAB, (ROWS, LENGTH + depths), generator=chance)
    starts = torch.rand(ROWS, LENGTH, generator=chance) < (variant.documents - 1) / LENGTH
    starts[:, 0] = True
    ids = starts.cumsum(dim=1)
    place = torch.arange(LENGTH).expand(shape)
    positions = place - place.where(starts, 0).cummax(dim=1).values
    tokens = torch.stack([stream[:, k : k + LENGTH] for k in range(depths)])
    labels = torch.stack([stream[:, k + 1 : k + 1 + LENGTH] for k in range(depths)])
    for k in range(depths):
        labels[k][torch.rand(shape, generator=chance) < torch.linspace(0, 0.9, ROWS)[:, None]] = IGNORE
    mask = None
    if variant.padding:
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=chance)
        lengths[1] = 0
        mask = place < lengths
        labels[:, ~mask] = IGNORE
    return Batch(tokens, labels, positions, ids.int(), mask)


def make_trainer(variant: Variant) -> Trainer:
    trainer = Trainer(make_config(variant), 0, torch.device("cpu"))
    chance = torch.Generator().manual_seed(7)
    for layer in trainer.moe_layers().values():
        layer.router.expert_bias += variant.bias * torch.randn(8, generator=chance)
    return trainer


def parameters_of(trainer: Trainer) -> dict[str, Tensor]:
    """Leaf copies by global name."""
    return {s.name: s.states["master"].view(s.shape).clone().requires_grad_() for s in trainer.optimizer.named_shards()}


def biases_of(trainer: Trainer) -> dict[str, Tensor]:
    return {f"{name}.router.expert_bias": layer.router.expert_bias for name, layer in trainer.moe_layers().items()}


def engine_accumulate(trainer: Trainer, batch: Batch) -> StepGradients:
    size = trainer.config.train.micro_batch
    return trainer.accumulate([batch.slice_rows(i, i + size) for i in range(0, ROWS, size)])


def plain_loss(config: Config, parameters: dict[str, Tensor], biases: dict[str, Tensor], batch: Batch) -> PlainResult:
    keep = torch.ones(batch.shape, dtype=torch.bool) if batch.token_mask is None else batch.token_mask
    rows = PlainRows(batch.tokens, batch.labels, batch.document_ids, keep)
    plain = PlainV3(config.model, parameters, biases)
    result = plain.loss(rows, config.moe.aux_loss_weight, config.train.mtp_loss_weight, config.moe.z_loss_weight)
    assert result.margin > 1e-7, "a near-tie in the routing: choose another seed"
    return result


def difference(found: Tensor, expected: Tensor) -> float:
    if not expected.any():
        return math.inf if found.any() else 0.0
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_losses_gradients_counts_and_updates_equal_the_plain_model(variant: Variant) -> None:
    trainer, config = make_trainer(variant), make_config(variant)
    parameters = parameters_of(trainer)
    decayed = [name for name, p in parameters.items() if p.dim() == 2 and not name.endswith(UNDECAYED)]
    adamw = torch.optim.AdamW(
        [
            {"params": [parameters[name] for name in decayed], "weight_decay": config.optim.weight_decay},
            {"params": [p for name, p in parameters.items() if name not in decayed], "weight_decay": 0.0},
        ],
        betas=(config.optim.beta1, config.optim.beta2),
        eps=config.optim.eps,
    )
    biases = {name: bias.clone() for name, bias in biases_of(trainer).items()}
    for step in range(variant.steps):
        batch = make_batch(variant, 1 + config.model.mtp_depth, step)
        adamw.zero_grad()
        expected = plain_loss(config, parameters, biases, batch)
        expected.total.backward()

        gradients = engine_accumulate(trainer, batch)
        raw = {shard.name: shard.gradient.view(shard.shape) for shard in trainer.optimizer.named_gradient_shards()}
        assert raw.keys() == parameters.keys()
        for name, parameter in parameters.items():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert difference(raw[name], grad) < TOLERANCE, name

        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in parameters.values() if p.grad is not None))
        assert norm > config.optim.clip, "the step must clip"
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad *= config.optim.clip / norm
        for group in adamw.param_groups:
            group["lr"] = config.optim.lr * (step + 1) / config.optim.warmup_steps
        adamw.step()
        for name, counts in expected.counts.items():
            load = torch.tensor(counts)
            biases[f"{name}.router.expert_bias"] += config.moe.bias_step * (load.float().mean() - load).sign()

        result = trainer.update(gradients)
        assert result.loss == pytest.approx(expected.main, rel=TOLERANCE)
        assert result.mtp_losses == pytest.approx(expected.mtp, rel=TOLERANCE)
        assert result.aux_loss == pytest.approx(expected.aux, rel=TOLERANCE)
        assert result.z_loss == pytest.approx(expected.z, rel=TOLERANCE)
        assert result.total_loss == pytest.approx(expected.total.item(), rel=TOLERANCE)
        assert result.grad_norm == pytest.approx(norm, rel=TOLERANCE)
        assert {name: counts.tolist() for name, counts in result.expert_counts.items()} == expected.counts
        for name, bias in biases_of(trainer).items():
            assert torch.equal(bias, biases[name]), name
        for shard in trainer.optimizer.named_shards():
            expected_value = parameters[shard.name].detach()
            assert difference(shard.states["master"].view(shard.shape), expected_value) < TOLERANCE, shard.name
