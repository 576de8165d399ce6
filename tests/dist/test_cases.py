"""Failures that users of other engines met, through the whole engine in several layouts, against the plain model.

Everything is float64 and the truth is `plain_v3`, which knows nothing of ranks, micro-batches or padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.fx.experimental.symbolic_shapes  # noqa: F401 - before the fork: 1 s at a rank's first backward
from layout_cases import MODELS, Case, config_of
from plain_v3 import PlainResult, PlainRows, PlainV3
from ranks import run_ranks
from torch import Tensor

from moe_engine.config.schema import Config, RecomputeConfig
from moe_engine.model.batch import IGNORE, Batch, ItemCounts
from moe_engine.planner.flops import parameter_count
from moe_engine.trainer import Trainer

ROWS, LENGTH, VOCAB, DEPTHS = 4, 8, 61, 2
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Kind:
    """A global batch with something odd in it; what is the same for all kinds is in `make_batch`."""

    name: str
    valid: dict[int, float] = field(default_factory=dict)  # by row: the share of targets kept (1 where not named)
    single: tuple[int, ...] = ()  # rows with one valid main target and one valid MTP target
    padded: dict[int, int] = field(default_factory=dict)  # by row: how many tokens are no padding
    skew: bool = False
    aux_weight: float = 0.01
    z_weight: float = 0.0

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)


SINGLE = Kind("a_rank_with_a_single_target", single=(1, 3), valid={2: 0.4})
NONE = Kind("ranks_without_any_target", valid={0: 0.0, 1: 0.0, 2: 0.3})
IGNORED = Kind("no_targets_at_all", valid=dict.fromkeys(range(ROWS), 0.0))
PADDED = Kind("a_rank_of_padding_alone", padded={0: 5, 1: 0, 2: 8, 3: 1})
SKEWED = Kind("everything_goes_to_one_rank", skew=True, valid={1: 0.5})
LARGE = Kind("only_the_logits_count", valid=dict.fromkeys(range(ROWS), 0.0), padded={1: 3}, aux_weight=0, z_weight=0.01)
KINDS = [SINGLE, NONE, IGNORED, PADDED, SKEWED, LARGE]
LAYOUTS = [(1, 4, 4, 1), (2, 2, 2, 1), (4, 1, 1, 1), (1, 1, 4, 4), (1, 2, 2, 2)]  # pp, dp, ep, cp


def make_config(kind: Kind, pp: int = 1, dp: int = 1, ep: int = 1, cp: int = 1, tied: bool | None = None) -> Config:
    """The harness's model made smaller; with a tied head at pp=4, where no two stages are on one rank.

    Over four data-parallel ranks rows go by two hops.
    """
    payload = "latent" if cp == 4 else "kv"
    schedule = "split_1f1b" if dp > 1 else "1f1b"
    config = config_of(
        Case(pp=pp, dp=dp, cp=cp, ep=ep, schedule=schedule, payload=payload, ranks_per_node=2 if dp == 4 else None)
    )
    config.model = replace(config.model, num_layers=3, dim=16, tied_head=pp == 4 if tied is None else tied)
    config.moe = replace(config.moe, aux_loss_weight=kind.aux_weight, z_loss_weight=kind.z_weight)
    config.moe.combine = "exact" if ep == 4 else "dedup"
    config.train = replace(config.train, global_batch=ROWS, micro_batch=1, seq_len=LENGTH)
    return config


def make_batch(kind: Kind) -> Batch:
    """Two documents a row; main and MTP targets dropped independently."""
    chance = torch.Generator().manual_seed(11)
    stream = torch.randint(0, VOCAB, (ROWS, LENGTH + DEPTHS), generator=chance)
    tokens, labels = (
        torch.stack([stream[:, k + i : k + i + LENGTH] for k in range(DEPTHS)]).clone() for i in (0, 1)
    )  # fmt: skip
    border = torch.tensor([[3], [8], [6], [1]])
    place = torch.arange(LENGTH).expand(ROWS, -1)
    positions = place - border * (place >= border)
    keep = torch.rand(labels.shape, generator=chance)
    for row in range(ROWS):
        labels[:, row][keep[:, row] >= kind.valid.get(row, 1.0)] = IGNORE
        if row in kind.single:
            labels[:, row] = IGNORE
            labels[0, row, 5], labels[1, row, 2] = 9, 33
    mask = None
    if kind.padded:
        mask = place < torch.tensor([kind.padded.get(row, LENGTH) for row in range(ROWS)])[:, None]
        labels[:, ~mask] = IGNORE
    return Batch(tokens, labels, positions, (place >= border).int(), mask)


def set_biases(trainer: Trainer, kind: Kind) -> None:
    for layer in trainer.moe_layers().values():
        layer.router.expert_bias[: trainer.config.model.top_k] = 10.0 if kind.skew else 0.0


def _run(rank: int, jobs: list[tuple[Config, Kind]]) -> list[dict[str, Any]]:
    """Each job one step: initial values as they should be, the loss by evaluation, raw gradients and the result."""
    found = []
    for config, kind in jobs:
        trainer = Trainer(config, rank, torch.device("cpu"))
        set_biases(trainer, kind)
        layout, cp = trainer.groups.layout, trainer.groups.cp
        own = ROWS // layout.dp
        first = layout.coordinate(rank).dp * own
        batch = make_batch(kind).share(cp.rank, cp.size)
        for shard in trainer.optimizer.named_shards():
            expected = initial_values(config.model.tied_head)[shard.name].view(-1)[shard.start : shard.end]
            assert torch.equal(shard.states["master"], expected), shard.name
        batches = [batch.slice_rows(i, i + 1) for i in range(first, first + own)]
        evaluated = {trainer.evaluate(batches), trainer.evaluate([batch.slice_rows(first, first + own)])}
        gradients = trainer.accumulate(batches)
        raw = [(s.name, s.start, s.shape, s.gradient.clone()) for s in trainer.optimizer.named_gradient_shards()]
        found.append({"gradients": raw, "evaluated": evaluated, "result": trainer.update(gradients)})
    return found


def whole(ranks: list[list[tuple[str, int, torch.Size, Tensor]]]) -> dict[str, Tensor]:
    """The shards of all ranks put together; no element is missing or twice."""
    found: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    for name, start, shape, part in (shard for rank in ranks for shard in rank):
        flat = found.setdefault(name, torch.full(shape, math.nan, dtype=torch.float64)).view(-1)
        flat[start : start + part.numel()] = part
        filled[name] = filled.get(name, 0) + part.numel()
    assert all(not value.isnan().any() and filled[name] == value.numel() for name, value in found.items())
    return found


@cache
def runs(layout: tuple[int, int, int, int]) -> dict[str, list[dict[str, Any]]]:
    """All kinds in one layout, by kind: what each rank found."""
    pp, dp, ep, cp = layout
    initial_values(pp == 4)  # made here, so that the ranks need not
    jobs = [(make_config(kind, pp, dp, ep, cp), kind) for kind in KINDS]
    results = run_ranks(pp * dp * cp, _run, jobs, time_limit=240.0)
    return {kind.name: [result[i] for result in results] for i, kind in enumerate(KINDS)}


@cache
def initial_values(tied: bool) -> dict[str, Tensor]:
    """The parameters at step 0, from one rank: by name and seed they are the same in every layout."""
    shards = Trainer(make_config(SINGLE, tied=tied), 0, torch.device("cpu")).optimizer.named_shards()
    return {s.name: s.states["master"].view(s.shape).clone() for s in shards}


@cache
def truth(kind: Kind, tied: bool) -> tuple[PlainResult, dict[str, Tensor]]:
    """The plain model's losses and gradients."""
    parameters = {name: value.clone().requires_grad_() for name, value in initial_values(tied).items()}
    biases: dict[str, Tensor] = {}
    if kind.skew:
        names = [name for name in parameters if name.endswith("router.weight")]
        biases = {name.replace("weight", "expert_bias"): torch.tensor([10.0] * 3 + [0.0] * 5) for name in names}
    config = make_config(kind, tied=tied)
    plain = PlainV3(config.model, parameters, biases)
    result = plain.loss(plain_rows(kind), kind.aux_weight, config.train.mtp_loss_weight, kind.z_weight)
    assert result.margin > 1e-7, "a near-tie in the routing: choose another seed"
    result.total.backward()
    return result, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}


def plain_rows(kind: Kind) -> PlainRows:
    batch = make_batch(kind)
    keep = torch.ones(batch.shape, dtype=torch.bool) if batch.token_mask is None else batch.token_mask
    return PlainRows(batch.tokens, batch.labels, batch.document_ids, keep)


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = float((found[name] - gradient).norm())
        assert error <= TOLERANCE * float(gradient.norm()), f"{name}: {error}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_odd_batches_equal_the_plain_model_in_every_layout(layout: tuple[int, int, int, int], kind: Kind) -> None:
    """Losses, every raw gradient, the norm and the counts; evaluation in many batches and in one gives that loss."""
    found = runs(layout)[kind.name]
    expected, expected_gradients = truth(kind, tied=layout[0] == 4)
    assert_gradients(whole([each["gradients"] for each in found]), expected_gradients)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected_gradients.values()))
    counts: dict[str, list[int]] = {}
    for result, evaluated in ((each["result"], each["evaluated"]) for each in found):
        assert evaluated == {result.loss}
        assert result.loss == pytest.approx(expected.main, rel=TOLERANCE)
        assert result.z_loss == pytest.approx(expected.z, rel=TOLERANCE)
        assert result.mtp_losses == pytest.approx(expected.mtp, rel=TOLERANCE)
        assert result.aux_loss == pytest.approx(expected.aux, rel=TOLERANCE)
        assert result.grad_norm == pytest.approx(norm, rel=TOLERANCE) and not result.skipped
        for name, count in result.expert_counts.items():
            assert counts.setdefault(name, count.tolist()) == count.tolist()
    assert counts == expected.counts
    ratios = [max(count) * len(count) / sum(count) for count in counts.values()]
    assert {each["result"].expert_loads.expert_max_over_mean for each in found} == {max(ratios)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_without_targets_the_loss_is_zero_and_only_balance_is_left(layout: tuple[int, int, int, int]) -> None:
    found = runs(layout)[IGNORED.name]
    for result in (each["result"] for each in found):
        assert (result.loss, result.mtp_losses) == (0.0, (0.0,))
        assert result.items == ItemCounts(0, (0,), ROWS, ROWS * LENGTH)
        assert math.isfinite(result.grad_norm) and result.grad_norm > 0
    gradients = whole([each["gradients"] for each in found])
    assert not gradients["norm.weight"].any() and not gradients["mtp.0.norm.weight"].any()


class RouterInputs(PlainV3):
    """Remembers what each router saw, a tensor [n, D] per row."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: dict[str, list[Tensor]] = {}

    def _experts(self, x: Tensor, name: str, row: Any) -> Tensor:
        self.seen.setdefault(name, []).append(x.detach())
        return super()._experts(x, name, row)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_last_routers_gradient_from_the_balance_loss_is_coefficient_times_the_formula(
    layout: tuple[int, int, int, int],
) -> None:
    """d/d logit_j of sum_i f_i P_i is (f_j - sum_i f_i s'_i) s'_j (1 - s_j) / n; no later layer adds to it."""
    gradients = whole([each["gradients"] for each in runs(layout)[IGNORED.name]])
    config, values = make_config(IGNORED, *layout), initial_values(layout[0] == 4)
    plain = RouterInputs(config.model, values)
    plain.loss(plain_rows(IGNORED), 0.0, 0.0)
    E, K, name = config.model.num_experts, config.model.top_k, "mtp.0.block.moe"
    weight, expected = values[f"{name}.router.weight"], torch.zeros(E, config.model.dim, dtype=torch.float64)
    for x in plain.seen[name]:
        scores = (x @ weight.T).sigmoid()
        shares = scores / scores.sum(dim=1, keepdim=True)
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(K, dim=1).indices, 1.0)
        f = chosen.sum(dim=0) * E / (K * LENGTH)
        d_logits = (f - (f * shares).sum(dim=1, keepdim=True)) * shares * (1 - scores) / LENGTH
        expected += IGNORED.aux_weight / ROWS * d_logits.T @ x
    error = (gradients[f"{name}.router.weight"] - expected).norm() / expected.norm()
    assert float(error) < TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_last_routers_gradient_from_the_z_loss_is_coefficient_times_the_formula(
    layout: tuple[int, int, int, int],
) -> None:
    """d/d logit_j of logsumexp^2 is 2 logsumexp softmax_j; the mean is over the tokens that are no padding."""
    gradients = whole([each["gradients"] for each in runs(layout)[LARGE.name]])
    config, values = make_config(LARGE, *layout), initial_values(layout[0] == 4)
    plain = RouterInputs(config.model, values)
    plain.loss(plain_rows(LARGE), 0.0, 0.0)
    name = "mtp.0.block.moe"
    x = torch.cat(plain.seen[name])
    logits = x @ values[f"{name}.router.weight"].T
    expected = LARGE.z_weight / len(x) * (2 * logits.logsumexp(1, keepdim=True) * logits.softmax(1)).T @ x
    assert len(x) == ROWS * LENGTH - 5
    error = (gradients[f"{name}.router.weight"] - expected).norm() / expected.norm()
    assert float(error) < TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_idle_experts_have_zero_gradients(layout: tuple[int, int, int, int]) -> None:
    gradients = whole([each["gradients"] for each in runs(layout)[SKEWED.name]])
    experts = {name: g for name, g in gradients.items() if ".experts." in name}
    idle = {name for name in experts if int(name.split(".experts.")[1].split(".")[0]) >= 3}
    assert len(idle) == len(experts) * 5 // 8
    for name, gradient in experts.items():
        assert bool(gradient.any()) == (name not in idle), name


# Micro-batches and ranks without any row at all.


def _empty_rows(rank: int, dp: int, ep: int, model: str, empty: int = 1) -> dict[str, Any]:
    """Rank 0 has all rows in its first micro-batch; the `empty` after it, and those of other ranks, have none."""
    config = make_config(SINGLE, 1, dp, ep)
    config.model = replace(config.model, **MODELS[model])
    config.recompute = RecomputeConfig("full" if model == "qwen3" else "none")
    config.train = replace(config.train, global_batch=(1 + empty) * dp)
    trainer = Trainer(config, rank, torch.device("cpu"))
    batch, nothing = make_batch(SINGLE), make_batch(SINGLE).slice_rows(0, 0)
    gradients = trainer.accumulate([batch if rank == 0 else nothing, *[nothing] * empty])
    raw = [(s.name, s.start, s.shape, s.gradient.clone()) for s in trainer.optimizer.named_gradient_shards()]
    return {"gradients": raw, "result": trainer.update(gradients)}


@pytest.mark.parametrize(
    ("dp", "ep", "model"), [(1, 1, "v3"), (2, 2, "v3"), (2, 1, "v3"), (1, 1, "qwen3"), (2, 2, "qwen3")]
)
def test_a_rank_without_rows_and_an_empty_micro_batch_change_nothing(dp: int, ep: int, model: str) -> None:
    found = run_ranks(dp, _empty_rows, dp, ep, model)
    alone = _empty_rows(0, 1, 1, model, empty=0)
    expected, expected_gradients = alone["result"], whole([alone["gradients"]])
    assert_gradients(whole([each["gradients"] for each in found]), expected_gradients)
    if model == "v3":
        assert_gradients(expected_gradients, truth(SINGLE, tied=False)[1])
    for each in found:
        assert each["result"].loss == pytest.approx(expected.loss, rel=TOLERANCE)
        assert each["result"].aux_loss == pytest.approx(expected.aux_loss, rel=TOLERANCE)


# The global norm.


def _unit_norm(rank: int, pp: int, dp: int, ep: int, name: str) -> tuple[float, float]:
    """All gradients 1, then each parameter's gradient an own constant; brought by one of the ranks that share it."""
    config = make_config(SINGLE, pp, dp, ep)
    config.pipeline.schedule, config.model.num_layers = name, 4
    config.train.global_batch = 4 * dp
    trainer = Trainer(config, rank, torch.device("cpu"))
    norms = []
    for constant in (False, True):
        trainer.optimizer.zero_grad()
        for named in trainer.named:
            sharers = (trainer.groups.expert if named.expert else trainer.groups.dense)[named.holders]
            if sharers.rank == sharers.size - 1:
                grads = list(named.parameter.grad) if named.expert else [named.parameter.grad]
                for piece_name, grad in zip(named.names, grads, strict=True):
                    grad.fill_(len(piece_name) if constant else 1.0)
        trainer.optimizer.reduce_gradients()
        norms.append(trainer.optimizer.gradient_norm())
    return norms[0], norms[1]


def test_the_norm_counts_every_parameter_once_in_a_v_too() -> None:
    config = make_config(SINGLE)
    config.model.num_layers = 4
    expected_unit = parameter_count(config.model).total ** 0.5
    alone = _unit_norm(0, 1, 1, 1, "1f1b")
    assert alone[0] == pytest.approx(expected_unit, rel=1e-15) and alone[1] > 10 * alone[0]
    for pp, dp, ep, name in ((2, 2, 2, "dualpipev"), (2, 2, 1, "1f1b")):
        assert run_ranks(pp * dp, _unit_norm, pp, dp, ep, name) == [alone] * (pp * dp)
