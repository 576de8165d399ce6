"""The oracle of the MoE tests: a layer as a plain loop over tokens and experts, under torch's own autograd.

Slow and obvious on purpose; it shares no code with the engine. Parameters come by global name, one tensor per
expert, so that it compares with any number of ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.config.schema import MoEConfig
from moe_engine.moe.layer import MoELayer


def make_config(**changes: object) -> MoEConfig:
    """A small layer with everything on: groups, shared expert, scaling."""
    values: dict[str, object] = {
        "dim": 24,
        "expert_hidden": 10,
        "num_experts": 8,
        "top_k": 3,
        "num_shared_experts": 1,
        "num_groups": 4,
        "top_groups": 2,
        "route_scale": 2.5,
        "aux_loss_weight": 0.01,
        "init_std": 0.3,
    }
    return MoEConfig(**(values | changes))  # type: ignore[arg-type]


def global_tensors(layer: MoELayer, gradients: bool = False) -> dict[str, Tensor]:
    """This rank's parameters (or their gradients) by global name below the layer, experts one by one."""
    found = {}
    for name, parameter in layer.named_parameters():
        value = parameter.grad if gradients else parameter.detach()
        assert value is not None, f"{name} has no gradient"
        if name.startswith("experts."):
            for global_name, piece in zip(layer.experts.expert_names("experts", name[8:]), value, strict=True):
                found[global_name] = piece.clone()
        else:
            found[name] = value.clone()
    return found


def leaf_parameters(layer: MoELayer) -> dict[str, Tensor]:
    """fp64 copies of a single rank's parameters that require gradients."""
    return {name: value.double().requires_grad_() for name, value in global_tensors(layer).items()}


def choose_experts(scores: list[float], bias: list[float], config: MoEConfig) -> list[int]:
    """One token's experts, ascending; ties go to the lower index."""
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = config.num_experts // config.num_groups
    groups = [sorted(biased[g * size : (g + 1) * size], reverse=True) for g in range(config.num_groups)]
    values = [sum(group[:2]) if config.group_score == "sum_top2" else group[0] for group in groups]
    kept = sorted(range(config.num_groups), key=lambda g: -values[g])[: config.top_groups]
    allowed = [e for e in range(config.num_experts) if e // size in kept]
    return sorted(sorted(allowed, key=lambda e: -biased[e])[: config.top_k])


def dense_moe(
    x: Tensor, parameters: dict[str, Tensor], config: MoEConfig, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D] fp64 -> (output [T, D], router logits [T, E], tokens of each expert [E])."""
    bias = torch.zeros(config.num_experts) if bias is None else bias
    logits = x @ parameters["router.weight"].T
    if config.expert_biases:
        logits = logits + parameters["router.bias"]
    scores = logits.sigmoid() if config.score_function == "sigmoid" else logits.softmax(dim=1)
    counts = torch.zeros(config.num_experts, dtype=torch.int64)
    rows = []
    for t in range(x.shape[0]):
        chosen = choose_experts(scores[t].tolist(), bias.double().tolist(), config)
        counts[chosen] += 1
        weights = scores[t, chosen]
        if config.normalize_weights:
            weights = weights / weights.sum()
        row = torch.zeros_like(x[t])
        for weight, e in zip(weights * config.route_scale, chosen, strict=True):
            row = row + weight * mlp(x[t], expert(parameters, f"experts.{e}.{{}}", config), config)
        rows.append(row)
    out = torch.stack(rows) if rows else torch.zeros_like(x)
    if config.num_shared_experts:
        gate = (x @ parameters["shared_gate.weight"].T).sigmoid() if config.shared_gate else 1.0
        out = out + gate * mlp(x, expert(parameters, "shared.{}.weight", config), config)
    return out, logits, counts


def expert(parameters: dict[str, Tensor], name: str, config: MoEConfig) -> dict[str, Tensor | None]:
    """The tensors of one MLP: `name` has a place for which of them."""
    up = "gate_up" if config.gated else "up"
    found = {"up": up, "down": "down", "up_bias": f"{up}_bias", "down_bias": "down_bias"}
    return {key: parameters.get(name.format(which)) for key, which in found.items()}


def mlp(x: Tensor, weights: dict[str, Tensor | None], config: MoEConfig) -> Tensor:
    inner = F.linear(x, weights["up"], weights["up_bias"])
    functions = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "relu": F.relu,
        "relu_squared": lambda v: F.relu(v) ** 2,
    }
    act = functions[config.activation]
    if config.swiglu_limit:
        gate, up = inner.chunk(2, dim=-1)
        gate, up = gate.clamp(max=config.swiglu_limit), up.clamp(-config.swiglu_limit, config.swiglu_limit)
        inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    elif config.gated:
        gate, up = inner.chunk(2, dim=-1)
        inner = act(gate) * up
    else:
        inner = act(inner)
    return F.linear(inner, weights["down"], weights["down_bias"])


def dense_balance_loss(logits: Tensor, config: MoEConfig, sequences: list[list[int]]) -> Tensor:
    """Weighted balance loss summed over sequences, each the list of its valid tokens."""
    scores = logits.sigmoid() if config.score_function == "sigmoid" else logits.softmax(dim=1)
    shares = scores / scores.sum(dim=1, keepdim=True)
    total = logits.new_zeros(())
    for tokens in sequences:
        load = torch.zeros(config.num_experts, dtype=torch.float64)
        for t in tokens:
            values = scores[t].tolist()
            load[sorted(range(len(values)), key=lambda e: -values[e])[: config.top_k]] += 1
        if tokens:
            f = load * config.num_experts / (config.top_k * len(tokens))
            total = total + (f * shares[tokens].mean(dim=0)).sum()
    return config.aux_loss_weight * total
