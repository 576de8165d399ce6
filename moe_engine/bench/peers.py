"""The model in plain PyTorch, as one writes it without an engine: what a speed-up is measured against.

Ordinary modules and autograd: `nn.Linear`, a loop over the experts, `F.scaled_dot_product_attention`,
`torch.optim.AdamW` (fused), autocast for bf16, DistributedDataParallel over several ranks (experts replicated). No
part of the engine is used but its configuration. Causal attention, main loss and sequence-wise balance loss; no MTP,
no balancing bias, no document masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_engine.config.schema import Config, ModelConfig


class PlainNorm(nn.Module):
    """RMSNorm. Computed in the input's dtype promoted with the weight's, as `nn.RMSNorm` does."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class PlainMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class PlainAttention(nn.Module):
    """MLA, keys and values expanded, torch's attention; its fast CPU path needs keys and values of one width."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        heads, nope, rope, value = (
            model.num_heads, model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
        )  # fmt: skip
        self.q_proj = nn.Linear(model.dim, heads * (nope + rope), bias=False)
        self.kv_down = nn.Linear(model.dim, model.kv_lora_rank + rope, bias=False)
        self.kv_norm = PlainNorm(model.kv_lora_rank, model.norm_eps)
        self.kv_up = nn.Linear(model.kv_lora_rank, heads * (nope + value), bias=False)
        self.out = nn.Linear(heads * value, model.dim, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """x [B, S, D]; turns [S, rope/2], complex."""
        model, (B, S, _) = self.model, x.shape
        nope, rope, value, heads = (
            model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim, model.num_heads
        )  # fmt: skip
        q = self.q_proj(x).view(B, S, heads, nope + rope)
        q_nope, q_rope = q.split((nope, rope), dim=-1)
        latent, k_rope = self.kv_down(x).split((model.kv_lora_rank, rope), dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).view(B, S, heads, nope + value)
        k_nope, v = kv.split((nope, value), dim=-1)
        k_rope = _rotate(k_rope[:, :, None], turns).expand(-1, -1, heads, -1)
        q = torch.cat((q_nope, _rotate(q_rope, turns)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        width = max(nope + rope, value)
        q, k, v = (_padded(heads_, width).transpose(1, 2) for heads_ in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=(nope + rope) ** -0.5)[..., :value]
        out: Tensor = self.out(y.transpose(1, 2).reshape(B, S, heads * value))
        return out


class PlainMoE(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        self.router = nn.Linear(model.dim, model.num_experts, bias=False)
        self.experts = nn.ModuleList(PlainMLP(model.dim, model.expert_hidden) for _ in range(model.num_experts))
        self.shared = (
            PlainMLP(model.dim, model.num_shared_experts * model.expert_hidden) if model.num_shared_experts else None
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, D] -> ([B, S, D], balance loss summed over the B rows)."""
        model, flat = self.model, x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(flat.float(), self.router.weight.float())
            scores = logits.sigmoid() if model.score_function == "sigmoid" else logits.softmax(dim=-1)
            weights, ids = scores.topk(model.top_k, dim=-1)
            if model.normalize_weights:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            aux = self._balance_loss(scores, ids, x.shape[0])
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, slot = (ids == index).nonzero(as_tuple=True)
            weighted = expert(flat[token]) * (model.route_scale * weights[token, slot, None]).to(flat.dtype)
            out = out.index_add(0, token, weighted.to(out.dtype))
        if self.shared is not None:
            out = out + self.shared(flat)
        return out.view(x.shape), aux

    def _balance_loss(self, scores: Tensor, ids: Tensor, rows: int) -> Tensor:
        E, K = self.model.num_experts, self.model.top_k
        chosen = F.one_hot(ids, E).sum(dim=1).view(rows, -1, E).float()  # [B, S, E]
        shares = (scores / scores.sum(dim=-1, keepdim=True)).view(rows, -1, E)
        return (chosen.mean(dim=1) * (E / K) * shares.mean(dim=1)).sum()


class PlainBlock(nn.Module):
    def __init__(self, model: ModelConfig, dense: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = PlainNorm(model.dim, model.norm_eps), PlainNorm(model.dim, model.norm_eps)
        self.attention = PlainAttention(model)
        self.mlp = PlainMLP(model.dim, model.dense_hidden) if dense else None
        self.moe = None if dense else PlainMoE(model)

    def forward(self, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), turns)
        normed = self.mlp_norm(x)
        if self.mlp is not None:
            return x + self.mlp(normed), x.new_zeros((), dtype=torch.float32)
        assert self.moe is not None
        out, aux = self.moe(normed)
        return x + out, aux


class PlainModel(nn.Module):
    """Its parameters have the engine's global names, but for those of experts, which are modules here."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        self.embedding = nn.Embedding(model.vocab_size, model.dim)
        self.layers = nn.ModuleList(PlainBlock(model, model.is_dense(i)) for i in range(model.num_layers))
        self.norm = PlainNorm(model.dim, model.norm_eps)
        self.head = nn.Linear(model.dim, model.vocab_size, bias=False)
        if model.tied_head:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """tokens, labels [B, S] -> (mean loss in nats, balance loss summed over rows and layers)."""
        x = self.embedding(tokens)
        turns = _turns(self.model, tokens.shape[1], tokens.device)
        aux = torch.zeros((), device=tokens.device)
        for layer in self.layers:
            x, layer_aux = layer(x, turns)
            aux = aux + layer_aux
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), aux


def _turns(model: ModelConfig, length: int, device: torch.device) -> Tensor:
    half = model.qk_rope_head_dim // 2
    frequencies = model.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def _padded(x: Tensor, width: int) -> Tensor:
    """x [..., n] with zeros up to `width`."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    """x [B, S, heads, rope], pairs as complex numbers."""
    x_wide = x.float()
    if any(place % 2 for place in (x_wide.storage_offset(), *x_wide.stride()[:-1])):  # a part of odd heads
        x_wide = x_wide.clone(memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(x_wide.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2).to(x.dtype)


def lacks(config: Config) -> list[str]:
    """What a configuration asks for that the plain model does not have, a line each."""
    model = config.model
    wrong = {
        "model.mtp_depth": (model.mtp_depth, 0),
        "model.q_lora_rank": (model.q_lora_rank, 0),
        "model.top_groups": (model.top_groups, model.num_groups),
        "parallel.pp": (config.parallel.pp, 1),
    }
    return [
        f"{name}={value}: the plain model that is measured beside knows only {name}={known}; "
        "use that, or bench.peers=false"
        for name, (value, known) in wrong.items()
        if value != known
    ]


@dataclass(frozen=True)
class PlainStep:
    """What a step of the plain trainer did."""

    loss: float
    grad_norm: float


class PlainTrainer:
    """The plain model, its optimizer and a step. `parameters`: values by the engine's global names."""

    def __init__(self, config: Config, parameters: Mapping[str, Tensor], autocast: bool, device: torch.device) -> None:
        self.config, self.autocast, self.device = config, autocast, device
        self.model = PlainModel(config.model).to(device)
        self._copy(parameters)
        self.ranks = config.parallel.dp or 1
        self.module: Any = DistributedDataParallel(self.model) if self.ranks > 1 else self.model
        decay = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() <= 1]
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": optim.weight_decay}, {"params": rest, "weight_decay": 0.0}],
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=True,
        )

    @torch.no_grad()
    def _copy(self, parameters: Mapping[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            given = name.removesuffix(".weight") if ".experts." in name else name
            parameter.copy_(parameters[given].view(parameter.shape))

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> PlainStep:
        """One update from micro-batches (tokens, labels), each [B, S]; every label is a target."""
        config = self.config
        self.optimizer.zero_grad(set_to_none=True)
        total, weight = 0.0, config.moe.aux_loss_weight
        for tokens, labels in batches:
            context = torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()
            with context:
                loss, aux = self.module(tokens, labels)
            ((loss + weight * aux / tokens.shape[0]) / len(batches)).backward()
            total += float(loss.detach())
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), config.optim.clip or float("inf")))
        self.optimizer.step()
        return PlainStep(total / len(batches), norm)
