"""How a kernel is cut and compiled: tiles, and what `aot` needs to compile a kernel without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tile:
    """One entry of a tuning table.

    rows, columns: of the output tile; depth: along the sum (never a choice by size: it fixes the order of sums);
    warps, stages: of Triton's pipeline; registers: the most per thread, None for the compiler's choice.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    registers: int | None = None

    def options(self) -> dict[str, Any]:
        """Launch options of a Triton kernel."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}

    def __str__(self) -> str:
        limit = "" if self.registers is None else f"r{self.registers}"
        return f"{self.rows}x{self.columns}x{self.depth}w{self.warps}s{self.stages}{limit}"


@dataclass(frozen=True)
class Variant:
    """A kernel with everything that its compilation depends on.

    arguments: Triton types of the run-time arguments in order ("*bf16", "i32", "tensordesc<fp8e4nv[128, 128]>");
    constants: compile-time arguments; tile: the tile of a matrix product, None for kernels bound by memory.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    tile: Tile | None = None
    consumers: int = 0  # warp groups that multiply, in a kernel whose warps have roles; 0: all warps do everything
    element_bytes: int = 0  # of a product's operands
    hopper_only: bool = False
    ctas: int = 1  # multiprocessors that share the rows of a tile side by side, each with a tile of its own
