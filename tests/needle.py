"""A needle-style copy task: a few marked tokens, anywhere in a long row of noise, are asked for at its end."""

from __future__ import annotations

import torch
from ranks import run_ranks

from moe_engine.config.schema import (
    Config,
    ContextParallelConfig,
    ModelConfig,
    MoESection,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from moe_engine.model.batch import IGNORE, Batch
from moe_engine.trainer import Trainer

NOISE, VALUES, ROWS, ASKED = 32, 8, 8, 16
ASK = NOISE + VALUES  # the token that asks


def rows_of(step: int, seq_len: int) -> Batch:
    """Noise, with a needle of one value somewhere in the first half; ASKED tokens ask for it in the second.

    The needle is the value's token, as often as 128 goes into the length: one in 128 is as hard to find as 16 in 2,048.
    """
    chance = torch.Generator().manual_seed(step)
    half = seq_len // 2
    tokens = torch.randint(0, NOISE, (ROWS, seq_len), generator=chance)
    values = torch.randint(0, VALUES, (ROWS, 1), generator=chance)
    needle = torch.arange(seq_len // 128)
    place = torch.randint(0, half - len(needle), (ROWS, 1), generator=chance)
    tokens.scatter_(1, place + needle, (NOISE + values).expand(-1, len(needle)))
    asking = half + torch.rand(ROWS, seq_len - half, generator=chance).argsort(dim=1)[:, :ASKED]
    tokens.scatter_(1, asking, ASK)
    labels = torch.full_like(tokens, IGNORE).scatter_(1, asking, (NOISE + values).expand(-1, ASKED))
    positions = torch.arange(seq_len).expand(ROWS, -1)
    return Batch(tokens[None], labels[None], positions, torch.zeros(ROWS, seq_len, dtype=torch.int32))


def config_of(seq_len: int, cp: int, steps: int, exchange: str = "ring", payload: str = "latent") -> Config:
    model = ModelConfig(
        vocab_size=ASK + 1, dim=32, num_layers=2, num_dense_layers=1, dense_hidden=64, num_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=2, v_head_dim=16, num_experts=4, top_k=2, expert_hidden=32,
        num_shared_experts=1, init_std=0.1,
    )  # fmt: skip
    return Config(
        model=model,
        moe=MoESection(aux_loss_weight=0.0),
        parallel=ParallelConfig(dp=1, cp=cp),
        cp=ContextParallelConfig(exchange, payload),
        precision=PrecisionConfig("fp32", "float32", "float32", "float32"),
        optim=OptimConfig(lr=1e-2, warmup_steps=5, min_lr_ratio=0.2, weight_decay=0.0),
        train=TrainConfig(steps=steps, global_batch=ROWS, micro_batch=ROWS, seq_len=seq_len, seed=1),
    )


def _losses(rank: int, config: Config) -> list[float]:
    trainer = Trainer(config, rank, torch.device("cpu"))
    cp = trainer.groups.cp
    batches = (rows_of(step, config.train.seq_len).share(cp.rank, cp.size) for step in range(config.train.steps))
    return [trainer.step([batch]).loss for batch in batches]


def learn(seq_len: int, cp: int, steps: int, time_limit: float, exchange: str = "ring") -> list[float]:
    """The loss of every step, nats for each value asked for; without having read the row it is log(VALUES)."""
    config = config_of(seq_len, cp, steps, exchange)
    losses = run_ranks(cp, _losses, config, time_limit=time_limit)
    assert all(each == losses[0] for each in losses)
    return losses[0]
