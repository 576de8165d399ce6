"""MegaBlocks' router, experts and layers, computed by the engine's products and exchanges.

Modules and parameters have MegaBlocks' names and shapes: `router.layer.weight` [E, H], `experts.mlp.w1` (and for glu
`v1`) and `w2`, `experts.bias` [H], `shared_expert.up_proj` …. A dropless layer keeps the experts' rows below one
another, [experts * F, H]; the other one w1 [experts, H, F] and w2 [experts, F, H].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_engine.config.errors import ConfigError
from moe_engine.distributed.collectives import Communicator
from moe_engine.integrations.megablocks.arguments import Arguments, check
from moe_engine.integrations.megablocks.losses import save_load_balancing_loss, save_router_logits
from moe_engine.moe import dispatch as wire
from moe_engine.moe.experts import ExpertWeights, through_experts
from moe_engine.moe.placement import ExpertPlacement
from moe_engine.moe.router import check_tokens
from moe_engine.ops.attach import scale_gradient
from moe_engine.ops.autocast import cast_operands
from moe_engine.ops.expert_activation import Activation
from moe_engine.ops.linear import wide_linear

Output = Tensor | tuple[Tensor, Tensor]


def is_moe_param(tensor: Tensor) -> bool:
    """Whether a parameter is one of routed experts."""
    return hasattr(tensor, "expert_model_parallel")


def param_is_expert_model_parallel(param: Tensor) -> bool:
    """Whether a parameter is one of routed experts that lie over several ranks."""
    return bool(getattr(param, "expert_model_parallel", False))


def _ranks(args: Arguments) -> Communicator:
    if not args.moe_expert_model_parallelism:
        return Communicator.alone()
    group = args.expert_parallel_group
    return Communicator.of_world() if group is None else Communicator.of_group(group)


class LearnedRouter(nn.Module):
    """Softmax over experts, computed in fp32 whatever the parameters have; `layer.weight` [E, H]."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args = args
        size = args.hidden_size, args.moe_num_experts
        self.layer = nn.Linear(*size, bias=False, dtype=args.dtype, device=args.device)
        args.init_method(self.layer.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., H] -> scores [T, E], weights [T, K] of the best experts, their ids [T, K], best first."""
        check_tokens(x, None, self.args.hidden_size)
        args, x = self.args, x.reshape(-1, x.shape[-1])
        if self.training and args.moe_jitter_eps is not None:
            x = x * torch.empty_like(x).uniform_(1 - args.moe_jitter_eps, 1 + args.moe_jitter_eps)
        logits = wide_linear(x, self.layer.weight)
        if self.training and args.moe_zloss_weight:
            save_router_logits(logits)
        scores = logits.softmax(dim=-1)
        weights, ids = scores.topk(args.moe_top_k, dim=-1)
        if args.moe_normalize_expert_weights:
            weights = weights / weights.norm(p=args.moe_normalize_expert_weights, dim=-1, keepdim=True)
        if args.uniform_expert_assignment:
            ids = torch.arange(ids.numel(), device=ids.device).remainder(args.moe_num_experts).view_as(ids)
        return scores, weights, ids


def _expert_parameter(args: Arguments, ranks: Communicator, init: Callable[[Tensor], Any]) -> Tensor:
    """This rank's experts [e, F, H] of one random tensor of all of them, the same numbers for any number of ranks."""
    whole = torch.empty(
        args.moe_num_experts, args.ffn_hidden_size, args.hidden_size, dtype=args.dtype, device=args.device
    )
    init(whole)
    local = ExpertPlacement(args.moe_num_experts, ranks.size).num_local
    return whole[ranks.rank * local : (ranks.rank + 1) * local].clone()


class _ExpertMLP(nn.Module):
    """What both kinds of experts have in common: `weights()` and the activation between them."""

    gated = False

    def __init__(self, args: Arguments, ranks: Communicator) -> None:
        super().__init__()
        self.args = args
        self.gradient_scale = 1 / ranks.size
        with torch.no_grad():
            self._fill(ranks)
        for parameter in self.parameters():
            cast(Any, parameter).expert_model_parallel = args.moe_expert_model_parallelism

    def _fill(self, ranks: Communicator) -> None:
        raise NotImplementedError

    def _scaled(self, weight: Tensor) -> Tensor:
        return weight if self.gradient_scale == 1 else scale_gradient(weight, self.gradient_scale)

    def weights(self) -> ExpertWeights:
        """The projections in the engine's layout: up [e, F or 2F, H], down [e, H, F]."""
        raise NotImplementedError

    def activation(self) -> Activation:
        """The engine's own where it has the function, else the function."""
        function = self.args.activation_fn
        name = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu"}.get(cast(Any, function))
        if isinstance(function, functools.partial) and function.func is F.gelu and not function.args:
            name = {"tanh": "gelu_tanh", "none": "gelu"}.get(function.keywords.get("approximate", "none"))
        if name is not None:
            return Activation(name, self.gated)
        return Activation(gated=self.gated, function=self._glu if self.gated else function)

    def _glu(self, up: Tensor) -> Tensor:
        gate, linear = up.chunk(2, dim=-1)
        return self.args.activation_fn(gate) * linear


class MLP(_ExpertMLP):
    """Experts of a layer with capacity: w1 [e, H, F], w2 [e, F, H]."""

    def _fill(self, ranks: Communicator) -> None:
        self.w1 = nn.Parameter(_expert_parameter(self.args, ranks, self.args.init_method).transpose(1, 2).contiguous())
        self.w2 = nn.Parameter(_expert_parameter(self.args, ranks, self.args.output_layer_init_method))

    def weights(self) -> ExpertWeights:
        w1, w2 = self._scaled(self.w1), self._scaled(self.w2)
        return ExpertWeights(w1.transpose(1, 2), w2.transpose(1, 2))


class DroplessMLP(_ExpertMLP):
    """Experts of a dropless layer: w1, w2 [e * F, H]."""

    def _fill(self, ranks: Communicator) -> None:
        self.w1 = nn.Parameter(_expert_parameter(self.args, ranks, self.args.init_method).flatten(0, 1))
        self.w2 = nn.Parameter(_expert_parameter(self.args, ranks, self.args.output_layer_init_method).flatten(0, 1))

    def _by_expert(self, weight: Tensor) -> Tensor:
        return self._scaled(weight).view(-1, self.args.ffn_hidden_size, self.args.hidden_size)

    def weights(self) -> ExpertWeights:
        return ExpertWeights(self._by_expert(self.w1), self._by_expert(self.w2).transpose(1, 2))


class DroplessGLU(DroplessMLP):
    """Gated ones: act(x w1^T) * (x v1^T), times w2."""

    gated = True

    def _fill(self, ranks: Communicator) -> None:
        super()._fill(ranks)
        self.v1 = nn.Parameter(_expert_parameter(self.args, ranks, self.args.init_method).flatten(0, 1))

    def weights(self) -> ExpertWeights:
        gate_up = torch.cat((self._by_expert(self.w1), self._by_expert(self.v1)), dim=1)  # [e, 2F, H]
        return ExpertWeights(gate_up, self._by_expert(self.w2).transpose(1, 2))


class ParallelMLP(nn.Module):
    """Routed experts, with their exchange among ranks; an expert takes `moe_capacity_factor` times its even share.

    What FSDP wraps, so that weights are gathered before tokens travel. `bias` [H] is added once to every output,
    by the caller where `return_bias`.
    """

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args, self.ranks = args, _ranks(args)
        self.links = wire.Links(self.ranks, self.ranks)
        self.placement = ExpertPlacement(args.moe_num_experts, self.ranks.size)
        self.mlp = self._make_mlp()
        self.bias: nn.Parameter | None = None
        if args.bias:
            self.bias = nn.Parameter(torch.zeros(args.hidden_size, dtype=args.dtype, device=args.device))

    def _make_mlp(self) -> _ExpertMLP:
        if self.args.mlp_type != "mlp":
            raise ConfigError(f"mlp_type={self.args.mlp_type}: MoE has plain experts alone; use mlp_type=mlp, or dMoE")
        return MLP(self.args, self.ranks)

    def forward(self, x: Tensor, scores: Tensor, expert_weights: Tensor, top_experts: Tensor) -> Output:
        """x [..., H], and what the router gives -> [..., H], or that and the bias."""
        args, flat = self.args, x.reshape(-1, x.shape[-1])
        counts = torch.bincount(top_experts.flatten(), minlength=args.moe_num_experts)
        ids, order = top_experts.sort(dim=1)
        weights, kept = expert_weights.gather(1, order), self._kept(ids, counts)
        out = self._through(flat, ids.masked_fill(~kept, -1), weights.masked_fill(~kept, 0)).view(x.shape)
        if self.training and args.moe_loss_weight > 0:
            save_load_balancing_loss((counts, scores))
        if self.bias is None:
            return out
        return (out, self.bias) if args.return_bias else out + self.bias

    def _through(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        handle = wire.plan(ids, self.placement, self.links)
        rows = wire.dispatch_wait(wire.dispatch_start(wire.pack_rows(x, ids, weights, self.placement, handle), handle))
        out = through_experts(rows, self.mlp.weights(), self.mlp.activation())
        return wire.combine_wait(wire.combine_start(out, handle))

    def _kept(self, ids: Tensor, counts: Tensor) -> Tensor:
        """[T, K] bool: the choices within their experts' capacity, first ranks and first tokens first."""
        args, (T, K) = self.args, ids.shape
        if not args.moe_capacity_factor:
            return torch.ones_like(ids, dtype=torch.bool)
        sizes = self.ranks.all_gather(torch.cat((counts, counts.new_tensor([T])))[None], "capacity")  # [ranks, E + 1]
        tokens = int(sizes[:, -1].sum())
        capacity = int(args.moe_capacity_factor * (K * tokens / args.moe_num_experts))
        if capacity == 0:
            return torch.ones_like(ids, dtype=torch.bool)
        order = ids.flatten().argsort(stable=True)
        first = counts.cumsum(0) - counts - sizes[: self.ranks.rank, :-1].sum(dim=0)
        place = torch.empty_like(order)
        place[order] = torch.arange(T * K, device=ids.device) - first[ids.flatten()[order]]
        return place.view(T, K) < capacity


class ParallelDroplessMLP(ParallelMLP):
    """Routed experts that take every token, plain or gated."""

    def _make_mlp(self) -> _ExpertMLP:
        return (DroplessGLU if self.args.mlp_type == "glu" else DroplessMLP)(self.args, self.ranks)

    def _kept(self, ids: Tensor, counts: Tensor) -> Tensor:
        return torch.ones_like(ids, dtype=torch.bool)


class SharedMLP(nn.Module):
    """The expert of all tokens, of layers of the class `fc_cls`."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args = args
        options = {"bias": args.bias, "device": args.device}
        if args.fc_cls is nn.Linear:
            options["dtype"] = args.dtype
        options |= args.fc_kwargs
        self.up_proj = args.fc_cls(args.hidden_size, args.shared_expert_hidden_size, **options)
        self.down_proj = args.fc_cls(args.shared_expert_hidden_size, args.hidden_size, **options)
        if args.mlp_type == "glu":
            self.gate_proj = args.fc_cls(args.hidden_size, args.shared_expert_hidden_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        act, up = self.args.activation_fn, self.up_proj(x)
        out: Tensor = self.down_proj(act(self.gate_proj(x)) * up if self.args.mlp_type == "glu" else act(up))
        return out

    def add_experts_sharedexpert(self, shared_expert_out: Tensor, expert_out: Tensor) -> Tensor:
        """Their sum, or with `shared_expert_weighted_sum` their mean, the routed one counting K times."""
        if not self.args.shared_expert_weighted_sum:
            return shared_expert_out + expert_out
        K = self.args.moe_top_k
        return (shared_expert_out + K * expert_out) / (K + 1)


class MoE(nn.Module):
    """The layer whose experts drop tokens beyond their capacity. [S, B, H] -> (the same, bias [H]), or the same alone
    without `bias` or `return_bias`.

    Raises ConfigError for arguments that fit no layer.
    """

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        check(args)
        self.router = LearnedRouter(args)
        self.experts = self._make_experts(args)
        self.shared_expert = SharedMLP(args) if args.shared_expert else None

    def _make_experts(self, args: Arguments) -> ParallelMLP:
        return ParallelMLP(args)

    def forward(self, x: Tensor) -> Output:
        """x [..., H], cast to autocast's dtype where it is on."""
        (x,) = cast_operands(x)
        out = self.experts(x, *self.router(x))
        if self.shared_expert is None:
            return cast(Output, out)
        shared = self.shared_expert(x)
        if isinstance(out, tuple):
            return self.shared_expert.add_experts_sharedexpert(shared, out[0]), out[1]
        return self.shared_expert.add_experts_sharedexpert(shared, out)


class dMoE(MoE):  # noqa: N801 - MegaBlocks' name
    """The layer that drops no token."""

    def _make_experts(self, args: Arguments) -> ParallelMLP:
        return ParallelDroplessMLP(args)
