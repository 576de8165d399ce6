"""Sampling text from a model that is spread over ranks: each new token is one forward of the whole pipeline."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.model.batch import Batch, ItemCounts
from moe_engine.model.transformer import LossRule
from moe_engine.ops.loss import IGNORE
from moe_engine.pipeline.executor import Executor

ROW_BLOCK = 32  # rows grow by this much, so that few different lengths occur


def generate(
    executor: Executor, prompt: list[int], new_tokens: int, max_len: int, seed: int = 0, temperature: float = 0.8
) -> list[int]:
    """`prompt` and up to `new_tokens` sampled tokens, the same on every rank. All ranks must call this together.

    At most `max_len` tokens in all: the model has seen no longer rows. Raises ValueError for an empty prompt.
    """
    if not prompt:
        raise ValueError("prompt=[]: the first token needs one before it, for example an end of document")
    tokens = list(prompt)
    chance = torch.Generator().manual_seed(seed)
    for _ in range(min(new_tokens, max_len - len(prompt))):
        tokens.append(_next_token(executor, tokens, chance, temperature))
    return tokens


def _next_token(executor: Executor, tokens: list[int], chance: torch.Generator, temperature: float) -> int:
    batch = _row(tokens).to(next(iter(executor.stages.values())).device)
    rule = LossRule(ItemCounts(0, (), 0, 0), 0.0)
    sums = executor.forward_only([batch], rule)
    uniform = torch.rand((), generator=chance, dtype=torch.float64)
    groups = executor.groups
    chosen = torch.zeros(1, dtype=torch.int64)
    for stage in executor.stages.values():
        # Where the head has two holders, one of them ran the forward.
        if stage.spec.head and 0 in sums.hidden and groups.data.rank == 0:
            logits = stage.logits(sums.hidden[0][len(tokens) - 1 : len(tokens)])[0]
            chosen[0] = _sample(logits, uniform, temperature)
    return int(groups.world.all_reduce_sum(chosen.to(batch.tokens.device), "sampled token"))


def _sample(logits: Tensor, uniform: Tensor, temperature: float) -> int:
    """The token whose share of the cumulative distribution holds `uniform`."""
    cumulative = (logits.double().cpu() / temperature).softmax(dim=-1).cumsum(dim=-1)
    return min(int(torch.searchsorted(cumulative, uniform * cumulative[-1])), logits.numel() - 1)


def _row(tokens: list[int]) -> Batch:
    """One row without targets, padded to a multiple of ROW_BLOCK."""
    length = -(-len(tokens) // ROW_BLOCK) * ROW_BLOCK
    row = torch.zeros(1, 1, length, dtype=torch.int64)
    row[0, 0, : len(tokens)] = torch.tensor(tokens)
    place = torch.arange(length)[None]
    return Batch(
        row, torch.full_like(row, IGNORE), place, torch.zeros_like(place, dtype=torch.int32), place < len(tokens)
    )
