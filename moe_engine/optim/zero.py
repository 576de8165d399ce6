"""ZeRO-1: parameters and gradients whole on every rank, optimizer states in shards.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv 1910.02054, section
5.1). Parameters with the same sharers and weight decay are a bucket: one flat buffer of values in the compute format,
one of fp32 gradients, and this rank's shard of fp32 master weights and moments. In bf16 that is 6 + 12/shards bytes a
parameter, with `precision.moments=bfloat16` 6 + 8/shards. The sharers are the holders' data-parallel ranks for dense
parameters, and the holders' ranks with the same experts for experts.

`parameter.grad` is a view of the flat gradient buffer from the start, in `precision.gradient`
(`Tensor.grad_dtype` lets a bf16 parameter have an fp32 gradient): autograd accumulates into it in place, nothing is
copied before the reduction, and an expert without tokens has zeros.

A step: `zero_grad`, backward, `reduce_gradients` (sums in rank order; loss terms are already divided by global
counts, so nothing is averaged), `step` (clip, AdamW on the shards, gather of the new values).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_engine.config.schema import OptimConfig, PrecisionConfig, moments_format
from moe_engine.distributed.collectives import Communicator
from moe_engine.distributed.groups import Groups
from moe_engine.layout import aligned
from moe_engine.model.names import NamedParameter
from moe_engine.ops.threads import share_out
from moe_engine.optim.adamw import adamw
from moe_engine.optim.clip import GradientNorm, clip_scale
from moe_engine.optim.relocate import Move, Stacked, exchange

BLOCK = 1 << 22  # elements of a shard communicated at a time: bounds what a reduction or a gather needs beside
UPDATE_BLOCK = 1 << 17  # elements updated at a time on a CPU: what one pass wrote, the next still finds in the cache


class Shard(NamedTuple):
    """Elements [start, end) of one named parameter, flattened: what one rank owns of it."""

    name: str
    start: int
    end: int
    shape: torch.Size  # of the whole named parameter
    states: dict[str, Tensor]  # master, exp_avg, exp_avg_sq: views [end - start] of the optimizer's memory


class GradientShard(NamedTuple):
    """As `Shard`, with the reduced gradient."""

    name: str
    start: int
    end: int
    shape: torch.Size
    gradient: Tensor


@dataclass(frozen=True)
class StepStats:
    """What a step did; equal on all ranks."""

    grad_norm: float  # before clipping; inf when any gradient is not finite
    clip_scale: float  # what the gradients were multiplied by
    skipped: bool  # the norm was not finite: nothing has moved


@dataclass(frozen=True)
class _Owned:
    """The part of a named parameter that lies in this rank's shard."""

    name: str
    start: int
    end: int
    shape: torch.Size
    place: slice  # in the shard


class _Bucket:
    """Parameters that are reduced and sharded together."""

    def __init__(
        self, members: list[NamedParameter], communicator: Communicator, weight_decay: float, precision: PrecisionConfig
    ) -> None:
        self.members, self.communicator, self.weight_decay = members, communicator, weight_decay
        formats = (precision.compute, precision.gradient, precision.master, moments_format(precision))
        compute, gradient, master, moments = (getattr(torch, name) for name in formats)
        device, size = members[0].parameter.device, communicator.size
        self.offsets, used = [], 0
        for named in members:
            self.offsets.append(used)
            used += aligned(named.parameter.numel())
        self.shard_size = aligned(-(-used // size))
        self.values = torch.zeros(size * self.shard_size, dtype=compute, device=device)
        self.master = torch.zeros(self.shard_size, dtype=master, device=device)
        self.owned = list(self._find_owned())
        self._take_parameters()
        # After the parameters' old storage is freed, so that start-up needs no more memory than training.
        self.gradients = torch.zeros(size * self.shard_size, dtype=gradient, device=device)
        self.exp_avg = torch.zeros_like(self.master, dtype=moments)
        self.exp_avg_sq = torch.zeros_like(self.master, dtype=moments)
        for named in members:
            named.parameter.grad = None
            named.parameter.grad_dtype = gradient
        self.attach_gradients()

    @property
    def gradient_shard(self) -> Tensor:
        """This rank's part of the gradient buffer: the reduced gradients once `reduce` is done."""
        return self.gradients.view(self.communicator.size, -1)[self.communicator.rank]

    def _find_owned(self) -> Iterator[_Owned]:
        first = self.communicator.rank * self.shard_size
        for named, offset in zip(self.members, self.offsets, strict=True):
            shape = named.parameter.shape[1:] if named.expert else named.parameter.shape
            numel = shape.numel()
            for i, name in enumerate(named.names):
                begin = offset + i * numel - first  # where the parameter would begin in this shard
                start, end = max(0, -begin), min(numel, self.shard_size - begin)
                if start < end:
                    yield _Owned(name, start, end, shape, slice(begin + start, begin + end))

    def _take_parameters(self) -> None:
        """Copy the parameters' values to the masters and make the parameters views of the flat buffer."""
        pieces = {name: piece for named in self.members for name, piece in named.pieces()}
        for owned in self.owned:
            self.master[owned.place] = pieces[owned.name].detach().reshape(-1)[owned.start : owned.end]
        for named, view in self._views(self.values):
            named.parameter.data = view.copy_(named.parameter.detach())

    def _views(self, flat: Tensor) -> Iterator[tuple[NamedParameter, Tensor]]:
        for named, offset in zip(self.members, self.offsets, strict=True):
            parameter = named.parameter
            yield named, flat[offset : offset + parameter.numel()].view(parameter.shape)

    def attach_gradients(self) -> None:
        for named, view in self._views(self.gradients):
            named.parameter.grad = view

    def check_gradients(self) -> None:
        """Raise RuntimeError when somebody replaced a gradient: what it holds would be lost."""
        for named, view in self._views(self.gradients):
            grad = named.parameter.grad
            if grad is None or grad.data_ptr() != view.data_ptr():
                raise RuntimeError(
                    f"{named.names[0]}: its .grad was replaced; clear gradients by optimizer.zero_grad()"
                )

    def reduce(self) -> None:
        """Sum gradients over the sharers in rank order, into this rank's part of the buffer."""
        if self.communicator.size == 1:
            return  # the buffer is the shard
        by_rank, shard = self.gradients.view(self.communicator.size, -1), self.gradient_shard
        for block in self._blocks():
            shard[block] = self.communicator.reduce_scatter_sum(by_rank[:, block].reshape(-1), "gradients")

    @property
    def own_values(self) -> Tensor:
        """This rank's part of the buffer of values."""
        return self.values.view(self.communicator.size, -1)[self.communicator.rank]

    def update(self, optim: OptimConfig, step: int, lr: float, scale: float) -> None:
        """AdamW on the shard, with gradients multiplied by `scale`; its values follow."""
        device, dtype = self.master.device, self.master.dtype
        size = UPDATE_BLOCK if device.type == "cpu" else BLOCK
        flat = (self.master, self.exp_avg, self.exp_avg_sq, self.gradient_shard, self.own_values)
        count = torch.full((), step, dtype=torch.float32, device=device)

        def work(blocks: Sequence[tuple[Tensor, ...]]) -> None:
            scaled = torch.empty(min(size, self.shard_size) if scale != 1.0 else 0, dtype=dtype, device=device)
            for master, exp_avg, exp_avg_sq, gradient, values in blocks:
                gradient = gradient.to(dtype)
                if scale != 1.0:
                    gradient = torch.mul(gradient, scale, out=scaled[: len(gradient)])
                adamw(
                    master,
                    exp_avg,
                    exp_avg_sq,
                    gradient,
                    step=count,
                    lr=lr,
                    beta1=optim.beta1,
                    beta2=optim.beta2,
                    eps=optim.eps,
                    weight_decay=self.weight_decay,
                )
                values.copy_(master)

        blocks = list(zip(*(x.split(size) for x in flat), strict=True))
        share_out(work, blocks, alone=device.type != "cpu")

    def follow_master(self) -> None:
        """Set the whole parameters from the masters of all sharers."""
        self.own_values.copy_(self.master)
        self.gather()

    def gather(self) -> None:
        """Set the whole parameters from all sharers' own values."""
        if self.communicator.size == 1:
            return
        by_rank, own = self.values.view(self.communicator.size, -1), self.own_values
        for block in self._blocks():
            gathered = self.communicator.all_gather(own[block], "parameters")
            by_rank[:, block] = gathered.view(self.communicator.size, -1)

    def move_experts(self, members: list[NamedParameter], moves: Mapping[int, Move], groups: Groups) -> bool:
        """`ZeroOptimizer.move_experts` for this bucket, whose members become `members`; False: none of them moves."""
        if not any(id(named.parameter) in moves for named in members):
            return False
        holders = members[0].holders
        owners = [groups.layout.expert_ranks(place, holders) for place in range(groups.layout.ep)]
        states = {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        for named, offset in zip(members, self.offsets, strict=True):
            move = moves.get(id(named.parameter))
            if move is not None:
                stacked = Stacked(offset, named.parameter[0].numel(), self.shard_size, owners)
                exchange(states, list(stacked.pieces(move)), groups.dense[holders])
        self.members = members
        self.owned = list(self._find_owned())
        return True

    def _blocks(self) -> Iterator[slice]:
        for start in range(0, self.shard_size, BLOCK):
            yield slice(start, min(start + BLOCK, self.shard_size))


class ZeroOptimizer:
    """AdamW with sharded states over the parameters of one rank.

    Takes the parameters over: their `.data` and `.grad` become views of flat buffers, in `precision.compute` and
    `precision.gradient`. Masters start from the values that the parameters have (in whatever format); `fill_masters`
    gives them values that were never rounded to the compute format. All ranks of the world must make one together.
    Raises ValueError when the ranks' shards do not cover each parameter exactly once.
    """

    @torch.no_grad()
    def __init__(
        self, named: list[NamedParameter], groups: Groups, optim: OptimConfig, precision: PrecisionConfig
    ) -> None:
        self.optim, self.groups = optim, groups
        self.state_steps = 0  # updates done: AdamW's step count, part of a checkpoint
        self._reduced = False
        self._buckets = _make_buckets(named, groups, optim, precision)
        device = named[0].parameter.device if named else torch.device("cpu")
        parts = [(o.name, o.end - o.start, o.shape.numel()) for bucket in self._buckets for o in bucket.owned]
        self._norm = GradientNorm(parts, groups.world, device)

    @torch.no_grad()
    def fill_masters(self, fill: Callable[[str, int, int, torch.Size], Tensor]) -> None:
        """Set each master to `fill(name, start, end, shape)`, elements [start, end) of the flattened parameter.

        Parameters follow, rounded to the compute format.
        """
        for shard in self.named_shards():
            shard.states["master"].copy_(fill(shard.name, shard.start, shard.end, shard.shape))
        self.set_parameters_from_masters()

    @torch.no_grad()
    def set_parameters_from_masters(self) -> None:
        """Gather the parameters anew; for after a checkpoint was loaded into `named_shards`."""
        for bucket in self._buckets:
            bucket.follow_master()

    @torch.no_grad()
    def move_experts(self, named: list[NamedParameter], moves: Mapping[int, Move]) -> None:
        """Bring all states to where experts are to be, between two steps; gradients are used up.

        named: all parameters, moved experts with their new names; moves: by the id of the stacked parameter, on every
        rank that holds the layer. Parameters follow the masters.
        """
        by_parameter = {id(each.parameter): each for each in named}
        for bucket in self._buckets:
            if bucket.move_experts([by_parameter[id(old.parameter)] for old in bucket.members], moves, self.groups):
                bucket.follow_master()
        self._norm.assign([(o.name, o.end - o.start, o.shape.numel()) for b in self._buckets for o in b.owned])
        self._reduced = False

    @torch.no_grad()
    def zero_grad(self) -> None:
        """Clear the gradients; before the first backward of a step."""
        self._reduced = False
        for bucket in self._buckets:
            bucket.gradients.zero_()
            bucket.attach_gradients()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum gradients over ranks, once a step, after the last weight gradient; `.grad` is then used up.

        Raises RuntimeError when called twice without `zero_grad`, or when a parameter's `.grad` was replaced.
        """
        if self._reduced:
            raise RuntimeError("reduce_gradients: gradients are already reduced; call zero_grad first")
        for bucket in self._buckets:
            bucket.check_gradients()
        for bucket in self._buckets:
            bucket.reduce()
        self._reduced = True

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """The norm of the reduced gradients over all parameters of the model, the same bits on every rank."""
        self._require_reduced("gradient_norm")
        return self._norm([shard.gradient for shard in self.named_gradient_shards()])

    @torch.no_grad()
    def step(self, lr: float) -> StepStats:
        """Clip to `optim.clip`, update the shards, gather the parameters. Reduced gradients stay as they are.

        When the norm is not finite nothing moves, the step count included, and the result says so.
        """
        norm = self.gradient_norm()
        if not math.isfinite(norm):
            return StepStats(norm, clip_scale=1.0, skipped=True)
        scale = clip_scale(norm, self.optim.clip)
        self.state_steps += 1
        for bucket in self._buckets:
            bucket.update(self.optim, self.state_steps, lr, scale)
        for bucket in self._buckets:
            bucket.gather()
        return StepStats(norm, scale, skipped=False)

    def named_shards(self) -> Iterator[Shard]:
        """What this rank owns of each parameter's states, as views: for checkpoints and tests."""
        for bucket in self._buckets:
            states = {"master": bucket.master, "exp_avg": bucket.exp_avg, "exp_avg_sq": bucket.exp_avg_sq}
            for o in bucket.owned:
                yield Shard(o.name, o.start, o.end, o.shape, {key: flat[o.place] for key, flat in states.items()})

    def named_gradient_shards(self) -> Iterator[GradientShard]:
        """What this rank owns of each reduced gradient, before clipping, as views. Raises when not reduced yet."""
        self._require_reduced("named_gradient_shards")
        for bucket in self._buckets:
            for o in bucket.owned:
                yield GradientShard(o.name, o.start, o.end, o.shape, bucket.gradient_shard[o.place])

    def state_bytes(self) -> dict[str, int]:
        """What this rank's buffers take, those of all buckets: parameters, gradients, master, moments."""
        buffers = {
            "parameters": [bucket.values for bucket in self._buckets],
            "gradients": [bucket.gradients for bucket in self._buckets],
            "master": [bucket.master for bucket in self._buckets],
            "moments": [state for bucket in self._buckets for state in (bucket.exp_avg, bucket.exp_avg_sq)],
        }
        return {name: sum(flat.untyped_storage().nbytes() for flat in flats) for name, flats in buffers.items()}

    def _require_reduced(self, what: str) -> None:
        if not self._reduced:
            raise RuntimeError(f"{what}: gradients are not reduced; call reduce_gradients first")


def decays(named: NamedParameter, optim: OptimConfig) -> bool:
    """Whether weight decay applies: to matrices but those of routers and gates, to the embedding table by option."""
    name = named.names[0]
    if name == "embedding.weight":
        return optim.decay_embedding
    return named.is_matrix and not name.endswith(("router.weight", "shared_gate.weight"))


def _make_buckets(
    named: list[NamedParameter], groups: Groups, optim: OptimConfig, precision: PrecisionConfig
) -> list[_Bucket]:
    """Buckets in one order for all ranks: two communicators that share ranks are then never used crosswise."""
    members: dict[tuple[bool, tuple[int, ...], bool], list[NamedParameter]] = {}
    for each in sorted(named, key=lambda each: each.names):
        members.setdefault((each.expert, each.holders, decays(each, optim)), []).append(each)
    buckets = []
    for expert, holders, decay in sorted(members):
        communicator = (groups.expert if expert else groups.dense)[holders]
        weight_decay = optim.weight_decay if decay else 0.0
        buckets.append(_Bucket(members[expert, holders, decay], communicator, weight_decay, precision))
    return buckets
