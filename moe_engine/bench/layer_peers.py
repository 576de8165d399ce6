"""Other people's experts behind one signature: the same tokens, choices and weights to the same output.

A peer is a function of `Inputs`. Those of transformers are its own modules and implementations; `torch_grouped_mm` is
what one writes with torch alone. `others` says what became of the libraries that have no adapter here: they need a
GPU, and an adapter that nobody ran would be a guess.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_engine.config.errors import ConfigError
from moe_engine.moe.experts import experts_forward
from moe_engine.ops.backend import check_backend

OURS = "moe_engine"
HOSTED = "transformers_moe_engine"  # the same inside transformers, by experts_implementation=
EAGER = "transformers_eager"
LARGEST_COPY = 2 << 30  # bytes of weights that an implementation may copy for its tokens
# Libraries without an adapter: the module to look for.
WITHOUT_ADAPTER = {
    "scattermoe": "scattermoe",
    "sonic-moe": "sonicmoe",
    "liger-kernel": "liger_kernel",
    "torchtitan": "torchtitan",
}


@dataclass(frozen=True)
class Inputs:
    """x [T, D], ids [T, K] int64 ascending, weights [T, K] fp32, gate_up [E, 2F, D] (gate first), down [E, D, F]."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor

    def leaves(self) -> list[Tensor]:
        """What gradients are taken of."""
        return [self.x, self.weights, self.gate_up, self.down]


Candidate = Callable[[Inputs], Tensor]


def ours(inputs: Inputs) -> Tensor:
    """This engine's, as a function."""
    return experts_forward(inputs.x, inputs.ids, inputs.weights, inputs.gate_up, inputs.down)


def megablocks(inputs: Inputs) -> Tensor:
    """MegaBlocks' grouped products in our layer, `backend=megablocks`."""
    return experts_forward(inputs.x, inputs.ids, inputs.weights, inputs.gate_up, inputs.down, backend="megablocks")


def torch_grouped_mm(inputs: Inputs) -> Tensor:
    """Rows sorted by expert, `F.grouped_mm` twice, the weights after the second, rows put back and summed."""
    T, K = inputs.ids.shape
    order = inputs.ids.flatten().argsort(stable=True)
    ends = torch.bincount(inputs.ids.flatten(), minlength=len(inputs.down)).cumsum(0).to(torch.int32)
    rows = inputs.x[order // K]
    gate, up = F.grouped_mm(rows, inputs.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
    out = F.grouped_mm(F.silu(gate) * up, inputs.down.transpose(1, 2), offs=ends)
    out = out * inputs.weights.flatten()[order, None]
    return out[order.argsort()].view(T, K, -1).sum(dim=1).to(inputs.x.dtype)


def dense_loop(inputs: Inputs) -> Tensor:
    """The truth, for fp64 inputs: an expert at a time."""
    out = torch.zeros_like(inputs.x)
    for expert, (gate_up, down) in enumerate(zip(inputs.gate_up, inputs.down, strict=True)):
        token, slot = (inputs.ids == expert).nonzero(as_tuple=True)
        gate, up = (inputs.x[token] @ gate_up.T).chunk(2, dim=1)
        rows = (F.silu(gate) * up) @ down.T
        out = out.index_add(0, token, rows * inputs.weights[token, slot, None])
    return out


def candidates(inputs: Inputs) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Who takes part at this size, ours first; and why others do not."""
    found: dict[str, Candidate] = {OURS: ours, "torch_grouped_mm": torch_grouped_mm}
    missing = others()
    try:
        check_backend("megablocks", True, None)
    except ConfigError as error:
        missing["megablocks"] = f"not run: {error}".replace("\n", "; ")
    else:
        if inputs.x.dtype == torch.bfloat16:
            found["megablocks"] = megablocks
        else:
            missing["megablocks"] = "not run: multiplies in bf16 alone; use dtypes=[bf16]"
    names = ("eager", "grouped_mm", "batched_mm")
    if importlib.util.find_spec("transformers") is None:
        return found, {f"transformers_{name}": "not installed" for name in (*names, "moe_engine")} | missing
    for name in names:
        copied = inputs.ids.numel() * inputs.gate_up[0].nbytes
        if name == "batched_mm" and copied > LARGEST_COPY:
            missing[f"transformers_{name}"] = f"not run: copies {copied / 2**30:.1f} GiB of weights"
        else:
            found[f"transformers_{name}"] = transformers_experts(inputs, name)
    importlib.import_module("moe_engine.integrations.transformers").register()
    found[HOSTED] = transformers_experts(inputs, "moe_engine")
    return found, missing


def others() -> dict[str, str]:
    """Libraries without an adapter: not installed, or not run."""
    return {
        name: "not installed" if importlib.util.find_spec(module) is None else "not run: no adapter, it needs a GPU"
        for name, module in WITHOUT_ADAPTER.items()
    }


def transformers_experts(inputs: Inputs, implementation: str) -> Candidate:
    """The experts module of transformers' Mixtral around the given parameters, with one of its implementations."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    E, D, hidden = inputs.down.shape
    config: Any = MixtralConfig(
        hidden_size=D, intermediate_size=hidden, num_local_experts=E, num_experts_per_tok=inputs.ids.shape[1]
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        module: Any = MixtralExperts(config)

    def run(inputs: Inputs) -> Tensor:
        # the tensors themselves, so that gradients are theirs
        for name, tensor in (("gate_up_proj", inputs.gate_up), ("down_proj", inputs.down)):
            if getattr(module, name) is not tensor:
                setattr(module, name, tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor))
        out: Tensor = module(inputs.x, inputs.ids, inputs.weights)
        return out

    return run
