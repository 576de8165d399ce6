"""An exchange of rows among ranks, by kernels: what is for another rank is put into its memory and signalled.

How many rows go from whom to whom is known on the device alone: the kernels read it, and the host never waits. A rank
has symmetric memory for what arrives (`buffer`), what it puts (`staging`, since a network card reads only memory that
it knows), a note from each rank, and a signal of each rank (`Memory`). Of all there are two halves, for exchanges of
even and of odd number.

    put     every rank gets a note (the number of this exchange) and, chunk by chunk, its rows, at their final places;
            each adds to my signal there: 1 for the note, and the number of rows of a chunk
    take    waits until a rank's signal is 1 + its rows, copies them out, and fills up what is beyond the last row
    then the signals of this half go back to 0

Why two halves are enough, without asking whether a buffer is free: kernels of one rank run in order. A rank that puts
in exchange n + 2 has ended its `take` n + 1, which had a note from everyone, who therefore had ended `take` n: buffer
and signals of n are free everywhere, and all that this rank put in n has left its staging. Two signals of one rank in
one exchange may come in any order, since they add up; those of n + 1 go to the other half, where they cannot be taken
for late ones of n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.device.tuning import Variant
from moe_kernels.nvshmem import calls

CHUNK_ROWS = 8  # that are put and signalled together
STEP = 1024  # words of 4 bytes that a program copies at once
WARPS = 8
NOTE_BYTES = 16  # one whole transaction of a network card

Launch = Callable[..., None]  # (kernel, number of programs, arguments, constants)


@dataclass(frozen=True)
class Memory:
    """Symmetric memory of a group of ranks; the first dimension is the half.

    staging, buffer [2, bytes] uint8; notes [2, 2, ranks, 2] int64: those that this rank puts, and that came; signals
    [2, ranks] int64. pes [ranks] int32: what NVSHMEM calls the ranks of the group (ordinary memory). rank: this one's
    place in the group.
    """

    staging: Tensor
    buffer: Tensor
    notes: Tensor
    signals: Tensor
    pes: Tensor
    rank: int

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.pes.shape[0]


@triton.jit
def _words(address, ALIGN: tl.constexpr):
    """The memory at an address, in words of 4 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32), bitcast=True), ALIGN)


@triton.jit
def _chunks(way_ptr, rank, SIZE: tl.constexpr, PEERS: tl.constexpr, ROWS: tl.constexpr):
    """(ranks in the order in which they are visited, from the next one on; rows of each; first row of each; chunks up
    to each one's end; the number of all rows and of all chunks).
    """
    turn = tl.arange(0, PEERS)
    peer = (rank + 1 + turn) % SIZE
    rows = tl.load(way_ptr + peer, mask=turn < SIZE, other=0)
    first = tl.load(way_ptr + SIZE + peer, mask=turn < SIZE, other=0)
    chunks = (rows + (ROWS - 1)) // ROWS
    return peer, rows, first, tl.cumsum(chunks, 0), tl.sum(rows, 0), tl.sum(chunks, 0)


@triton.jit
def _at(values, turn, PEERS: tl.constexpr):
    """The value of the rank that is visited at this turn."""
    return tl.sum(tl.where(tl.arange(0, PEERS) == turn, values, 0), 0)


@triton.jit
def put_kernel(
    x_ptr, way_ptr, pes_ptr, staging, buffer, notes, signals, number, rank, words,
    SIZE: tl.constexpr, PEERS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Put rows x [N, words] (int32) where `way` [3, SIZE] says: rows for each rank, the first here, its place there."""
    peer, rows, first, ends, all_rows, all_chunks = _chunks(way_ptr, rank, SIZE, PEERS, ROWS)
    there = tl.load(way_ptr + 2 * SIZE + peer, mask=tl.arange(0, PEERS) < SIZE, other=0)
    pes = tl.load(pes_ptr + peer, mask=tl.arange(0, PEERS) < SIZE, other=0)
    mine = signals + tl.cast(rank, tl.int64) * 8  # my signal in every rank's memory
    for item in range(tl.program_id(0), SIZE + all_chunks, tl.num_programs(0)):
        if item < SIZE:
            note = notes + tl.cast(item, tl.int64) * 16
            tl.store(note.to(tl.pointer_type(tl.int64), bitcast=True), number)
            tl.debug_barrier()
            came = notes + (SIZE + tl.cast(rank, tl.int64)) * 16
            calls.put_signal(came, note, 16, mine, 1, _at(pes, item, PEERS))
        else:
            chunk = item - SIZE
            turn = tl.sum((ends <= chunk).to(tl.int32), 0)
            count = _at(rows, turn, PEERS)
            skip = (chunk - (_at(ends, turn, PEERS) - (count + (ROWS - 1)) // ROWS)) * ROWS
            count = tl.minimum(count - skip, ROWS)
            here = (_at(first, turn, PEERS) + skip).to(tl.int64) * words
            place = (_at(there, turn, PEERS) + skip).to(tl.int64) * words
            source = _words(staging + here * 4, ALIGN * 4)
            x = x_ptr + tl.multiple_of(here, ALIGN)
            for start in range(0, count * words, STEP):
                offset = start + tl.arange(0, STEP)
                inside = offset < count * words
                tl.store(source + offset, tl.load(x + offset, mask=inside), mask=inside)
            tl.debug_barrier()  # all threads have written what is put
            size = tl.cast(count * words, tl.int64) * 4
            calls.put_signal(buffer + place * 4, staging + here * 4, size, mine, count, _at(pes, turn, PEERS))


@triton.jit
def take_kernel(
    out_ptr, way_ptr, fits_ptr, status_ptr, buffer, notes, signals, number, rank, words, out_rows, id_words,
    SIZE: tl.constexpr, PEERS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Copy what arrives to out [out_rows, words] (int32): `way` [3, SIZE] says how many rows of each rank and where.

    Rows after the last get 0, in their first `id_words` words -1; all words -1 (no number in any float format) if it
    does not fit. status: the number of an exchange that another rank had in place of this one.
    """
    peer, rows, first, ends, all_rows, all_chunks = _chunks(way_ptr, rank, SIZE, PEERS, ROWS)
    fits = tl.load(fits_ptr)
    rest = out_rows - all_rows
    items = SIZE + all_chunks + (rest + (ROWS - 1)) // ROWS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if item < SIZE:
            source = _at(peer, item, PEERS)
            calls.wait_signal(signals + source.to(tl.int64) * 8, 1 + _at(rows, item, PEERS))
            tl.debug_barrier()
            note = (notes + (SIZE + source.to(tl.int64)) * 16).to(tl.pointer_type(tl.int64), bitcast=True)
            theirs = tl.load(note, cache_modifier=".cg")
            tl.store(status_ptr, theirs, mask=theirs != number)
        elif item < SIZE + all_chunks:
            chunk = item - SIZE
            turn = tl.sum((ends <= chunk).to(tl.int32), 0)
            count = _at(rows, turn, PEERS)
            calls.wait_signal(signals + _at(peer, turn, PEERS).to(tl.int64) * 8, 1 + count)
            tl.debug_barrier()
            skip = (chunk - (_at(ends, turn, PEERS) - (count + (ROWS - 1)) // ROWS)) * ROWS
            count = tl.minimum(count - skip, ROWS)
            place = (_at(first, turn, PEERS) + skip).to(tl.int64) * words
            source_ptr = _words(buffer + place * 4, ALIGN * 4)
            out = out_ptr + tl.multiple_of(place, ALIGN)
            for start in range(0, count * words, STEP):
                offset = start + tl.arange(0, STEP)
                inside = offset < count * words
                # Not by the first cache, which may hold what lay here two exchanges ago.
                value = tl.load(source_ptr + offset, mask=inside, cache_modifier=".cg")
                tl.store(out + offset, value, mask=inside)
        else:
            row = all_rows + (item - SIZE - all_chunks) * ROWS
            count = tl.minimum(out_rows - row, ROWS)
            out = out_ptr + tl.multiple_of(tl.cast(row, tl.int64) * words, ALIGN)
            for start in range(0, count * words, STEP):
                offset = start + tl.arange(0, STEP)
                value = tl.where((offset % words < id_words) | (fits == 0), -1, 0)
                tl.store(out + offset, value, mask=offset < count * words)


def exchange(
    x: Tensor,
    out: Tensor,
    put_way: Tensor,
    take_way: Tensor,
    fits: Tensor,
    status: Tensor,
    memory: Memory,
    number: int,
    launch: Launch,
    num_sms: int,
    id_words: int = 0,
) -> None:
    """Rows x [N, …] to other ranks, and those of other ranks to out [M, …]. All ranks call it, in the same order.

    put_way [3, ranks] int32: how many rows of x go to each rank, which is the first, at which row they lie there; they
    fill x from its start in any order. take_way [3, ranks]: how many come from each and at which row they lie; they
    fill out from its start. fits [1] int32: 0 if they are too many for somebody: then both ways have no rows, and every
    byte of out becomes 255. status [1] int64: becomes another rank's number of an exchange if that is not `number`.
    Rows of x beyond those named go nowhere; rows of out beyond become 0, in their first id_words words of 4 bytes -1.
    num_sms: how many multiprocessors do it. Starts kernels and returns. Raises ValueError for rows that are no whole
    words or do not fit into the memory.
    """
    source, target = _as_words(x), _as_words(out)
    words = target.shape[1]
    most = max(x.shape[0], out.shape[0]) * words * 4
    if most > memory.buffer.shape[1]:
        raise ValueError(f"{most} bytes of rows: the symmetric memory holds {memory.buffer.shape[1]}")
    half = number % 2
    buffer, notes, signals = (part[half].data_ptr() for part in (memory.buffer, memory.notes, memory.signals))
    align = next(a for a in (4, 2, 1) if words % a == 0)
    constants = {"SIZE": memory.size, "PEERS": max(2, triton.next_power_of_2(memory.size)), "ROWS": CHUNK_ROWS,
                 "STEP": STEP, "ALIGN": align}  # fmt: skip
    staging = memory.staging[half].data_ptr()
    common = (number, memory.rank, words)
    launch(put_kernel, num_sms, (source, put_way, memory.pes, staging, buffer, notes, signals, *common), constants)
    taking = (target, take_way, fits, status, buffer, notes, signals, *common, out.shape[0], id_words)
    launch(take_kernel, num_sms, taking, constants)
    memory.signals[half].zero_()


def _as_words(x: Tensor) -> Tensor:
    """x [N, …] as int32 [N, words]."""
    row = x[0].numel() * x.element_size() if len(x) else x.new_empty(x.shape[1:]).numel() * x.element_size()
    if row % 4 or row == 0:
        raise ValueError(f"rows of {row} bytes: must be whole words of 4 bytes")
    if not x.is_contiguous() or x.data_ptr() % 16:
        raise ValueError("rows must be contiguous and start at a multiple of 16 bytes")
    return torch.empty(0, row // 4, dtype=torch.int32, device=x.device) if not len(x) else _bits(x, row)


def _bits(x: Tensor, row: int) -> Tensor:
    return x.reshape(-1).view(torch.int32).view(len(x), row // 4)


def variants(library: str) -> list[Variant]:
    """Both kernels, linked with NVSHMEM's bitcode at `library`, for `aot`."""
    pointers = {"way_ptr": "*i32", "buffer": "i64", "notes": "i64", "signals": "i64"}
    sizes: dict[str, Any] = {"number": "i64", "rank": "i32", "words": "i32"}
    constants = {"SIZE": 8, "PEERS": 8, "ROWS": CHUNK_ROWS, "STEP": STEP, "ALIGN": 4}
    options = {"num_warps": WARPS, "extern_libs": (("libnvshmem_device", library),)}
    put = {"x_ptr": "*i32", "pes_ptr": "*i32", "staging": "i64", **pointers, **sizes}
    take = {"out_ptr": "*i32", "fits_ptr": "*i32", "status_ptr": "*i64", **pointers, **sizes}
    take |= {"out_rows": "i32", "id_words": "i32"}
    return [
        Variant("nvshmem put", put_kernel, put, constants, options),
        Variant("nvshmem take", take_kernel, take, constants, options),
    ]
