"""The arguments of MegaBlocks' layers: its names and defaults, checked when a layer is made from them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_engine.config.errors import ConfigError

MLP_TYPES = ("mlp", "glu")
MLP_IMPLEMENTATIONS = ("sparse", "grouped")


def _here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _tanh_gelu() -> Callable[[Tensor], Tensor]:
    return functools.partial(F.gelu, approximate="tanh")


def _normal() -> Callable[[Tensor], Any]:
    return functools.partial(nn.init.normal_, mean=0.0, std=0.02)


@dataclass
class Arguments:
    """What a layer is made from. Sizes are numbers of features; weights of losses are factors.

    mlp_impl, memory_optimized_mlp and remat_act_fn choose among MegaBlocks' kernels for the same mathematics; here one
    way serves all, which keeps the first projection's output alone. moe_lbl_in_fp32 and moe_zloss_in_fp32 hold always.
    device: without one the current CUDA device, or the CPU where there is none.
    """

    hidden_size: int = 1024
    ffn_hidden_size: int = 4096
    num_layers: int = 1
    bias: bool = True
    return_bias: bool = True
    activation_fn: Callable[[Tensor], Tensor] = field(default_factory=_tanh_gelu)

    moe_num_experts: int = 1
    moe_top_k: int = 1
    moe_capacity_factor: float = 1  # of MoE; 0 drops nothing
    moe_normalize_expert_weights: float | None = None  # the order of the norm that becomes 1
    moe_loss_weight: float = 0.1
    moe_jitter_eps: float | None = None
    moe_lbl_in_fp32: bool = False

    moe_expert_model_parallelism: bool = False
    expert_parallel_group: Any = None  # None: all ranks
    pipeline_model_parallel_size: int = 1
    num_layers_per_virtual_pipeline_stage: int | None = None

    memory_optimized_mlp: bool = False
    mlp_type: str = "mlp"
    mlp_impl: str = "sparse"

    fp16: bool = True
    bf16: bool = False
    device: Any = field(default_factory=_here)
    init_method: Callable[[Tensor], Any] = field(default_factory=_normal)
    output_layer_init_method: Callable[[Tensor], Any] = field(default_factory=_normal)

    uniform_expert_assignment: bool = False

    shared_expert: bool = False
    fc_cls: Any = nn.Linear
    fc_kwargs: dict[str, Any] = field(default_factory=dict)
    remat_act_fn: bool = True
    shared_expert_hidden_size: int | None = None  # None: ffn_hidden_size
    shared_expert_weighted_sum: bool = False

    moe_zloss_weight: float = 0
    moe_zloss_in_fp32: bool = False

    def __post_init__(self) -> None:
        if self.shared_expert_hidden_size is None:
            self.shared_expert_hidden_size = self.ffn_hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters. fp16 is on by default, and comes before bf16."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.get_default_dtype()

    @property
    def layers_here(self) -> int:
        """MoE layers whose losses are saved in one forward of this pipeline stage."""
        whole = self.num_layers // self.pipeline_model_parallel_size
        return (
            whole if self.num_layers_per_virtual_pipeline_stage is None else self.num_layers_per_virtual_pipeline_stage
        )


_SIZES = (
    *("hidden_size", "ffn_hidden_size", "num_layers", "moe_num_experts", "moe_top_k"),
    *("pipeline_model_parallel_size", "shared_expert_hidden_size"),
)
_NUMBERS = {
    "moe_capacity_factor": 1.25,  # 0 drops nothing
    "moe_loss_weight": 0.1,
    "moe_zloss_weight": 0.001,
    "moe_jitter_eps": 0.01,
}
_FUNCTIONS = {
    "activation_fn": "torch.nn.functional.silu",
    "init_method": "torch.nn.init.normal_",
    "output_layer_init_method": "torch.nn.init.normal_",
}


def check(args: Arguments) -> None:
    """Raises ConfigError for all values that no layer can have."""
    problems = _problems_of_numbers(args)
    whole = all(isinstance(value, int) for value in (args.moe_top_k, args.moe_num_experts))
    if whole and args.moe_top_k > args.moe_num_experts:
        problems.append(
            f"moe_top_k={args.moe_top_k}: must not be above moe_num_experts={args.moe_num_experts}; "
            f"use moe_top_k={args.moe_num_experts}"
        )
    for name, example in _FUNCTIONS.items():
        if not callable(getattr(args, name)):
            problems.append(f"{name}={getattr(args, name)}: a function of a tensor is expected, as {example}")
    for name, known in (("mlp_type", MLP_TYPES), ("mlp_impl", MLP_IMPLEMENTATIONS)):
        if getattr(args, name) not in known:
            problems.append(f"{name}={getattr(args, name)}: no such choice; there are {' and '.join(known)}")
    if problems:
        raise ConfigError("\n".join(problems))


def _problems_of_numbers(args: Arguments) -> list[str]:
    problems = []
    for name in _SIZES:
        value = getattr(args, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{name}={value}: a whole number, 1 or more, is expected, for example {name}=1")
    for name, example in _NUMBERS.items():
        value = getattr(args, name)
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            problems.append(f"{name}={value}: a finite number, 0 or more, is expected, for example {name}={example}")
    power = args.moe_normalize_expert_weights
    if power is not None and not power >= 0:
        problems.append(
            f"moe_normalize_expert_weights={power}: the power of a norm, above 0, is expected, for example "
            "moe_normalize_expert_weights=1; None: none"
        )
    return problems


def from_megatron(megatron_args: Any) -> Arguments:
    """Arguments with the values of all attributes of Megatron's that have the same names."""
    names = [item.name for item in dataclasses.fields(Arguments)]
    return Arguments(**{name: getattr(megatron_args, name) for name in names if hasattr(megatron_args, name)})
