"""What all ways to the experts have in common: the handle of one micro-batch's exchanges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from moe_engine.distributed.collectives import Pending
from moe_engine.moe.dispatch.further import Rounds
from moe_engine.moe.dispatch.links import Journey, Links
from moe_engine.moe.dispatch.rows import RowPlan
from moe_engine.ops.coded import CodedGradient
from moe_engine.ops.permute import RowMap

Slots = tuple[Tensor, Tensor]  # ids [N, k] int32, weights [N, k]


@dataclass(frozen=True)
class DispatchHandle(ABC):
    """The way of one micro-batch's tokens over the wire, the same for both directions and their backwards.

    sent: the rows [N] that leave this rank; arriving ones are [R, …]. label: for the collective log; received: the
    pending exchange of counts, a row from each rank whose last number is how many rounds that rank fills. rounds: where
    the rows a rank may hold are bounded, of which this is the way of the first round.
    """

    links: Links
    label: str
    sent: RowPlan
    received: Pending
    rounds: Rounds | None

    @cached_property
    def gradient(self) -> CodedGradient:
        """Where rows travel in fp8: the way of the gradient of what the experts made."""
        return CodedGradient()

    @property
    def most_choices(self) -> int:
        """See `Rows`."""
        return 0

    @property
    def tokens(self) -> RowMap:
        """From tokens to the rows that are sent."""
        return self.sent.tokens

    @property
    def sums(self) -> RowMap:
        """From tokens to the rows that came back, those of further rounds after those of this one."""
        return self.sent.tokens if self.rounds is None else self.rounds.sums

    @cached_property
    def num_rounds(self) -> int:
        """Rounds of the whole group (waits for the exchange of counts)."""
        return int(self.received.wait()[:, -1].max())

    @abstractmethod
    def ids_on_wire(self) -> Tensor:
        """What the rows' slots say of each choice [T, K], -1 of a masked one."""

    @abstractmethod
    def send_slots(self, ids: Tensor, weights: Tensor) -> Journey[Slots]:
        """Start sending slots [N, k] to the experts: [R, k] each, ids being those of the rank that computes."""

    @abstractmethod
    def send(self, x: Tensor, what: str) -> Journey[Tensor]:
        """Start sending rows [N, …] to their experts: [R, …] in the order (source rank, token)."""

    @abstractmethod
    def send_back(self, x: Tensor, what: str) -> Journey[Tensor]:
        """Start sending rows [R, D] back to where their tokens are: [N, D]."""

    @abstractmethod
    def send_slots_back(self, d_weights: Tensor) -> Journey[Tensor]:
        """Start sending the gradients of slots' weights [R, k] back: [N, k]."""
