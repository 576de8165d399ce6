"""A whole language model on one device, with the weights of a Hugging Face folder: an ordinary module.

    model = load_hf("DeepSeek-V2-Lite", dtype=torch.bfloat16)
    logits = model(tokens)  # [B, S] -> [B, S, V]

The blocks are those that training runs over many ranks. There is no cache of keys and values: to serve a model, export
it and use an inference engine.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from moe_engine.checkpoint.weights import fill_stages, open_weights
from moe_engine.config.model_rules import check_attention
from moe_engine.config.rules import Rules
from moe_engine.config.schema import Config, ModelConfig, MoESection
from moe_engine.layout import Placement, split_stages
from moe_engine.model.attention import sequence_context
from moe_engine.model.batch import Batch
from moe_engine.model.block import Block
from moe_engine.model.transformer import Stage
from moe_engine.ops.embedding import embedding


class LanguageModel(nn.Module):
    """Tokens to logits. `config` is the model; `stage` has its parts (`stage.layers`, `stage.moe_layers()`).

    moe: how its MoE layers exchange, drop and balance, as section `moe` of a run. Parameters are left as they are, for
    whoever fills them. Raises ConfigError for attention that the engine does not build, by name.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoESection | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        rules = Rules(Config(model=config))
        check_attention(rules)
        rules.finish()
        self.config = config
        with torch.device(device or "cpu"):
            self.stage = Stage(split_stages(config, 1)[0], config, moe or MoESection(), None, dtype)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """tokens [B, S] int64 -> logits [B, S, V] in the parameters' dtype, with gradients; causal.

        documents [B, S] int32: tokens see those of their own document alone. MTP modules take no part.
        """
        stage, (B, S) = self.stage, tokens.shape
        places = torch.arange(S, device=tokens.device).expand(B, S)
        if documents is None:
            documents = torch.zeros(B, S, dtype=torch.int32, device=tokens.device)
        batch = Batch(tokens[None], tokens[None], places, documents)
        context = sequence_context(batch, self.config, stage.dtype)
        assert stage.embedding is not None
        x = embedding(tokens.reshape(-1), stage.embedding.weight)
        for layer in stage.layers.values():
            assert isinstance(layer, Block)
            x, _ = layer(x, context)
        return stage.logits(x).view(B, S, -1)


def load_hf(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> LanguageModel:
    """The model of a Hugging Face folder (or of a checkpoint of this engine), with its weights cast to `dtype`.

    Families as in `moe-engine convert`. Raises ConfigError for a folder that is not one, for what the engine does not
    build, by name, and for tensors that are missing, too many or damaged.
    """
    weights = open_weights(Path(path))
    try:
        weights.check_copies()
        model = LanguageModel(weights.model, dtype=dtype, device=device)
        fill_stages(weights, [model.stage], Placement(tuple(split_stages(weights.model, 1)), ((0,),)))
    finally:
        weights.close()
    return model
