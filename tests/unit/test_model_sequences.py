"""What a token's loss may depend on: its document and nothing else. And what evaluation and recompute must not move."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from layout_cases import PRECISIONS, Case, config_of
from plain_v3 import PlainV3
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_engine.config.schema import Config, ModelConfig
from moe_engine.layout import split_stages
from moe_engine.model import transformer
from moe_engine.model.attention import sequence_context
from moe_engine.model.batch import IGNORE, Batch, ItemCounts, count_items
from moe_engine.model.block import Block
from moe_engine.model.transformer import LossRule, Stage
from moe_engine.ops.wgrad_queue import WgradQueue
from moe_engine.trainer import Trainer

VOCAB = 61


def small_config(precision: str = "fp64", mtp_depth: int = 1, rows: int = 4, **model: Any) -> Config:
    """The harness's model cut down to a dense and an MoE layer."""
    config = config_of(Case(precision=precision, mtp_depth=mtp_depth))
    config.model = replace(config.model, num_layers=2, **model)
    config.train = replace(config.train, global_batch=rows, micro_batch=rows)
    return config


def trainer_of(config: Config) -> Trainer:
    return Trainer(config, 0, torch.device("cpu"))


def documents(lengths: list[list[int]], depths: int, seed: int = 0) -> Batch:
    """A row for each list, packed from random documents of these lengths; targets stay inside their document."""
    chance = torch.Generator().manual_seed(seed)
    length = sum(lengths[0])
    stream = torch.randint(0, VOCAB, (len(lengths), length + depths), generator=chance)
    ids = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in lengths])
    positions = torch.tensor([[t for n in row for t in range(n)] for row in lengths])
    tokens = torch.stack([stream[:, k : k + length] for k in range(depths)])
    labels = torch.full_like(tokens, IGNORE)
    for k in range(depths):
        inside = ids[:, k + 1 :] == ids[:, : length - k - 1]
        labels[k, :, : length - k - 1][inside] = stream[:, k + 1 : length][inside]
    return Batch(tokens, labels, positions, ids.int(), None)


def alone(batch: Batch, row: int, start: int, stop: int) -> Batch:
    """Tokens start … stop-1 of a row as a batch of their own."""
    cut, places = slice(row, row + 1), slice(start, stop)
    length = stop - start
    return Batch(
        batch.tokens[:, cut, places],
        batch.labels[:, cut, places],
        torch.arange(length)[None],
        torch.zeros(1, length, dtype=torch.int32),
        None,
    )


class TokenLosses:
    """Sees the per-token losses of every stage forward, [1+D, T] each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Tensor] = []
        real = transformer.fixed_point_sum

        def watch(losses: Tensor) -> Tensor:
            self.seen.append(losses.detach().clone())
            return real(losses)

        monkeypatch.setattr(transformer, "fixed_point_sum", watch)

    def of(self, stage: Stage, batch: Batch, rule: LossRule, x: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(per-token losses [1+D, B, S], the loss to differentiate)."""
        self.seen.clear()
        output = stage(batch, x, rule)
        return torch.stack(self.seen).view(-1, *batch.shape), output.loss


def gradients_of(trainer: Trainer) -> dict[str, Tensor]:
    return {shard.name: shard.gradient.clone() for shard in trainer.optimizer.named_gradient_shards()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-11) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        error = float((found[name] - grad).norm())
        assert error <= tolerance * float(grad.norm()), f"{name}: {error}"


def test_packed_documents_equal_separate_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, MTP losses and gradients; and the main losses are those of the plain model on each document."""
    config = small_config(mtp_depth=2, rows=2)
    config.moe = replace(config.moe, aux_loss_weight=0.0)  # its unit is the row, not the document
    trainer = trainer_of(config)
    stage, watch = trainer.stages[0], TokenLosses(monkeypatch)
    cuts = [[9, 1, 10], [3, 17]]
    packed = documents(cuts, depths=3)
    rule = LossRule(count_items([packed]), 0.3)
    losses, total = watch.of(stage, packed, rule)
    assert total is not None
    total.backward()
    together = {named.names: named.parameter.grad.clone() for named in trainer.named}
    trainer.optimizer.zero_grad()
    parameters = {s.name: s.states["master"].view(s.shape) for s in trainer.optimizer.named_shards()}
    plain = PlainV3(config.model, parameters)
    for row, lengths in enumerate(cuts):
        start = 0
        for length in lengths:
            own = alone(packed, row, start, start + length)
            own_losses, own_total = watch.of(stage, own, rule)
            own_total.backward()
            torch.testing.assert_close(own_losses[:, 0], losses[:, row, start : start + length], rtol=1e-11, atol=0)
            expected = plain.token_losses(own.tokens[0, 0].tolist(), own.labels[0, 0].tolist())
            torch.testing.assert_close(own_losses[0, 0].tolist(), expected, rtol=1e-11, atol=1e-13)
            start += length
    assert_close({n.names: n.parameter.grad for n in trainer.named}, together)


def test_without_borders_a_row_is_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """The borders above matter: without them the losses differ after the first border and only there."""
    trainer, watch = trainer_of(small_config(mtp_depth=0, rows=1)), TokenLosses(monkeypatch)
    packed = documents([[8, 8]], depths=1)
    whole = replace(packed, document_ids=torch.zeros_like(packed.document_ids), positions=torch.arange(16)[None])
    rule = LossRule(count_items([packed]), 0.3)
    a, b = (watch.of(trainer.stages[0], batch, rule)[0][0, 0] for batch in (packed, whole))
    torch.testing.assert_close(a[:8], b[:8], rtol=1e-12, atol=0)
    assert (a[8:15] - b[8:15]).abs().min() > 1e-6


ODD_HEADS = {"num_heads": 3, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6, "v_head_dim": 5}
GROUPED: dict[str, Any] = {
    "attention": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "qk_norm": True, "rope_style": "halves",
    "score_function": "softmax", "num_groups": 1, "top_groups": 1,
}  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("length", [5, 21])
@pytest.mark.parametrize("model", [{}, ODD_HEADS, GROUPED], ids=["heads_of_4", "odd_heads", "grouped"])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(
    precision: str, length: int, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses of every depth and the gradient of the stage's input, through a middle-to-last stage, under any split."""
    config = small_config(precision, **model)
    dtype = getattr(torch, PRECISIONS[precision].compute)
    stage = Stage(split_stages(config.model, 2)[1], config.model, config.moe, None, dtype)
    chance = torch.Generator().manual_seed(4)
    for parameter in stage.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=chance) * 0.2)
    batch = documents([[length], [2, length - 2], [1, length - 1], [length], [length - 2, 1, 1]], depths=2)
    batch = replace(batch, token_mask=torch.ones(5, length, dtype=torch.bool))
    batch.token_mask[3, length - 2 :] = False
    rule, watch = LossRule(count_items([batch]), 0.3), TokenLosses(monkeypatch)
    hidden = torch.randn(5, length, config.model.dim, generator=chance).to(dtype)

    def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
        x = hidden[start:stop].reshape(-1, config.model.dim).clone().requires_grad_()
        losses, total = watch.of(stage, batch.slice_rows(start, stop), rule, x)
        total.backward()
        return losses, x.grad.view(stop - start, length, -1)

    losses, x_grad = part(0, 5)
    assert losses[:, :, 0].any() and x_grad.any()
    for cuts in ([0, 1, 2, 3, 4, 5], [0, 1, 5], [0, 2, 4, 5], [0, 3, 5]):
        parts = [part(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
        assert torch.equal(torch.cat([p[0] for p in parts], dim=1), losses), cuts
        assert torch.equal(torch.cat([p[1] for p in parts]), x_grad), cuts


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("model", [{}, GROUPED], ids=["latent", "grouped"])
def test_long_rows_have_the_same_bits_beside_any_others(
    precision: str, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the plain path's length, where a batch with borders and one without take different arguments."""
    config = small_config(precision, mtp_depth=0, num_dense_layers=2, **model)
    stage, watch = trainer_of(config).stages[0], TokenLosses(monkeypatch)
    batch = documents([[600], [200, 400], [600]], depths=1)
    rule = LossRule(count_items([batch]), 0.3)
    with torch.no_grad():
        whole = watch.of(stage, batch, rule)[0]
        for start, stop in ((0, 1), (1, 2), (2, 3), (0, 2)):
            assert torch.equal(watch.of(stage, batch.slice_rows(start, stop), rule)[0], whole[:, start:stop])


def padded(batch: Batch, extra: int, token: int, place: int | None = None) -> Batch:
    """The batch with `extra` padding tokens in each row, before the token at `place` (at the end), in its document."""
    S = batch.shape[1]
    place = S if place is None else place

    def insert(x: Tensor, padding: Tensor | int) -> Tensor:
        middle = torch.empty(*x.shape[:-1], extra, dtype=x.dtype).copy_(torch.as_tensor(padding))
        return torch.cat((x[..., :place], middle, x[..., place:]), dim=-1)

    beside = slice(place - 1, place) if place else slice(0, 1)
    mask = insert(torch.ones_like(batch.positions), 0).bool()
    return Batch(
        insert(batch.tokens, token),
        insert(batch.labels, IGNORE),
        insert(batch.positions, 0),
        insert(batch.document_ids, batch.document_ids[:, beside]),
        mask,
    )


def test_padding_changes_nothing() -> None:
    """Losses, every gradient and the counts; at the end, before or inside a document, and whatever stands there."""
    config = small_config()
    batch = documents([[12], [5, 7], [1, 11], [6, 6]], depths=2)
    results = []
    for each in (
        batch,
        padded(batch, 5, 3),
        padded(batch, 1, 60),
        padded(batch, 3, 7, place=0),
        padded(batch, 2, 0, 4),
    ):
        trainer = trainer_of(config)
        gradients = trainer.accumulate([each])
        results.append((gradients_of(trainer), trainer.update(gradients)))
    expected_gradients, expected = results[0]
    for gradients, result in results[1:]:
        assert result.items == expected.items
        assert result.loss == pytest.approx(expected.loss, rel=1e-12)
        assert result.mtp_losses == pytest.approx(expected.mtp_losses, rel=1e-12)
        assert result.aux_loss == pytest.approx(expected.aux_loss, rel=1e-12)
        for name, counts in expected.expert_counts.items():
            assert torch.equal(result.expert_counts[name], counts) and counts.sum() == 4 * 12 * config.model.top_k
        assert_close(gradients, expected_gradients)


def test_evaluation_moves_nothing_and_gives_the_training_loss() -> None:
    trainer = trainer_of(small_config())
    batch = documents([[12], [5, 7], [1, 11], [6, 6]], depths=2)
    trainer.optimizer.zero_grad()
    loss = trainer.evaluate([batch])
    assert trainer.evaluate([batch.slice_rows(0, 1), batch.slice_rows(1, 4)]) == loss
    assert trainer.evaluate([padded(batch, 3, 9)]) == pytest.approx(loss, rel=1e-12)
    for layer in trainer.moe_layers().values():
        assert not layer.router.num_tokens_per_expert.any() and layer.training
    for named in trainer.named:
        assert not named.parameter.grad.any()
    assert trainer.steps_done == trainer.tokens_seen == 0
    assert trainer.step([batch]).loss == loss


def test_a_loss_that_is_not_finite_is_shown_as_nan_and_moves_nothing() -> None:
    trainer = trainer_of(small_config())
    batch = documents([[12], [5, 7], [1, 11], [6, 6]], depths=2)
    weight = trainer.stages[0].mtp["0"].norm.weight  # reaches the MTP loss alone
    weight.data[3] = math.nan
    before = [named.parameter.detach().clone() for named in trainer.named]
    result = trainer.step([batch])
    assert math.isnan(result.mtp_losses[0]) and math.isnan(result.total_loss) and math.isfinite(result.loss)
    assert result.skipped and result.grad_norm == math.inf
    trainer.stages[0].norm.weight.data[3] = math.inf
    assert math.isnan(trainer.evaluate([batch]))
    weight.data[3] = trainer.stages[0].norm.weight.data[3] = 1.0
    for named, value in zip(trainer.named, before, strict=True):
        assert torch.equal(named.parameter.nan_to_num(1.0), value.nan_to_num(1.0)), named.names
    for layer in trainer.moe_layers().values():
        assert not layer.router.expert_bias.any() and not layer.router.num_tokens_per_expert.any()
    assert math.isfinite(trainer.step([batch]).total_loss)


def test_no_valid_targets_give_loss_zero_and_only_the_balance_gradient() -> None:
    trainer = trainer_of(small_config())
    batch = documents([[12], [5, 7], [1, 11], [6, 6]], depths=2)
    batch.labels.fill_(IGNORE)
    gradients = trainer.accumulate([batch])
    found = gradients_of(trainer)
    result = trainer.update(gradients)
    assert (result.loss, result.mtp_losses, result.items) == (
        0.0,
        (0.0,),
        ItemCounts(0, (0,), 4, batch.tokens[0].numel()),
    )
    assert result.aux_loss > 0 and math.isfinite(result.grad_norm) and not result.skipped
    assert not found["head.weight"].any() and found["layers.1.moe.router.weight"].any()


def a_block(model: ModelConfig, dtype: torch.dtype) -> Block:
    """An MoE block whose router finds all experts equal: every choice is a tie."""
    config = small_config()
    stage = Stage(split_stages(model, 1)[0], model, config.moe, None, dtype)
    chance = torch.Generator().manual_seed(1)
    block = stage.layers["1"]
    assert isinstance(block, Block) and block.moe is not None
    for parameter in block.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=chance) * 0.3)
    block.moe.router.weight.data[:] = block.moe.router.weight.data[0].clone()
    return block


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_routes_the_same_ties_and_counts_once(dtype: torch.dtype, reentrant: bool) -> None:
    model = small_config().model
    batch = documents([[6, 6], [12]], depths=1)
    context = sequence_context(batch, model, dtype)
    chance = torch.Generator().manual_seed(2)
    x, d_out = (torch.randn(24, model.dim, generator=chance).to(dtype) for _ in range(2))

    def run(recompute: bool, split: bool) -> tuple[list[Tensor], Tensor, list[list[int]]]:
        block, queue, splits = a_block(model, dtype), WgradQueue(), []
        block.moe.router.register_forward_hook(lambda _m, _i, routing: splits.append(routing.expert_ids.tolist()))
        own = x.clone().requires_grad_()
        if recompute:
            out, aux = checkpoint(block, own, context, queue, use_reentrant=reentrant)
        else:
            out, aux = block(own, context, queue)
        with queue.defer("m", split):
            torch.autograd.backward([out, aux], [d_out, torch.ones_like(aux)])
        if split:
            queue.run("m")
        assert len(queue) == 0
        return [own.grad, *(p.grad for p in block.parameters())], block.moe.router.num_tokens_per_expert, splits

    expected, counts, splits = run(recompute=False, split=False)
    assert counts.tolist() == [24, 24, 24, 0, 0, 0, 0, 0] and len(splits) == 1  # ties go to the lowest index
    for recompute, split in ((True, False), (True, True), (False, True)):
        found, found_counts, found_splits = run(recompute, split)
        assert found_splits == splits * (1 + recompute)
        assert torch.equal(found_counts, counts)
        for grad, expected_grad in zip(found, expected, strict=True):
            assert torch.equal(grad, expected_grad)
