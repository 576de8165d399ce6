"""MegaBlocks' layers by their own names, on this engine's: for code that was written for MegaBlocks.

    from moe_engine.integrations.megablocks import Arguments, dMoE

    layer = dMoE(Arguments(hidden_size=1024, ffn_hidden_size=4096, moe_num_experts=8, moe_top_k=2, mlp_type="glu"))
    out, bias = layer(x)                      # [S, B, H]; the bias is the caller's to add
    loss = loss + batched_load_balancing_loss(arguments)
    clear_load_balancing_loss()

Argument names, what is returned, names and shapes of parameters (and so checkpoints) and the saved losses are those of
MegaBlocks 0.10 (Gale et al., arXiv 2211.15841). It needs CUDA and an old torch to be imported; these work wherever
this engine does. docs/layer.md lists the differences.
"""

from moe_engine.integrations.megablocks.arguments import Arguments, from_megatron
from moe_engine.integrations.megablocks.layers import (
    LearnedRouter,
    MoE,
    ParallelDroplessMLP,
    ParallelMLP,
    dMoE,
    is_moe_param,
    param_is_expert_model_parallel,
)
from moe_engine.integrations.megablocks.losses import (
    batched_load_balancing_loss,
    batched_router_zloss,
    clear_load_balancing_loss,
    clear_router_zloss,
    get_load_balancing_loss,
    save_load_balancing_loss,
)

__all__ = [
    "Arguments",
    "LearnedRouter",
    "MoE",
    "ParallelDroplessMLP",
    "ParallelMLP",
    "batched_load_balancing_loss",
    "batched_router_zloss",
    "clear_load_balancing_loss",
    "clear_router_zloss",
    "dMoE",
    "from_megatron",
    "get_load_balancing_loss",
    "is_moe_param",
    "param_is_expert_model_parallel",
    "save_load_balancing_loss",
]
