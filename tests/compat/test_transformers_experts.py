"""Our experts in transformers' models: logits, gradients, training, generation and expert parallelism equal eager's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hf_models import GROUPED, MIXTRAL, QWEN3, V2_LITE, V3, VOCABULARY, random_model
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer, TrainingArguments
from transformers.distributed.expert_parallel import apply_expert_parallelism

from moe_engine import ConfigError
from moe_engine.integrations import transformers as integration

EXPERTS = dict(num_experts=8, moe_intermediate_size=16)
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": V3,
    "deepseek_v2": V2_LITE,
    # hidden and inner sizes are equal here, so that a transposition would pass every check of shapes
    "deepseek_v3 square": V3 | dict(moe_intermediate_size=32),
    "mixtral": MIXTRAL,
    "mixtral gelu": MIXTRAL | dict(hidden_act="gelu"),
    "qwen2_moe": GROUPED | EXPERTS | dict(
        model_type="qwen2_moe", intermediate_size=48, shared_expert_intermediate_size=24, decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "qwen3_moe": QWEN3,
    "olmoe": GROUPED | dict(model_type="olmoe", intermediate_size=16, num_experts=8),
    "glm4_moe": GROUPED | EXPERTS | dict(
        model_type="glm4_moe", intermediate_size=48, n_routed_experts=8, n_shared_experts=1, head_dim=16,
        first_k_dense_replace=1, n_group=1, topk_group=1,
    ),
    "gpt_oss": GROUPED | dict(
        model_type="gpt_oss", intermediate_size=16, num_local_experts=8, head_dim=16, sliding_window=8,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    integration.register()


def normwise(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


def with_experts(model: nn.Module, name: str) -> Any:
    twin: Any = copy.deepcopy(model)
    twin.set_experts_implementation(name)
    return twin


def tokens(batch: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_all_gradients_equal_eager(family: str) -> None:
    model = random_model(FAMILIES[family])
    eager, ours = with_experts(model, "eager").train(), with_experts(model, "moe_engine").train()
    batch = tokens()
    found = [m(batch, labels=batch) for m in (eager, ours)]
    assert normwise(found[1].logits, found[0].logits) < 1e-5
    for one in found:
        one.loss.backward()
    theirs = dict(eager.named_parameters())
    assert any("experts" in name for name in theirs)
    for name, parameter in ours.named_parameters():
        if theirs[name].grad is None:  # an expert implementation may leave unused experts without one
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            assert normwise(parameter.grad, theirs[name].grad) < 1e-5, name


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "gpt_oss"])
def test_generation_equals_eager(family: str) -> None:
    model = random_model(FAMILIES[family])
    eager, ours = with_experts(model, "eager"), with_experts(model, "moe_engine")
    prompt = tokens(2, 5)
    made = [m.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0) for m in (eager, ours)]
    assert made[0].shape == (2, 17) and torch.equal(made[1], made[0])


def train(model: nn.Module, folder: str, steps: int = 4, callbacks: Any = (), **more: Any) -> list[float]:
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in tokens(16, 10, seed=3)]
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0, **more,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=list(callbacks))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_the_trainer_trains_as_with_eager_experts(family: str, tmp_path: Any) -> None:
    model = random_model(FAMILIES[family])
    eager, ours = with_experts(model, "eager"), with_experts(model, "moe_engine")
    losses = [train(m, str(tmp_path / str(i))) for i, m in enumerate((eager, ours))]
    assert losses[1] == pytest.approx(losses[0], rel=2e-5) and losses[1][-1] < losses[1][0]
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        assert normwise(a, b) < 1e-3  # Adam divides by gradients of any size


@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": True, "gradient_accumulation_steps": 2}])
def test_the_callback_moves_the_bias_against_the_load_once_a_step(more: dict[str, Any], tmp_path: Any) -> None:
    model = with_experts(random_model(V3), "moe_engine")
    before = {n: b.clone() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    callback = integration.BalanceCallback(step=0.25)
    loads: list[Tensor] = []
    moved = callback.on_optimizer_step

    def watched(*args: Any, **kwargs: Any) -> None:
        loads.append(torch.stack(list(callback.counts.values())))
        moved(*args, **kwargs)

    callback.on_optimizer_step = watched  # type: ignore[method-assign]
    train(model, str(tmp_path), steps=1, callbacks=[callback], **more)
    rows = 2 * more.get("gradient_accumulation_steps", 1)
    (load,) = loads
    assert len(before) == 2 and load.sum(dim=1).tolist() == [rows * 10 * 2] * 2  # every token once, top 2
    after = {n: b for n, b in model.named_buffers() if n in before}
    for i, name in enumerate(before):
        expected = before[name] + 0.25 * torch.sign(load[i].double().mean() - load[i]).float()
        torch.testing.assert_close(after[name], expected)
    assert not any(counts.any() for counts in callback.counts.values()) and not callback._hooks


def test_the_callback_does_not_count_padding() -> None:
    model = with_experts(random_model(V3), "moe_engine").train()
    callback = integration.BalanceCallback()
    callback.on_train_begin(None, None, None, model=model)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 7:] = 0
    model(tokens(), attention_mask=mask).logits.sum().backward()
    assert [int(counts.sum()) for counts in callback.counts.values()] == [19 * 2, 19 * 2]
    model.eval()
    model(tokens(), attention_mask=mask)
    callback.on_train_end(None, None, None)
    assert [int(counts.sum()) for counts in callback.counts.values()] == [19 * 2, 19 * 2]


def test_the_callback_moves_a_bias_of_a_bf16_model_by_small_steps() -> None:
    model = with_experts(random_model(V3), "moe_engine").bfloat16().train()
    routers = [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]
    for router in routers:
        router.e_score_correction_bias.fill_(7.0)
    callback = integration.BalanceCallback(step=1e-3)
    for _ in range(2):  # the first training broke off: its hooks are not there twice
        callback.on_train_begin(None, None, None, model=model)
    model(tokens()).logits.sum().backward()
    assert [int(counts.sum()) for counts in callback.counts.values()] == [24 * 2, 24 * 2]
    callback.on_optimizer_step(None, None, None, model=model)
    for router in routers:
        assert router.e_score_correction_bias.dtype == torch.float32
        assert (router.e_score_correction_bias - 7).abs().max().item() == pytest.approx(1e-3, rel=1e-3)


def test_a_callback_that_could_do_nothing_is_refused() -> None:
    for step in (-1.0, float("nan"), float("inf"), "0.001", None):
        with pytest.raises(ConfigError, match=f"step={step}: a finite number, 0 or more"):
            integration.BalanceCallback(step=step)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="MixtralForCausalLM has no e_score_correction_bias to move"):
        integration.BalanceCallback().on_train_begin(None, None, None, model=random_model(MIXTRAL))


def test_experts_with_a_norm_behind_them_are_refused() -> None:
    module = nn.Module()
    module.has_post_expert_norm = True
    with pytest.raises(ValueError, match="experts_implementation=moe_engine: Module has a norm behind"):
        integration.experts(module, torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(1, 1))


def _block(experts_implementation: str) -> nn.Module:
    model = with_experts(random_model(V3), experts_implementation).double()
    found: nn.Module = model.model.layers[1].mlp.experts
    return found


def _batches(world: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows, experts and weights of each rank; the last rank has none, and nobody chooses the last two experts."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for rank in range(world):
        number = 0 if rank == world - 1 else 9 + rank
        x = torch.randn(number, 32, generator=generator, dtype=torch.float64)
        ids = torch.rand(number, 6, generator=generator).argsort(dim=1)[:, :2]
        made.append((x, ids, torch.rand(number, 2, generator=generator, dtype=torch.float64)))
    return made


def _expert_parallel(rank: int, world: int, shared_batch: bool, inner: str) -> dict[str, Any]:
    integration.register()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("other", "tp"))["tp"]
    holder = nn.Module()
    holder.experts = _block(inner)
    plan = {"experts": "ep_dispatch_experts"}
    plan |= {f"experts.{name}": "grouped_gemm" for name, _ in holder.experts.named_parameters()}
    ordered = dict(sorted(plan.items(), key=lambda item: item[1] != "grouped_gemm"))  # shards before hooks
    apply_expert_parallelism(holder, mesh, mesh if shared_batch else alone, ordered, ep_implementation="moe_engine")
    x, ids, weights = _batches(world)[0 if shared_batch else rank]
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = holder.experts(x, ids, weights)
    out.square().sum().backward()
    local = {name: parameter.grad.to_local() for name, parameter in holder.experts.named_parameters()}
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad} | local


@pytest.mark.parametrize(("shared_batch", "inner"), [(False, "moe_engine"), (False, "eager"), (True, "moe_engine")])
def test_expert_parallel_equals_one_process(shared_batch: bool, inner: str) -> None:
    world = 2
    ranks = run_ranks(world, _expert_parallel, world, shared_batch, inner)
    alone = _block("eager")
    grads: dict[str, list[Tensor]] = {}
    for x, ids, weights in _batches(world)[: 1 if shared_batch else world]:
        x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = alone(x, ids, weights) if len(x) else x * 0  # without a token, eager's output has no gradient
        out.square().sum().backward()
        for what, value in (("out", out), ("x", x.grad), ("weights", weights.grad)):
            value = torch.zeros_like(weights) if value is None else value.detach()
            grads.setdefault(what, []).append(value)
    for rank, found in enumerate(ranks):
        for what, expected in grads.items():
            torch.testing.assert_close(found[what], expected[0 if shared_batch else rank], rtol=1e-10, atol=1e-12)
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad.chunk(world)[rank], rtol=1e-10, atol=1e-12)
