"""A second DeepSeek-V3-style model, written from the paper alone: the truth that the engine is held against.

Slow and obvious on purpose, and it shares no code with the engine's model: rows one by one, padding tokens left
out, attention one document and one head at a time, every expert in a loop over all tokens, plain autograd. It takes
its parameters as a dict by global name, a tensor per expert. Sources: DeepSeek-V3 (arXiv 2412.19437): latent
attention eq. 1-11, experts eq. 12-16, balance loss eq. 17-20, multi-token prediction eq. 21-25; rotary embedding:
arXiv 2104.09864.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from plain_attention import attention, rms_norm
from torch import Tensor

from moe_engine.config.schema import ModelConfig

Parameters = Mapping[str, Tensor]
NO_TARGET = -100


@dataclass(frozen=True)
class PlainRows:
    """The input: tokens and labels [1+D, B, S], document_ids [B, S], keep [B, S] (False: padding, left out)."""

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor
    keep: Tensor


@dataclass
class PlainResult:
    """Losses of the whole batch. `main` and `mtp` are means over targets, `aux` and `z` over rows and tokens."""

    main: float
    mtp: list[float]
    aux: float
    z: float
    total: Tensor  # with its graph
    counts: dict[str, list[int]]  # by MoE layer: how many tokens chose each expert
    margin: float  # the smallest distance between a chosen and a refused score or group


@dataclass
class _Row:
    """One row on its way: which places of it are there, and where its documents lie in that order."""

    places: list[int]
    documents: list[list[int]]
    aux: Tensor
    z: Tensor
    counts: dict[str, list[int]] = field(default_factory=dict)
    margin: float = math.inf


class PlainV3:
    """The model over `parameters`. `biases`: the balancing bias [E] of each MoE layer, zero where absent."""

    def __init__(self, model: ModelConfig, parameters: Parameters, biases: Parameters | None = None) -> None:
        self.model, self.parameters, self.biases = model, parameters, biases or {}

    def loss(self, rows: PlainRows, aux_weight: float, mtp_weight: float, z_weight: float = 0.0) -> PlainResult:
        """The training loss: main + mtp_weight / D * sum of MTP losses + aux_weight * balance loss + z_weight * z."""
        depths = rows.tokens.shape[0]
        sums = [torch.zeros((), dtype=torch.float64) for _ in range(depths)]
        aux = z = torch.zeros((), dtype=torch.float64)
        counts: dict[str, list[int]] = {}
        margin, used_rows, tokens = math.inf, 0, 0
        for b in range(rows.tokens.shape[1]):
            row = _make_row(rows.keep[b].tolist(), rows.document_ids[b].tolist())
            if not row.places:
                continue
            used_rows, tokens = used_rows + 1, tokens + len(row.places)
            for k, value in enumerate(self._row_losses(row, rows.tokens[:, b], rows.labels[:, b])):
                sums[k] = sums[k] + value
            aux, z, margin = aux + row.aux, z + row.z, min(margin, row.margin)
            for name, chosen in row.counts.items():
                before = counts.get(name, [0] * len(chosen))
                counts[name] = [x + y for x, y in zip(before, chosen, strict=True)]
        targets = [int((labels != NO_TARGET).sum()) for labels in rows.labels]
        main, *mtp = [total / max(n, 1) for total, n in zip(sums, targets, strict=True)]
        aux, z = aux_weight * aux / max(used_rows, 1), z_weight * z / max(tokens, 1)
        total = main + aux + z
        for value in mtp:
            total = total + mtp_weight / len(mtp) * value
        return PlainResult(main.item(), [value.item() for value in mtp], aux.item(), z.item(), total, counts, margin)

    def token_losses(self, tokens: list[int], labels: list[int]) -> list[float]:
        """The main loss of each token of one document by itself; 0 where there is no target."""
        row = _make_row([True] * len(tokens), [0] * len(tokens))
        hidden = self._trunk(row, torch.tensor(tokens))
        return [float(value) for value in self._losses_of(hidden, "norm.weight", torch.tensor(labels))]

    def next_token_logits(self, tokens: list[int]) -> Tensor:
        """Logits [V] of what follows the tokens of one document."""
        row = _make_row([True] * len(tokens), [0] * len(tokens))
        hidden = self._trunk(row, torch.tensor(tokens))[-1]
        return self._head() @ self._norm(hidden, "norm.weight")

    def _row_losses(self, row: _Row, tokens: Tensor, labels: Tensor) -> list[Tensor]:
        hidden = self._trunk(row, tokens[0, row.places])
        losses = [self._losses_of(hidden, "norm.weight", labels[0, row.places]).sum()]
        for k in range(tokens.shape[0] - 1):
            name = f"mtp.{k}"
            embedded = self.parameters["embedding.weight"][tokens[k + 1, row.places]]
            both = torch.cat(
                (
                    self._norm(hidden, f"{name}.hidden_norm.weight"),
                    self._norm(embedded, f"{name}.embedding_norm.weight"),
                ),
                dim=-1,
            )
            hidden = self._layer(both @ self.parameters[f"{name}.proj.weight"].T, f"{name}.block", row)
            losses.append(self._losses_of(hidden, f"{name}.norm.weight", labels[k + 1, row.places]).sum())
        return losses

    def _trunk(self, row: _Row, tokens: Tensor) -> Tensor:
        x = self.parameters["embedding.weight"][tokens]
        for i in range(self.model.num_layers):
            x = self._layer(x, f"layers.{i}", row)
        return x

    def _head(self) -> Tensor:
        return self.parameters["embedding.weight" if self.model.tied_head else "head.weight"]

    def _losses_of(self, hidden: Tensor, norm: str, labels: Tensor) -> Tensor:
        log_probabilities = (self._norm(hidden, norm) @ self._head().T).log_softmax(dim=-1)
        losses = [
            -log_probabilities[t, label] if label != NO_TARGET else log_probabilities.new_zeros(())
            for t, label in enumerate(labels.tolist())
        ]
        return torch.stack(losses)

    def _layer(self, x: Tensor, name: str, row: _Row) -> Tensor:
        normed = self._norm(x, f"{name}.attention_norm.weight")
        model, layer = self.model, name.removeprefix("layers.")
        windowed = bool(model.sliding_window) and layer.isdigit() and int(layer) % model.sliding_window_every == 0
        x = x + attention(model, self.parameters, f"{name}.attention", normed, row.documents, windowed)
        normed = self._norm(x, f"{name}.mlp_norm.weight")
        if f"{name}.mlp.down.weight" in self.parameters:
            return x + _swiglu_mlp(
                normed, self.parameters[f"{name}.mlp.gate_up.weight"], self.parameters[f"{name}.mlp.down.weight"]
            )
        return x + self._experts(normed, f"{name}.moe", row)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.parameters[name], self.model.norm_eps)

    def _experts(self, x: Tensor, name: str, row: _Row) -> Tensor:
        model = self.model
        logits = x @ self.parameters[f"{name}.router.weight"].T
        if model.expert_biases:
            logits = logits + self.parameters[f"{name}.router.bias"]
        scores = logits.sigmoid() if model.score_function == "sigmoid" else logits.softmax(dim=-1)
        bias = self.biases.get(f"{name}.router.expert_bias", torch.zeros(model.num_experts)).tolist()
        used = torch.zeros_like(scores)
        for t, values in enumerate(scores.tolist()):
            chosen, margin = _choose([s + b for s, b in zip(values, bias, strict=True)], model)
            used[t, chosen] = 1.0
            row.margin = min(row.margin, margin)
        weights = scores * used
        if model.normalize_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        row.counts[name] = [int(n) for n in used.sum(dim=0)]
        row.aux = row.aux + _balance_loss(scores, model)
        row.z = row.z + sum(logits[t].exp().sum().log() ** 2 for t in range(len(logits)))
        out = torch.zeros_like(x)
        for e in range(model.num_experts):
            prefix = f"{name}.experts.{e}"
            expert = self._expert(x, prefix)
            out = out + model.route_scale * weights[:, e : e + 1] * expert
        if model.num_shared_experts:
            shared = (self.parameters[f"{name}.shared.{key}.weight"] for key in ("gate_up", "down"))
            gate = 1.0
            if model.shared_gate:
                gate = (x @ self.parameters[f"{name}.shared_gate.weight"].T).sigmoid()
            out = out + gate * _swiglu_mlp(x, *shared)
        return out

    def _expert(self, x: Tensor, name: str) -> Tensor:
        gate_up, down, limit = (
            *(self.parameters[f"{name}.{key}"] for key in ("gate_up", "down")),
            self.model.swiglu_limit,
        )
        up_bias, down_bias = (self.parameters.get(f"{name}.{key}", 0.0) for key in ("gate_up_bias", "down_bias"))
        gate, up = (x @ gate_up.T + up_bias).chunk(2, dim=1)
        if not limit:
            return (gate * gate.sigmoid() * up) @ down.T + down_bias
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * (1.702 * gate).sigmoid() * (up + 1)) @ down.T + down_bias


def _make_row(keep: list[bool], document_ids: list[int]) -> _Row:
    places = [t for t, kept in enumerate(keep) if kept]
    documents: list[list[int]] = []
    for i, t in enumerate(places):
        if i == 0 or document_ids[t] != document_ids[places[i - 1]]:
            documents.append([])
        documents[-1].append(i)
    return _Row(places, documents, *torch.zeros(2, dtype=torch.float64))


def _swiglu_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    hidden = gate_up.shape[0] // 2
    gate, up = x @ gate_up[:hidden].T, x @ gate_up[hidden:].T
    return (gate * gate.sigmoid() * up) @ down.T


def _choose(biased: list[float], model: ModelConfig) -> tuple[list[int], float]:
    """The experts of one token, ties to the lower index, and how clear the choice was."""
    size = model.num_experts // model.num_groups
    groups = [sorted(biased[g * size : (g + 1) * size], reverse=True) for g in range(model.num_groups)]
    group_scores = [sum(group[:2]) if model.group_score == "sum_top2" else group[0] for group in groups]
    kept, margin = _best(group_scores, range(model.num_groups), model.top_groups)
    allowed = [e for e in range(model.num_experts) if e // size in kept]
    chosen, expert_margin = _best(biased, allowed, model.top_k)
    return chosen, min(margin, expert_margin)


def _best(values: list[float], among: range | list[int], k: int) -> tuple[list[int], float]:
    order = sorted(among, key=lambda i: (-values[i], i))
    return order[:k], values[order[k - 1]] - values[order[k]] if k < len(order) else math.inf


def _balance_loss(scores: Tensor, model: ModelConfig) -> Tensor:
    """sum_i f_i P_i of one sequence, scores [n, E]."""
    n, K = scores.shape[0], model.top_k
    load = [0.0] * model.num_experts
    for values in scores.tolist():
        for e in _best(values, range(model.num_experts), K)[0]:
            load[e] += model.num_experts / (K * n)
    shares = scores / scores.sum(dim=-1, keepdim=True)
    return (torch.tensor(load, dtype=torch.float64) * shares.mean(dim=0)).sum()
