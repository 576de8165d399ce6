"""Tokens travel to their experts and back: expert parallelism.

    handle = plan(expert_ids, placement, links)                 # layout, once; starts the exchange of counts
    rows = pack_rows(x, expert_ids, expert_weights, placement, handle)
    arrived = dispatch_wait(dispatch_start(rows, handle))       # Rows for this rank's experts
    back = combine_arrive(combine_start(results, handle))       # what the experts made of this rank's rows
    out = sum_rows(back, handle)                                # [T, D]

A token crosses the wire once per destination rank (`dedup`): its row carries, in up to k slots, which of that
rank's experts want it and with what weight; the rank sums its experts' outputs, and one row comes back. In `exact`
mode there is one row per (token, expert) instead, summed at the source in expert order: more bytes, but the same
bits for any number of ranks, since with one rank, too, a token's experts are summed in expert order from rounded
rows.

The layout is computed once, in `plan`, and its handle serves all four exchanges: the backward of dispatch is a
combine with the same handle (rows and weights return together), the backward of combine a dispatch. Rows arrive in
the order (source rank, token). Each exchange is a start and a wait, so that other work can go between; a rank that
sends and receives nothing joins all of them.

    rows.py          which rows go where, from the choices of the tokens; no communication
    links.py         the communicators and options of a way to the experts; a message on its way
    handle.py        what all ways have in common
    all_to_all.py    one exchange among all ranks of the group
    hierarchical.py  two: between nodes once per node, then within the node
    nvshmem.py       rows put by kernels, in numbers that the host never learns
    further.py       rows beyond the bound on what a rank holds, in rounds of their own
    exchange.py      the functions above, with their backwards
    graph.py         the same as nodes of a compiled graph
"""

from moe_engine.moe.dispatch.exchange import (
    PendingCombine,
    PendingDispatch,
    Rows,
    combine_arrive,
    combine_backward_start,
    combine_start,
    combine_wait,
    dispatch_backward_start,
    dispatch_start,
    dispatch_wait,
    pack_for,
    pack_rows,
    plan,
    sum_rows,
)
from moe_engine.moe.dispatch.further import further_rows
from moe_engine.moe.dispatch.handle import DispatchHandle
from moe_engine.moe.dispatch.links import Links, Windows
from moe_engine.moe.dispatch.nvshmem import open_windows, with_windows

__all__ = [
    "DispatchHandle",
    "Links",
    "PendingCombine",
    "PendingDispatch",
    "Rows",
    "Windows",
    "combine_arrive",
    "combine_backward_start",
    "combine_start",
    "combine_wait",
    "dispatch_backward_start",
    "dispatch_start",
    "dispatch_wait",
    "further_rows",
    "open_windows",
    "pack_for",
    "pack_rows",
    "plan",
    "sum_rows",
    "with_windows",
]
