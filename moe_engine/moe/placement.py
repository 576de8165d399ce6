"""Which expert sits on which rank of its expert-parallel group: contiguous blocks of equal size."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_engine.config.errors import ConfigError


@dataclass(frozen=True)
class ExpertPlacement:
    """`num_experts` experts over `ep_size` ranks. Raises ConfigError when they do not divide."""

    num_experts: int
    ep_size: int = 1

    def __post_init__(self) -> None:
        if self.num_experts % self.ep_size:
            divisors = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
            raise ConfigError(f"ep={self.ep_size}: must divide num_experts={self.num_experts}; one of {divisors} works")

    @property
    def num_local(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.ep_size

    def first(self, ep_rank: int) -> int:
        """Global id of a rank's first expert."""
        return ep_rank * self.num_local

    def rank_of(self, expert_ids: Tensor) -> Tensor:
        """ep rank of each expert id, same shape."""
        return expert_ids // self.num_local

    def local_id(self, expert_ids: Tensor) -> Tensor:
        """Index of each expert within its rank, same shape."""
        return expert_ids % self.num_local
