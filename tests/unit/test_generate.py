"""Sampling on one rank: what it draws, from which distribution, and where it stops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layout_cases import Case, config_of
from plain_v3 import PlainV3

from moe_engine.pipeline.generate import generate
from moe_engine.trainer import Trainer

PROMPT = [5, 17, 2]


@pytest.fixture
def trainer() -> Trainer:
    config = config_of(Case())
    config.model = replace(config.model, num_layers=2, init_std=0.4)
    return Trainer(config, 0, torch.device("cpu"))


def test_at_a_low_temperature_it_takes_the_most_probable_token_of_the_plain_model(trainer: Trainer) -> None:
    """Past the first block of rows (32) too, so that padding and positions are seen to be right."""
    tokens = generate(trainer.executor, PROMPT, new_tokens=33, max_len=64, temperature=1e-9)
    parameters = {s.name: s.states["master"].view(s.shape) for s in trainer.optimizer.named_shards()}
    plain = PlainV3(trainer.config.model, parameters)
    assert tokens[:3] == PROMPT and len(tokens) == 36
    for n in (3, 4, 5, 20, 31, 32, 33, 35):
        assert tokens[n] == int(plain.next_token_logits(tokens[:n]).argmax()), n
    assert len(set(tokens)) > 3


def test_draws_follow_the_distribution(trainer: Trainer) -> None:
    """One new token under many seeds: frequencies are those of softmax(logits / temperature)."""
    parameters = {s.name: s.states["master"].view(s.shape) for s in trainer.optimizer.named_shards()}
    expected = (PlainV3(trainer.config.model, parameters).next_token_logits(PROMPT) / 0.5).softmax(dim=0)
    draws = 60
    seen = torch.zeros(trainer.config.model.vocab_size)
    for seed in range(draws):
        seen[generate(trainer.executor, PROMPT, 1, 64, seed=seed, temperature=0.5)[-1]] += 1
    best = expected.argsort(descending=True)[: int((expected > 0.1).sum())]
    share = float(expected[best].sum())
    assert 0.1 < share < 0.95, "the test needs a distribution that is neither flat nor certain"
    deviation = (share * (1 - share) / draws) ** 0.5
    assert abs(float(seen[best].sum()) / draws - share) < 4 * deviation


def test_the_seed_alone_decides(trainer: Trainer) -> None:
    torch.manual_seed(1)
    first = generate(trainer.executor, PROMPT, 8, 64, seed=3)
    torch.manual_seed(2)
    assert generate(trainer.executor, PROMPT, 8, 64, seed=3) == first
    assert generate(trainer.executor, PROMPT, 8, 64, seed=4) != first
    assert generate(trainer.executor, PROMPT, 4, 64, seed=3) == first[:7]


def test_it_respects_max_len_and_leaves_the_prompt_alone(trainer: Trainer) -> None:
    prompt = list(PROMPT)
    assert len(generate(trainer.executor, prompt, 10, max_len=6)) == 6
    assert generate(trainer.executor, prompt, 0, max_len=6) == PROMPT
    assert generate(trainer.executor, prompt, 10, max_len=2) == PROMPT
    assert prompt == PROMPT
    with pytest.raises(ValueError, match=r"prompt=\[\]"):
        generate(trainer.executor, [], 3, max_len=6)


def test_it_counts_and_trains_nothing(trainer: Trainer) -> None:
    trainer.optimizer.zero_grad()
    generate(trainer.executor, PROMPT, 3, 64)
    for layer in trainer.moe_layers().values():
        assert not layer.router.num_tokens_per_expert.any() and layer.training
    assert not any(named.parameter.grad.any() for named in trainer.named)
