"""Hugging Face transformers: our experts in its models, over one rank or many, and the bias that it never moves.

    from moe_engine.integrations import transformers as integration

    integration.register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe_engine")

Models whose experts go through transformers' registry (DeepSeek, Mixtral, Qwen, OLMoE, GLM, gpt-oss, …) then train and
generate as with its own implementations. `DistributedConfig(ep_implementation="moe_engine")` sends a token once to each
rank, in place of once to each expert. `BalanceCallback` moves DeepSeek's balancing bias during training.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.activations import SiLUActivation
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from moe_engine.config.errors import ConfigError
from moe_engine.distributed.collectives import Communicator
from moe_engine.distributed.sharded import join_rows, split_rows
from moe_engine.moe import dispatch as wire
from moe_engine.moe.balance import update_expert_bias
from moe_engine.moe.experts import ExpertWeights, rows_of_choices, through_experts
from moe_engine.moe.placement import ExpertPlacement
from moe_engine.ops.count import count_on_backward
from moe_engine.ops.expert_activation import Activation

NAME = "moe_engine"

__all__ = ["NAME", "BalanceCallback", "experts", "register"]


def register() -> None:
    """Make `experts_implementation="moe_engine"` and `ep_implementation="moe_engine"` known to transformers."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
    EPImplementationInterface.register(NAME, DedupExpertParallel)


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of transformers' experts modules: [T, D], [T, K], [T, K] -> [T, D].

    Ids outside the module's experts (those of other ranks) are skipped. Raises ValueError for experts with a norm
    behind them.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"experts_implementation={NAME}: {type(module).__name__} has a norm behind its experts")
    weights = _weights(module)
    rows = rows_of_choices(hidden_states, top_k_index, top_k_weights, weights.down.shape[0])
    return through_experts(rows, weights, _activation(module)).to(hidden_states.dtype)


def _weights(module: Any) -> ExpertWeights:
    """Theirs in our layout, as views: [e, out, in]."""
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = getattr(module, up_name), module.down_proj
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if not module.has_bias:
        return ExpertWeights(up, down)
    return ExpertWeights(up, down, getattr(module, f"{up_name}_bias"), module.down_proj_bias)


def _activation(module: Any) -> Activation:
    """SwiGLU by our kernel; whatever else stands between the projections by the module's own function."""
    if not module.has_gate:
        return Activation(gated=False, function=module.act_fn)
    if type(module)._apply_gate is _default_apply_gate and isinstance(module.act_fn, (nn.SiLU, SiLUActivation)):
        return Activation()
    return Activation(function=module._apply_gate)


class DedupExpertParallel(EPImplementation):
    """Each token travels once to every rank that has some of its experts, and one sum comes back."""

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        ep = Communicator.of_group(ep_mesh)
        self.links = wire.Links(ep, ep)
        self.num_local: int = experts.num_experts
        self.placement = ExpertPlacement(self.num_local * ep.size, ep.size)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        number = hidden_states.shape[0]
        x, ids, weights = split_rows(self.tp_mesh, hidden_states, top_k_index, top_k_weights)
        ids, order = ids.sort(dim=1)
        weights = weights.to(torch.promote_types(x.dtype, torch.float32)).gather(1, order)
        handle = wire.plan(ids, self.placement, self.links)
        packed = wire.pack_rows(x, ids, weights, self.placement, handle)
        rows = wire.dispatch_wait(wire.dispatch_start(packed, handle))
        out = self._run(rows)
        return join_rows(self.tp_mesh, wire.combine_wait(wire.combine_start(out, handle)), number)

    def _run(self, rows: wire.Rows) -> Tensor:
        ids = rows.local_ids.long().masked_fill(rows.local_ids < 0, self.num_local)
        if rows.x.shape[0]:
            out: Tensor = self.experts_forward(rows.x, ids, rows.weights)
            return out
        # Implementations of transformers need a row. This one is nobody's, and joins the backward.
        x, weights = rows.x.sum(dim=0, keepdim=True), rows.weights.sum(dim=0, keepdim=True)
        nobody: Tensor = self.experts_forward(x, ids.new_zeros(1, ids.shape[1]), weights)
        return nobody[:0]


class BalanceCallback(TrainerCallback):
    """Moves `e_score_correction_bias` of DeepSeek-V3-like routers against the load after every optimizer step.

    step: how far, as `MoEConfig.bias_step`. transformers loads this bias and leaves it as it is. Loads are those of
    tokens that a backward ran for, without padding as the model's `attention_mask` tells it, summed over all processes.
    Training begins with a cast of the bias to fp32: in bf16 a step of 1e-3 is lost beside a bias of 1. Raises
    ConfigError for a step that is none, and for a model without such routers.
    """

    def __init__(self, step: float = 1e-3) -> None:
        if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 <= step < math.inf:
            raise ConfigError(f"step={step}: a finite number, 0 or more, is expected, for example step=0.001")
        self.step = step
        self.counts: dict[str, Tensor] = {}
        self._token_mask: Tensor | None = None
        self._hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        routers = _routers(model)
        if not routers:
            raise ConfigError(
                f"BalanceCallback: {type(model).__name__} has no e_score_correction_bias to move; leave the callback "
                "out, or balance by the model's own auxiliary loss"
            )
        self._remove_hooks()  # those of a training that broke off
        self._hooks.append(model.register_forward_pre_hook(self._see_mask, with_kwargs=True))
        for name, router in routers.items():
            bias = router.e_score_correction_bias
            bias.data = bias.data.float()
            self.counts[name] = torch.zeros(bias.shape, dtype=torch.int64, device=bias.device)
            self._hooks.append(router.register_forward_hook(self._counter(name)))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        ranks = Communicator.of_world()
        for name, router in _routers(model).items():
            counts = ranks.all_reduce_sum(self.counts[name], "balance")
            update_expert_bias(router.e_score_correction_bias, counts, self.step)
            self.counts[name].zero_()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _see_mask(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._token_mask = kwargs.get("attention_mask")

    def _counter(self, name: str) -> Any:
        def count(router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            logits, weights, ids = output
            if not router.training:
                return output
            mask = self._token_mask
            fits = mask is not None and mask.dim() == 2 and mask.numel() == ids.shape[0]
            token_mask = mask.reshape(-1).bool() if mask is not None and fits else None
            return logits, count_on_backward(weights, self.counts[name], ids, token_mask), ids

        return count


def _routers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "e_score_correction_bias")}
