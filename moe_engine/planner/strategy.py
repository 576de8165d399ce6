"""How a model is spread over ranks and run: the other half, with the architecture, of every question to the planner.

Wider than the sections of `Config`: the planner answers for ways of training that the engine does not have yet (ZeRO-2
and 3, tensor parallelism, recompute by part), so that one can see what they would bring.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import RecomputeConfig
from moe_engine.layout import Layout

if TYPE_CHECKING:
    from moe_engine.planner.symmetric import WindowSizes

# What can be computed again in backward instead of being kept, smallest first; `full` keeps a layer's input alone.
RECOMPUTE = ("norm", "moe_act", "mla_up_proj", "core_attn", "mlp", "moe", "full")

# The engine's names (section `recompute`) for those that it has.
_OF_ENGINE = {"norm": "norm", "mla_up": "mla_up_proj", "swiglu": "moe_act", "attention": "core_attn"}

DISPATCH = ("expert", "rank", "node")

# What of a block a host launches as one recorded graph and not kernel by kernel; empty: what is usual on the cards.
GRAPHS = ("", "none", "router", "attention", "full")

TILE = 128  # numbers of one scale in fp8


def coded_row_bytes(dim: int) -> int:
    """Bytes of a row on its way in fp8: codes, filled up to whole numbers of 4 bytes, and scales."""
    return -(-dim // 4) * 4 + 4 * -(-dim // TILE)


@dataclass(frozen=True)
class Precision:
    """Bytes of each kind of number. compute: `bf16`, `fp8` or `fp4`, the format of matrix products (what is kept for
    them is then one byte wide too, where `fp8_activations`). codes: as this engine computes in fp8, with all that it
    keeps for that; code_copies: 2 where codes of weights are kept transposed too; wgrad, bf16_first and bf16_last: as
    in section `precision`.
    """

    compute: str = "bf16"
    wgrad: str = "fp8"
    bf16_first: int = 0
    bf16_last: int = 0
    parameter: float = 2
    gradient: float = 4
    master: float = 4
    moments: float = 8  # both together
    fp8_activations: bool = False
    codes: bool = False
    code_copies: int = 2


@dataclass(frozen=True)
class Overlap:
    """The share of each communication that the software lets run beside computation, where there is enough of it.

    tp, cp, ep: inside a pass (an overlapped pair of a schedule hides its own). dp: gradients and parameters beside the
    passes of the first and last micro-batches.
    """

    tp: float = 0.0
    cp: float = 1.0
    ep: float = 0.0
    dp: float = 1.0


@dataclass(frozen=True)
class Strategy:
    """A layout with a batch and a schedule.

    etp: ranks that share one expert's matrices (1: experts are whole). micro_batch in sequences, micro_batches of a
    step on one data-parallel rank, seq_len in tokens. zero: 0 (nothing sharded) to 3 (parameters too); shard: ranks
    that a sharded state is spread over at most, 0 for all. stage_layers: decoder layers of each stage, empty for as
    even as possible. sequence_parallel: what tensor parallelism does not cut is cut along the sequence.
    flash: attention keeps no matrix of scores. dispatch: how often a token crosses, once per `expert`, per `rank`, or
    per `node` (from where links spread it). wire_fp8: rows to the experts are codes. windows: where kernels put rows,
    the room for them. on_node: ranks of a node within an expert-parallel group, where rows of this engine go in two
    hops, else 0; max_recv_rows, capacity_factor: as in section `moe`. exchange, payload: of context parallelism, as in
    section `cp`. graphs: what of a block is launched as one graph (GRAPHS; `attention` with the router and what lies
    between). fused_biases: experts' biases are added by their products, not in kernels of their own. frozen: the
    weights are not trained (adapters are), so they have no gradients and no states.
    """

    layout: Layout = field(default_factory=Layout)
    etp: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    seq_len: int = 4096
    zero: int = 1
    shard: int = 0
    recompute: frozenset[str] = frozenset()
    precision: Precision = field(default_factory=Precision)
    stage_layers: tuple[int, ...] = ()
    sequence_parallel: bool = True
    flash: bool = True
    dropout: bool = False
    dispatch: str = "rank"
    wire_fp8: bool = False
    windows: WindowSizes | None = None
    on_node: int = 0
    max_recv_rows: int = 0
    capacity_factor: float = 0.0
    exchange: str = "ring"
    payload: str = "kv"
    fused_biases: bool = True
    graphs: str = ""
    frozen: bool = False
    overlap: Overlap = field(default_factory=Overlap)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.recompute) - set(RECOMPUTE))
        if unknown:
            raise ConfigError(f"recompute={unknown[0]}: cannot be computed again; use some of {', '.join(RECOMPUTE)}")
        if self.dispatch not in DISPATCH:
            raise ConfigError(f"dispatch={self.dispatch}: no such way; use one of {', '.join(DISPATCH)}")
        if self.graphs not in GRAPHS:
            raise ConfigError(f"graphs={self.graphs}: no such part; use one of {', '.join(GRAPHS[1:])}")
        if self.zero not in (0, 1, 2, 3):
            raise ConfigError(f"zero={self.zero}: ZeRO has stages 0 to 3; use zero=1")

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank of a context-parallel group."""
        return self.micro_batch * self.seq_len / self.layout.cp

    @property
    def expert_replicas(self) -> int:
        """Ranks of a stage that hold the same experts."""
        return max(1, self.layout.stage_size // (self.layout.ep * self.etp))

    @property
    def dense_replicas(self) -> int:
        """Ranks of a stage that hold the same dense parameters."""
        return self.layout.dp * self.layout.cp

    @property
    def global_batch(self) -> int:
        """Sequences of a step over all ranks."""
        return self.layout.dp * self.micro_batch * self.micro_batches


def recomputed_parts(config: RecomputeConfig) -> frozenset[str]:
    """Section `recompute` of a run in the planner's names. Raises ConfigError for a part there is not."""
    if config.mode != "selective":
        return frozenset({"full"} if config.mode == "full" else ())
    for name in config.names:
        if name not in _OF_ENGINE:
            raise ConfigError(f"recompute.names=[{name}]: no such part; there are {', '.join(_OF_ENGINE)}")
    return frozenset(_OF_ENGINE[name] for name in config.names)


def recompute_section(parts: frozenset[str]) -> RecomputeConfig:
    """The section `recompute` of a run for parts that the engine has. Raises ConfigError for another."""
    if not parts or parts == {"full"}:
        return RecomputeConfig(mode="full" if parts else "none")
    names = {part: name for name, part in _OF_ENGINE.items()}
    unknown = sorted(parts - set(names))
    if unknown:
        known = ", ".join(sorted(names))
        raise ConfigError(
            f"plan.recompute=[{unknown[0]}]: the engine recomputes {known}, or full alone; leave {unknown[0]} out"
        )
    return RecomputeConfig("selective", [names[part] for part in sorted(parts)])
