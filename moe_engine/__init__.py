"""A training engine for Mixture-of-Experts language models of the DeepSeek-V3 family.

Three uses: `moe-engine train` starts a run, `from moe_engine import MoELayer` puts one layer into another model,
`moe-engine bench` measures. The public names load on first use, so importing the package starts nothing and loads
no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_engine.checkpoint.whole_model import load_hf
    from moe_engine.config.errors import ConfigError
    from moe_engine.config.schema import MoEConfig
    from moe_engine.moe.experts import experts_forward
    from moe_engine.moe.layer import MoELayer
    from moe_engine.moe.router import Router

__version__ = "0.1.0"

__all__ = ["ConfigError", "MoEConfig", "MoELayer", "Router", "__version__", "experts_forward", "load_hf"]

_HOMES = {
    "ConfigError": "moe_engine.config.errors",
    "MoEConfig": "moe_engine.config.schema",
    "MoELayer": "moe_engine.moe.layer",
    "Router": "moe_engine.moe.router",
    "experts_forward": "moe_engine.moe.experts",
    "load_hf": "moe_engine.checkpoint.whole_model",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module, once."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
