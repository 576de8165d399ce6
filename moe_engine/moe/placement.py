"""Which expert sits on which rank of its expert-parallel group.

Every rank holds equally many experts, and keeps them in the order of their global ids. At first they lie in
contiguous blocks; `optim.rebalance` may move them between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_engine.config.errors import ConfigError
from moe_engine.config.rules import divisors


@dataclass(frozen=True)
class ExpertPlacement:
    """`num_experts` experts over `ep_size` ranks; `ranks[i]` is the rank of expert i, None: contiguous blocks.

    Raises ConfigError when they do not divide, ValueError for `ranks` that give some rank more experts than another.
    """

    num_experts: int
    ep_size: int = 1
    ranks: tuple[int, ...] | None = None
    _tables: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_experts % self.ep_size:
            works = divisors(self.num_experts)
            raise ConfigError(f"ep={self.ep_size}: must divide num_experts={self.num_experts}; one of {works} works")
        if self.ranks is None:
            return
        if sorted(self.ranks) != [i // self.num_local for i in range(self.num_experts)]:
            raise ValueError(f"ranks={self.ranks}: {self.num_local} experts are needed on each of {self.ep_size} ranks")
        if list(self.ranks) == sorted(self.ranks):
            object.__setattr__(self, "ranks", None)

    @property
    def num_local(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.ep_size

    @property
    def contiguous(self) -> bool:
        """Whether a token's experts, in the order of their ids, are also in the order of their ranks."""
        return self.ranks is None

    def rank_list(self) -> list[int]:
        """The rank of each expert, also where they are contiguous."""
        return [i // self.num_local for i in range(self.num_experts)] if self.ranks is None else list(self.ranks)

    def experts_of(self, ep_rank: int) -> list[int]:
        """Global ids of a rank's experts, ascending: the order in which it keeps them."""
        return [expert for expert, rank in enumerate(self.rank_list()) if rank == ep_rank]

    def rank_of(self, expert_ids: Tensor) -> Tensor:
        """ep rank of each expert id, same shape; of -1, no expert, -1."""
        return expert_ids // self.num_local if self.contiguous else self._table(expert_ids.device)[0][expert_ids]

    def local_id(self, expert_ids: Tensor) -> Tensor:
        """Index of each expert within its rank, same shape; of -1, no expert, -1."""
        if not self.contiguous:
            return self._table(expert_ids.device)[1][expert_ids]
        return (expert_ids % self.num_local).masked_fill(expert_ids < 0, -1)

    def loads(self, num_tokens_per_expert: Sequence[int]) -> list[int]:
        """Rows that each rank's experts get, from those of each expert."""
        loads = [0] * self.ep_size
        for rank, count in zip(self.rank_list(), num_tokens_per_expert, strict=True):
            loads[rank] += count
        return loads

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(rank, index within the rank) of every expert, [E+1] int64 each; the last entry is that of expert -1."""
        if device not in self._tables:
            ranks = torch.tensor([*self.rank_list(), -1])
            local = torch.full_like(ranks, -1)
            for rank in range(self.ep_size):
                local[ranks == rank] = torch.arange(self.num_local)
            self._tables[device] = ranks.to(device), local.to(device)
        return self._tables[device]
