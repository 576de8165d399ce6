"""Which experts a token goes to, and with what weight.

DeepSeek-V3 (arXiv 2412.19437, section 2.1.2, eq. 12-16): affinity scores by sigmoid (or softmax) of fp32 logits;
the choice is by score + bias, limited to the best groups of experts; the weights are the unbiased scores. Ties go
to the lower index, so that a recomputed forward chooses the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import MoEConfig
from moe_engine.distributed.collectives import Communicator
from moe_engine.moe.balance import update_expert_bias
from moe_engine.ops.count import count_on_backward
from moe_engine.ops.linear import wide_linear
from moe_engine.ops.random import normal
from moe_engine.ops.route import route


@dataclass(frozen=True)
class Routing:
    """The choice for T tokens.

    expert_ids [T, K] int64, ascending in each row; expert_weights [T, K] and router_logits [T, E] fp32 (fp64 for
    fp64 tokens), with gradient; scores [T, E], the unbiased affinities, without.
    """

    expert_ids: Tensor
    expert_weights: Tensor
    router_logits: Tensor
    scores: Tensor


class Router(nn.Module):
    """Parameter `weight` [E, D], and `bias` [E] on the logits where `config.expert_biases`; tensors that keep their
    dtypes through any cast of the module:

    expert_bias [E] fp32, a buffer: added to the scores for the choice (loads near 7 with steps of 1e-3 need fp32);
    num_tokens_per_expert [E] int64: tokens sent to each expert since it was last cleared, without padding. A token
    counts when its weights' backward runs, once: evaluation has none, and a recomputed forward adds nothing. It is no
    buffer, since DDP overwrites the buffers of all ranks with those of the first before every forward.

    The weight starts as normal numbers of `config.init_std` that depend on `name` and `seed`; None: as it is.
    """

    expert_bias: Tensor

    def __init__(
        self,
        config: MoEConfig,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        name: str = "router",
        seed: int | None = 0,
    ) -> None:
        super().__init__()
        check_start(name, seed, dtype)
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim, dtype=dtype, device=device))
        self.bias: nn.Parameter | None = None
        if config.expert_biases:
            self.bias = nn.Parameter(torch.zeros(config.num_experts, dtype=dtype, device=device))
        bias = torch.zeros(config.num_experts, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", bias)
        self.num_tokens_per_expert = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
        if seed is not None:
            with torch.no_grad():
                weight = self.weight
                weight.copy_(normal(weight.shape, config.init_std, f"{name}.weight", seed, weight.dtype, weight.device))

    def forward(self, x: Tensor, token_mask: Tensor | None = None, expert_ids: Tensor | None = None) -> Routing:
        """x [..., D], token_mask [...] bool (False for padding, which is routed but not counted).

        expert_ids [..., K] int64, ascending: a choice made elsewhere, in place of the router's own; the weights are the
        router's all the same. Raises ValueError where x or token_mask are something else.
        """
        check_tokens(x, token_mask, self.config.dim)
        flat = x.reshape(-1, x.shape[-1])
        if expert_ids is not None:
            expert_ids = expert_ids.reshape(-1, self.config.top_k)
        routing = self._route(flat, None if token_mask is None else token_mask.reshape(-1), expert_ids)
        if x.dim() == 2:
            return routing
        shaped = {item.name: getattr(routing, item.name).view(*x.shape[:-1], -1) for item in fields(routing)}
        return Routing(**shaped)

    def _route(self, x: Tensor, token_mask: Tensor | None, expert_ids: Tensor | None) -> Routing:
        config = self.config
        logits = wide_linear(x, self.weight)
        if self.bias is not None:
            logits = logits + self.bias.to(logits.dtype)
        expert_ids, weights, scores, loads = route(logits, self.expert_bias, token_mask, config, expert_ids)
        if self.training:
            if self.num_tokens_per_expert.device != x.device:  # a wrapper moved parameters and buffers alone
                self._move_counts(x.device)
            weights = count_on_backward(weights, self.num_tokens_per_expert, expert_ids, token_mask, loads)
        return Routing(expert_ids, weights, logits, scores)

    def update_balance(self, group: Any = None) -> None:
        """Move the balancing bias by the loads since the last call and clear them. Once per optimizer step.

        group: the ranks that routed tokens since then, a torch process group or a one-dimensional DeviceMesh: their
        loads are summed, and all of them must call. None: this rank alone.
        """
        self.move_bias(Communicator.alone() if group is None else Communicator.of_group(group))

    def move_bias(self, ranks: Communicator) -> None:
        """`update_balance` over a communicator."""
        counts = ranks.all_reduce_sum(self.num_tokens_per_expert, "balance")
        update_expert_bias(self.expert_bias, counts, self.config.bias_step)
        self.num_tokens_per_expert.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        bias = self.expert_bias
        super()._apply(fn, recurse)
        # `fn` may have cast: take back the old values and keep only the device.
        if self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        self._move_counts(self.expert_bias.device)
        return self

    def _move_counts(self, device: torch.device) -> None:
        counts = self.num_tokens_per_expert
        self.num_tokens_per_expert = torch.zeros_like(counts, device=device) if counts.is_meta else counts.to(device)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.expert_bias = self.expert_bias.float()  # load_state_dict(assign=True) takes any dtype, and another device
        self._move_counts(self.expert_bias.device)


def check_start(name: str, seed: int | None, dtype: torch.dtype | None) -> None:
    """Raises ConfigError, a line for each, for what parameters cannot be named, drawn from or kept in."""
    problems = []
    if not isinstance(name, str):
        problems.append(f"name={name}: text is expected, for example name=moe")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        problems.append(f"seed={seed}: a whole number is expected, or None, for example seed=0")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        problems.append(f"dtype={dtype}: parameters are fp64, fp32, fp16 or bf16; use dtype=torch.bfloat16")
    if problems:
        raise ConfigError("\n".join(problems))


def check_tokens(x: Tensor, token_mask: Tensor | None, dim: int) -> None:
    """Raises ValueError unless x is [..., dim] numbers and token_mask, if there is one, [...] bool."""
    if x.dim() == 0 or x.shape[-1] != dim or not x.is_floating_point():
        raise ValueError(f"x={list(x.shape)} {x.dtype}: must be [..., {dim}], dim={dim}, of floating-point numbers")
    if token_mask is None:
        return
    if token_mask.shape != x.shape[:-1] or token_mask.dtype != torch.bool:
        found = f"token_mask={list(token_mask.shape)} {token_mask.dtype}"
        raise ValueError(f"{found}: must be bool, {list(x.shape[:-1])} for x {list(x.shape)}; use mask.bool()")
