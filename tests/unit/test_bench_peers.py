"""The plain model of `bench step` computes what the engine computes, whatever the sizes of a head's parts."""

from __future__ import annotations

import pytest
import torch

from moe_engine.bench.peers import PlainTrainer
from moe_engine.bench.step_candidates import random_rows
from moe_engine.config.load import load
from moe_engine.config.validate import resolve
from moe_engine.trainer import Trainer


@pytest.mark.parametrize(
    "sizes", [["model.qk_nope_head_dim=3", "model.kv_lora_rank=5"], ["model.v_head_dim=33", "model.dense_layers=[1]"]]
)
def test_a_plain_step_is_the_engines(sizes: list[str]) -> None:
    words = ["model=tiny", "precision=fp32", "model.score_function=softmax", "model.num_layers=3", *sizes]
    config = resolve(load("train", [*words, "train.global_batch=2", "train.micro_batch=1", "train.seq_len=12"]))
    trainer = Trainer(config, 0, torch.device("cpu"))
    parameters = {s.name: s.states["master"].view(s.shape) for s in trainer.optimizer.named_shards()}
    plain = PlainTrainer(config, parameters, False, torch.device("cpu"))
    batches = random_rows(config, 0, 0)
    right, found = trainer.step(batches), plain.step([(batch.tokens[0], batch.labels[0]) for batch in batches])
    assert found.loss == pytest.approx(right.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(right.grad_norm, rel=1e-5)
