"""Single modules against those of transformers: rotary speeds of published models, routers, attention, sizes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from moe_engine.config.huggingface import huggingface_config, model_config  # noqa: E402
from moe_engine.config.load import choices, load  # noqa: E402
from moe_engine.config.schema import ModelConfig, MoESection, moe_layer_config  # noqa: E402
from moe_engine.model.attention import GroupedAttention, LatentAttention, sequence_context  # noqa: E402
from moe_engine.model.batch import Batch  # noqa: E402
from moe_engine.model.rope import angles, frequencies, score_growth  # noqa: E402
from moe_engine.moe.router import Router  # noqa: E402
from moe_engine.planner.flops import parameter_count  # noqa: E402

PUBLISHED = Path(__file__).resolve().parents[1] / "facts" / "huggingface"
BOUND = 1e-5  # of the relative error, fp32
B, S, D = 2, 24, 32

SMALL = {"vocab_size": 64, "hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": 4, "rms_norm_eps": 1e-5}
LATENT = SMALL | {
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "intermediate_size": 48,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 0, "routed_scaling_factor": 1.0,
}  # fmt: skip
V3 = LATENT | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
}
V2 = LATENT | {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy"}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "num_experts_per_tok": 4}
MIXTRAL = GROUPED | {"model_type": "mixtral", "num_local_experts": 16}
QWEN3 = GROUPED | {"model_type": "qwen3_moe", "num_experts": 16, "moe_intermediate_size": 24, "norm_topk_prob": True}
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
BOTH = YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}


def theirs(hf: dict[str, Any]) -> Any:
    """transformers' configuration object; eager attention."""
    known = hf | {"model_type": hf["model_type"].replace("kimi_k2", "deepseek_v3"), "attn_implementation": "eager"}
    return transformers.AutoConfig.for_model(**known)


def module(config: Any, kind: str) -> Any:
    """A class of the family's modelling file, by the end of its name."""
    family = config.model_type
    code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    (found,) = [name for name in dir(code) if name.endswith(kind) and name.lower().startswith(family.replace("_", ""))]
    return getattr(code, found)


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def fill(net: nn.Module) -> None:
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=chance) * 0.3 + (parameter.dim() == 1))


@pytest.mark.parametrize("name", sorted(path.stem for path in PUBLISHED.glob("*.json")))
def test_rotary_speeds_and_growth_of_published_models(name: str) -> None:
    hf = json.loads((PUBLISHED / f"{name}.json").read_text())
    model, config = model_config(hf), theirs(hf)
    rotary = module(config, "RotaryEmbedding")(config)
    assert relative(frequencies(model), rotary.inv_freq) < 1e-6
    positions = torch.arange(60)[None]
    cos, sin = angles(positions, model, torch.float32)  # [1, 60, 1, pairs]
    found = rotary(torch.zeros(1), positions)
    if not isinstance(found, tuple):  # DeepSeek-V2's is complex
        found = (found.real, found.imag)
    pairs = cos.shape[-1]
    assert relative(cos[:, :, 0], found[0][..., :pairs]) < BOUND
    assert relative(sin[:, :, 0], found[1][..., :pairs]) < BOUND
    if model.attention == "mla":
        with torch.device("meta"):
            attention = module(config, "Attention")(config, 0)
        ours = (model.qk_nope_head_dim + model.qk_rope_head_dim) ** -0.5 * score_growth(model)
        assert ours == pytest.approx(attention.scaling, rel=1e-12)


ROUTERS = {
    "v3": V3,
    "v3, one expert a group": V3 | {"num_experts_per_tok": 2},
    "v3, not normalised": V3 | {"norm_topk_prob": False, "routed_scaling_factor": 1.7},
    "v2": V2 | {"routed_scaling_factor": 16.0},
    "v2, groups": V2 | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
    "mixtral": MIXTRAL,
    "qwen3": QWEN3,
    "qwen3, not normalised": QWEN3 | {"norm_topk_prob": False},
}


@pytest.mark.parametrize("hf", ROUTERS.values(), ids=ROUTERS)
def test_routers_choose_and_weigh_alike(hf: dict[str, Any]) -> None:
    config, model = theirs(hf), model_config(hf)
    kind = "TopKRouter" if model.attention == "gqa" else "TopkRouter"
    right = module(config, kind)(config)
    fill(right)
    ours = Router(moe_layer_config(model, MoESection()))
    ours.weight.data.copy_(right.weight.data)
    if model.score_function == "sigmoid":
        bias = torch.randn(model.num_experts, generator=torch.Generator().manual_seed(6)) * 0.2
        right.e_score_correction_bias.copy_(bias)
        ours.expert_bias.copy_(bias)
    x = torch.randn(200, D, generator=torch.Generator().manual_seed(7))
    weights = torch.randn(200, model.num_experts, generator=torch.Generator().manual_seed(8))
    results = []
    for router, order in ((ours, ("expert_weights", "expert_ids")), (right, (1, 2))):
        tokens = x.clone().requires_grad_()
        out = router(tokens)
        values, ids = (getattr(out, at) if isinstance(at, str) else out[at] for at in order)
        spread = torch.zeros(200, model.num_experts).scatter(1, ids, values)
        (spread * weights).sum().backward()
        results.append((spread, tokens.grad))
    (found, gradient), (expected, expected_gradient) = results
    assert torch.equal(found > 0, expected > 0)
    assert relative(found, expected) < BOUND and relative(gradient, expected_gradient) < BOUND


ATTENTIONS = {
    "v3": V3,
    "v3, no q_lora": V3 | {"q_lora_rank": None},
    "v3, yarn": V3 | {"rope_scaling": BOTH},
    "v2": V2 | {"q_lora_rank": 24},
    "v2, yarn": V2 | {"rope_scaling": BOTH},
    "mixtral": MIXTRAL,
    "mixtral, one head of keys": MIXTRAL | {"num_key_value_heads": 1},
    "qwen3": QWEN3,
    "qwen3, yarn": QWEN3 | {"rope_scaling": YARN},
}
NAMES = {
    "q_a_proj": "q_down", "q_a_layernorm": "q_norm", "q_b_proj": "q_up", "kv_a_proj_with_mqa": "kv_down",
    "kv_a_layernorm": "kv_norm", "kv_b_proj": "kv_up", "o_proj": "out",
}  # fmt: skip


@pytest.mark.parametrize("hf", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_gives_the_same_output_and_gradients(hf: dict[str, Any]) -> None:
    config, model = theirs(hf), model_config(hf)
    right, rotary = module(config, "Attention")(config, 0), module(config, "RotaryEmbedding")(config)
    fill(right)
    ours = (GroupedAttention if model.attention == "gqa" else LatentAttention)(model, torch.float32, None)
    state = {
        f"{NAMES.get(key.split('.')[0], key.split('.')[0])}.weight": value for key, value in right.state_dict().items()
    }
    ours.load_state_dict(state)

    positions = torch.arange(S)[None].expand(B, S)
    empty = torch.zeros(1, B, S, dtype=torch.int64)
    context = sequence_context(
        Batch(empty, empty, positions, torch.zeros(B, S, dtype=torch.int32)), model, torch.float32
    )
    x, d_out = (torch.randn(B, S, D, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    x_ours, x_right = x.clone().requires_grad_(), x.clone().requires_grad_()
    found = ours(x_ours.view(-1, D), context).view(B, S, D)
    future = torch.full((S, S), float("-inf")).triu(1)[None, None]
    expected, _ = right(hidden_states=x_right, position_embeddings=rotary(x, positions), attention_mask=future)
    found.backward(d_out)
    expected.backward(d_out)
    assert relative(found, expected) < BOUND and relative(x_ours.grad, x_right.grad) < BOUND
    for name, parameter in right.named_parameters():
        part = name.split(".")[0]
        own = getattr(ours, NAMES.get(part, part)).weight
        assert relative(own.grad, parameter.grad) < BOUND, name


@pytest.mark.parametrize("name", choices("model", "train"))
def test_presets_have_as_many_parameters_as_the_models_of_transformers(name: str) -> None:
    """Its DeepSeek-V3 has no MTP module."""
    model: ModelConfig = load("train", [f"model={name}", "model.mtp_depth=0"]).model
    dense = model.num_dense_layers == model.num_layers
    with torch.device("meta"):
        net = transformers.AutoModelForCausalLM.from_config(
            llama(model) if dense else theirs(huggingface_config(model))
        )
    assert parameter_count(model).total == sum(parameter.numel() for parameter in net.parameters())


def llama(model: ModelConfig) -> transformers.LlamaConfig:
    """A dense preset as transformers has it; for planning, so no reader of its config.json is needed."""
    return transformers.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        num_hidden_layers=model.num_layers,
        intermediate_size=model.dense_hidden,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        tie_word_embeddings=model.tied_head,
    )
