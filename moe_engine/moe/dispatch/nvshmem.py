"""Rows that kernels put straight into the memory of the rank they are for: a row for each (token, rank).

The host never learns how many rows arrive. So every tensor has the size of the most there could be: rows that leave
and rows that arrive are followed by rows of nothing, which have no experts. How many a rank has room for, in (token,
expert) pairs, is `Windows.most_choices`. Every rank sees the whole table of counts: if one rank's room is too small,
none puts a row, what arrives are numbers that are none (NaN), and `Windows` keeps how much room was needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moe_engine.config.schema import Config, MoEConfig, moe_layer_config
from moe_engine.distributed.collectives import Communicator
from moe_engine.distributed.device import check_device
from moe_engine.distributed.groups import Groups
from moe_engine.moe.dispatch.handle import DispatchHandle, Slots
from moe_engine.moe.dispatch.links import Journey, Links, Windows, as_it_is
from moe_engine.moe.dispatch.rows import join_slots, plan_rows, split_slots
from moe_engine.moe.placement import ExpertPlacement
from moe_engine.ops.window import Runtime, Way, Window, start_nvshmem
from moe_engine.planner.symmetric import window_sizes


@dataclass(frozen=True)
class NvshmemHandle(DispatchHandle):
    """local_ids of the choices [T, K]; received: every rank's counts [ranks, ranks * 2] int32, the rows and choices
    for each rank.
    """

    local_ids: Tensor
    windows: Windows

    @property
    def most_choices(self) -> int:
        return self.windows.most_choices

    @cached_property
    def way(self) -> Way:
        """Which rows go where (the device waits for the exchange of counts, the host does not)."""
        size, me = self.links.size, self.windows.rows.group.rank
        table = self.received.wait().view(size, size, 2)  # [from, to, rows and choices]
        needed = table[..., 1].sum(dim=0).amax()[None]
        self.windows.rows.note_need(needed)
        fits = (needed <= self.windows.most_choices).int()
        rows = table[..., 0] * fits
        here, there = rows.cumsum(dim=1) - rows, rows.cumsum(dim=0) - rows  # where rows from i to j start at i, at j
        sent = torch.stack((rows[me], here[me], there[me])).int()
        arrived = torch.stack((rows[:, me], there[:, me], here[:, me])).int()
        return Way(sent, arrived, fits)

    def ids_on_wire(self) -> Tensor:
        return self.local_ids

    def send_slots(self, ids: Tensor, weights: Tensor) -> Journey[Slots]:
        message = join_slots(ids, weights)
        pending = self.windows.rows.exchange(
            message, self.way, self.windows.most_rows, f"{self.label} dispatch slots", ids.shape[1]
        )
        return Journey(pending, lambda got: split_slots(got, weights.dtype))

    def send(self, x: Tensor, what: str) -> Journey[Tensor]:
        rows = self.windows.most_rows
        return Journey(self.windows.rows.exchange(x, self.way, rows, f"{self.label} {what}"), as_it_is)

    def send_back(self, x: Tensor, what: str) -> Journey[Tensor]:
        rows = len(self.tokens.source)
        return Journey(self.windows.rows.exchange(x, self.way.back, rows, f"{self.label} {what}"), as_it_is)

    def send_slots_back(self, d_weights: Tensor) -> Journey[Tensor]:
        return self.send_back(d_weights, "dispatch slots backward")


def open_windows(
    config: MoEConfig,
    tokens: int,
    group: Communicator,
    runtime: Runtime | None,
    device: torch.device,
    *,
    capacity: int = 0,
    num_sms: int = 20,
    dtype: torch.dtype = torch.bfloat16,
    window: Callable[..., Window] = Window,
) -> Windows:
    """Symmetric memory for layers of `config` among the ranks of `group`, which have up to `tokens` tokens each.

    capacity: the most (token, expert) pairs that a rank takes at once, 0: as many as there can be. All ranks of the job
    call it. All layers share it: their exchanges come one after the other. window: makes them, as `Window` does.
    """
    sizes = window_sizes(config, group.size, tokens, dtype.itemsize, capacity)
    rows = window("rows", group, runtime, sizes.rows, num_sms, device)
    counts = window("counts", group, runtime, sizes.counts, 1, device)
    return Windows(rows, counts, sizes.most_rows, sizes.most_choices)


def with_windows(
    config: Config, groups: Groups, device: torch.device, window: Callable[..., Window] = Window
) -> Groups:
    """With symmetric memory, where `moe.dispatch` needs it and it is not there yet; window: as in `open_windows`."""
    if config.moe.dispatch != "nvshmem" or groups.ep.size == 1 or groups.ep_windows is not None:
        return groups
    runtime = None
    if window is Window:
        check_device(config, device)
        runtime = start_nvshmem(groups.world, device)
    windows = open_windows(
        moe_layer_config(config.model, config.moe),
        config.train.micro_batch * config.train.seq_len // config.parallel.cp,
        groups.ep,
        runtime,
        device,
        capacity=config.moe.recv_capacity,
        num_sms=config.moe.exchange_sms,
        dtype=getattr(torch, config.precision.compute),
        window=window,
    )
    return replace(groups, ep_windows=windows)


@torch.no_grad()
def plan_nvshmem(expert_ids: Tensor, placement: ExpertPlacement, links: Links, label: str) -> NvshmemHandle:
    """Lay out the rows of `expert_ids` [T, K] and start the exchange of counts."""
    windows = links.windows
    assert windows is not None
    ranks = placement.rank_of(expert_ids)
    sent = plan_rows(ranks, links.size, placement.num_local, links.exact, fixed=True)
    chosen = ranks.where(ranks >= 0, links.size).flatten()
    choices = torch.zeros(links.size + 1, dtype=torch.int64, device=chosen.device)
    choices.scatter_add_(0, chosen, torch.ones_like(chosen))
    counts = torch.stack((sent.counts, choices[: links.size]), dim=1).int()  # [ranks, 2]
    window = windows.counts
    received = window.exchange(counts.flatten().repeat(links.size, 1), window.one_each, links.size, f"{label} counts")
    return NvshmemHandle(links, label, sent, received, None, placement.local_id(expert_ids), windows)
