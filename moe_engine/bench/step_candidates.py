"""What `bench step` times: the engine, in any recipe and routing, and the same model in plain PyTorch.

Every candidate starts from the parameters that the engine starts with and trains on the same random rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moe_engine.bench import peers, routing
from moe_engine.bench.routing import ENGINE
from moe_engine.config.schema import Config
from moe_engine.config.validate import PRECISIONS
from moe_engine.model.batch import Batch
from moe_engine.trainer import Trainer

RECIPES = ("bf16", "fp32", "fp8")
PEERS = {"plain_bf16": True, "plain_fp32": False}  # name: autocast


@dataclass
class Engine:
    """The engine as a candidate: calling it runs step `index`; returns (loss, gradient norm).

    figures: how experts were chosen, and the last step's load over the mean, of the most loaded expert and rank.
    """

    trainer: Trainer
    device: torch.device
    rank: int
    figures: dict[str, Any] = field(default_factory=dict)

    def __call__(self, index: int) -> tuple[float, float]:
        config = self.trainer.config
        result = self.trainer.step([rows.to(self.device) for rows in random_rows(config, index, self.rank)])
        self.figures = routing.load_figures(config, result)
        return result.loss, result.grad_norm


@dataclass
class Peer:
    """A plain trainer as a candidate."""

    trainer: peers.PlainTrainer
    device: torch.device
    rank: int

    def __call__(self, index: int) -> tuple[float, float]:
        rows = [batch.to(self.device) for batch in random_rows(self.trainer.config, index, self.rank)]
        result = self.trainer.step([(batch.tokens[0], batch.labels[0]) for batch in rows])
        return result.loss, result.grad_norm


def recipe_of(candidate: str) -> str | None:
    """The recipe of a candidate of `bench.precisions`."""
    word = candidate.removeprefix(ENGINE).strip()
    return word if word in RECIPES else None


def candidates(
    rank: int, device: torch.device, config: Config, names: list[str]
) -> dict[str, Callable[[int], tuple[float, float]]]:
    """The named candidates, all with the parameters that the engine starts with."""
    found: dict[str, Callable[[int], tuple[float, float]]] = {}
    for name in names:
        if name not in PEERS:
            own, recipe = copy.deepcopy(config), recipe_of(name)
            if recipe is None:
                own.moe.routing = routing.routing_of(name)
            else:
                own.precision = replace(own.precision, name=recipe, compute=PRECISIONS[recipe])
            found[name] = Engine(Trainer(own, rank, device), device, rank)
        else:
            alone = copy.deepcopy(config)
            alone.parallel.dp = alone.parallel.ep = 1
            alone.train.global_batch //= config.parallel.dp or 1
            whole = Trainer(alone, 0, device)
            parameters = {
                shard.name: shard.states["master"].view(shard.shape) for shard in whole.optimizer.named_shards()
            }
            found[name] = Peer(peers.PlainTrainer(config, parameters, PEERS[name], device), device, rank)
    return found


def random_rows(config: Config, index: int, rank: int) -> list[Batch]:
    """This rank's micro-batches of random tokens for step `index`, every place a target."""
    train, depths = config.train, 1 + config.model.mtp_depth
    chance = torch.Generator().manual_seed(train.seed * 1_000_003 + index * 1009 + rank)
    S, batches = train.seq_len, []
    for _ in range(train.global_batch // ((config.parallel.dp or 1) * train.micro_batch)):
        stream = torch.randint(0, config.model.vocab_size, (train.micro_batch, S + depths), generator=chance)
        tokens = torch.stack([stream[:, k : k + S] for k in range(depths)])
        labels = torch.stack([stream[:, k + 1 : k + 1 + S] for k in range(depths)])
        positions = torch.arange(S).expand(train.micro_batch, S)
        batches.append(Batch(tokens, labels, positions, torch.zeros(train.micro_batch, S, dtype=torch.int32)))
    return batches
