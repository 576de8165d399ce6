"""Which row comes when: a shuffle that is computed, not stored.

Epoch e of a run with seed s visits the rows in a permutation that is a function of (s, e) alone: the swap-or-not
shuffle (Hoang, Morris and Rogaway, "An Enciphering Scheme Based on a Card Shuffle", CRYPTO 2012). Each round pairs
every index x with K - x (modulo the number of rows) and flips one keyed coin per pair to swap it or not. So a place
in the order costs the same at step 0 and at step a million, needs no memory however many rows there are, works for
any number of rows, and no state is ever saved. The keys are raw output of NumPy's Philox, a counter-based generator
whose stream NumPy keeps stable over versions.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_ROUNDS = 90  # the paper's bound shrinks exponentially in the rounds; 90 is what large public users of it take

UintArray = npt.NDArray[np.uint64]
RowIndices = npt.NDArray[np.int64]


def ordered_rows(start: int, count: int, *, num_rows: int, seed: int) -> RowIndices:
    """The rows at places start … start + count - 1 of the endless order, [count].

    Every block of num_rows places (an epoch) holds each row once; the places may span several epochs.
    Raises `ValueError` for a negative start or count, or without rows.
    """
    if start < 0 or count < 0 or num_rows < 1:
        raise ValueError(f"start={start}, count={count}, num_rows={num_rows}: the first two >= 0, the last >= 1")
    epochs, within = np.divmod(np.arange(start, start + count, dtype=np.int64), num_rows)
    rows = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        rows[chosen] = _permute(within[chosen], num_rows, _keys(seed, int(epoch)))
    return rows


def _permute(index: RowIndices, size: int, keys: UintArray) -> RowIndices:
    """Send each index in 0 … size - 1 through the permutation that the keys [rounds, 2] choose."""
    for pairing, coin_key in keys:
        partner = (int(pairing % np.uint64(size)) - index) % size
        pair = np.maximum(index, partner).astype(np.uint64)  # both of a pair see the same coin
        swap = _mix(pair ^ coin_key) & np.uint64(1) == 1
        index = np.where(swap, partner, index)
    return index


def _mix(value: UintArray) -> UintArray:
    """Spread every bit of a 64-bit number over all of them (the finaliser of SplitMix64, Steele et al. 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _keys(seed: int, epoch: int) -> UintArray:
    digest = hashlib.blake2b(f"row order {seed} {epoch}".encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little")).random_raw((_ROUNDS, 2))
