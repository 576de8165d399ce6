"""The global gradient norm, equal to the last bit in every layout, and the clipping factor.

Floating-point sums depend on their order, and the order depends on where shards are cut. They are cut at multiples of
CHUNK elements (`layout.ALIGNMENT`), so the squares of each chunk of a parameter are summed in fp64, in a fixed order;
a parameter that is no multiple of CHUNK has chunks of one element. The sums of chunks are then summed as integers: for
each global name, the largest sum of a chunk in the world (or the largest magnitude, where it must be known first) gives
a power of two that brings them below 2^62 in all; what int64 cuts off goes into a second int64 with as many bits again.
Integer sums are exact in any order, and the last sum, over global names, is exactly rounded. The relative error is near
1e-16 and at most 2^(3L-123) for a parameter of 2^L elements (1e-12 at 2^27), whatever the gradients.

Each rank gives the elements that it owns after the reduction; a parameter that several stages hold is cut over all
its holders, so every logical element counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from moe_engine.distributed.collectives import Communicator
from moe_engine.ops.threads import share_out

CHUNK = 64  # elements whose squares are summed before they become integers, which is the slow part
BLOCK = 1 << 16  # elements squared at a time: the 8-byte intermediates stay in a CPU's cache …
DEVICE_BLOCK = 1 << 22  # … and elsewhere few launches do much
SUM_BITS = 62  # an int64 sum stays below 2^62
SMALLEST_EXPONENT = -900  # magnitudes below 2^-900 are not scaled up further: the scale must stay finite in fp64


class GradientNorm:
    """The Euclidean norm over all parameters of the world. Making one is a start-up operation of all ranks.

    `owned` lists (global name, elements that this rank owns, elements in all), each name at most once. A part begins
    and ends at a multiple of CHUNK, or where its parameter does.
    Raises ValueError on every rank when the world's parts do not make up each parameter exactly once.
    """

    def __init__(self, owned: Sequence[tuple[str, int, int]], world: Communicator, device: torch.device) -> None:
        self.world, self.device = world, device
        self.numel = _numel_by_name(part for parts in world.gather_objects(list(owned)) for part in parts)
        self.assign(owned)
        # Half the bits of a square's integer part: the elements themselves are scaled to below 2^half_bits.
        self.half_bits = [(SUM_BITS - (n - 1).bit_length()) // 2 for n in self.numel.values()]
        self.chunks = [CHUNK if n % CHUNK == 0 else 1 for n in self.numel.values()]

    def assign(self, owned: Sequence[tuple[str, int, int]]) -> None:
        """This rank owns these parts from now on: the world's together still make up each parameter once."""
        place = {name: i for i, name in enumerate(self.numel)}
        self.places = [place[name] for name, _, _ in owned]

    def __call__(self, gradients: Sequence[Tensor]) -> float:
        """The norm of `gradients`, the owned parts in the order of `owned`; inf when any element is inf or NaN."""
        sums = self._sums_of_chunks(gradients)
        largest = self._largest(gradients, sums)
        if not all(map(math.isfinite, largest)):
            return math.inf
        exponents = [max(math.frexp(value)[1], SMALLEST_EXPONENT) for value in largest]
        totals = torch.zeros(len(self.numel), 2, dtype=torch.int64, device=self.device)
        for place, gradient, of_chunks in zip(self.places, gradients, sums, strict=True):
            half = self.half_bits[place]
            exponent = half - exponents[place]
            if of_chunks is None:
                totals[place] = _sum_of_squares(gradient, exponent, 2 * half, self.chunks[place])
            else:
                totals[place] = _integers(of_chunks.mul_(math.ldexp(1.0, 2 * exponent)), 2 * half)
        summed = self.world.all_reduce_sum(totals, "gradient squares").tolist()
        return _norm(summed, exponents, self.half_bits)

    def _sums_of_chunks(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """The sums of squares of each gradient's chunks; None where they are taken later.

        That is in fp64, whose squares may leave its range until they are scaled, and where chunks are single elements.
        """
        found: list[Tensor | None] = []
        pieces = []
        size = BLOCK if self.device.type == "cpu" else DEVICE_BLOCK
        for place, gradient in zip(self.places, gradients, strict=True):
            if gradient.dtype == torch.float64 or self.chunks[place] == 1:
                found.append(None)
                continue
            sums = torch.empty(gradient.numel() // CHUNK, dtype=torch.float64, device=self.device)
            found.append(sums)
            pieces += list(zip(gradient.split(size), sums.split(size // CHUNK), strict=True))

        def work(some: Sequence[tuple[Tensor, Tensor]]) -> None:
            scratch = torch.empty(size if some else 0, dtype=torch.float64, device=self.device)
            whole = scratch, scratch.view(-1, CHUNK)
            for block, to in some:
                n = block.numel()
                squares, of_chunks = whole if n == size else (scratch[:n], scratch[:n].view(-1, CHUNK))
                squares.copy_(block).square_()
                torch.sum(of_chunks, dim=1, out=to)

        share_out(work, pieces, alone=self.device.type != "cpu")
        return found

    def _largest(self, gradients: Sequence[Tensor], sums: Sequence[Tensor | None]) -> list[float]:
        """What bounds the magnitudes of each name over the world: the root of the largest sum of a chunk, or, without
        these, the largest magnitude. inf also for NaN (not every backend's max keeps it).
        """
        largest = torch.zeros(len(self.numel), dtype=torch.float64, device=self.device)
        if gradients:
            own = torch.stack(
                [
                    torch.stack(gradient.aminmax()).abs().amax().double() if each is None else each.amax().sqrt()
                    for gradient, each in zip(gradients, sums, strict=True)
                ]
            )  # NaN gives NaN
            largest[torch.tensor(self.places, device=self.device)] = own.nan_to_num(nan=math.inf, posinf=math.inf)
        found: list[float] = self.world.all_reduce_max(largest, "gradient magnitudes").tolist()
        return found


def _numel_by_name(parts: Iterable[tuple[str, int, int]]) -> dict[str, int]:
    """Elements of every name, sorted by name; the owned parts must add up to them."""
    owned: dict[str, int] = {}
    numel: dict[str, int] = {}
    for name, part, whole in parts:
        owned[name] = owned.get(name, 0) + part
        if numel.setdefault(name, whole) != whole:
            raise ValueError(f"{name}: ranks disagree on its number of elements, {numel[name]} and {whole}")
    wrong = [
        f"{name}: {owned[name]} of {numel[name]} elements are owned" for name in numel if owned[name] != numel[name]
    ]
    if wrong:
        raise ValueError("optimizer shards must cover each parameter exactly once: " + "; ".join(wrong[:5]))
    return dict(sorted(numel.items()))


def _sum_of_squares(gradient: Tensor, exponent: int, low_bits: int, chunk: int) -> Tensor:
    """Sum of (gradient * 2^exponent)^2 as [integer part, rest in units of 2^-low_bits], int64 [2]."""
    # The scale is a power of two: after the squares and their sums it gives the same bits, of fewer numbers. Squares of
    # fp64 gradients could leave fp64's range first.
    first = math.ldexp(1.0, exponent) if gradient.dtype == torch.float64 else 1.0
    last = 1.0 if gradient.dtype == torch.float64 else math.ldexp(1.0, 2 * exponent)
    total = torch.zeros(2, dtype=torch.int64, device=gradient.device)
    size = BLOCK if gradient.device.type == "cpu" else DEVICE_BLOCK
    for part in gradient.split(size * chunk):
        sums = torch.cat([_chunk_sums(block, first, chunk) for block in part.split(size)]).mul_(last)
        total += _integers(sums, low_bits)
    return total


def _integers(sums: Tensor, low_bits: int) -> Tensor:
    """The sum of `sums`, which are used up, as [integer part, rest in units of 2^-low_bits], int64 [2]."""
    whole = sums.floor()
    rest = sums.sub_(whole).mul_(2.0**low_bits).round_()
    return torch.stack([whole.long().sum(), rest.long().sum()])


def _chunk_sums(block: Tensor, factor: float, chunk: int) -> Tensor:
    """Sums of the squares of `chunk` elements times `factor`, in fp64."""
    squares = block.to(torch.float64, copy=True)
    if factor != 1:
        squares.mul_(factor)
    squares.square_()
    return squares if chunk == 1 else squares.view(-1, chunk).sum(dim=1)


def _norm(totals: Iterable[Sequence[int]], exponents: Sequence[int], half_bits: Sequence[int]) -> float:
    """Undo the scales relative to the largest one, so that squares neither overflow nor vanish."""
    top = max(exponents, default=0)
    squares = []
    for (whole, rest), exponent, half in zip(totals, exponents, half_bits, strict=True):
        exact = (whole << 2 * half) + rest
        squares.append(math.ldexp(exact, 2 * (exponent - top) - 4 * half))
    return math.ldexp(math.sqrt(math.fsum(squares)), top)


def clip_scale(norm: float, largest: float) -> float:
    """What to multiply gradients of this norm by, so that it is at most `largest`; 0 turns clipping off."""
    return largest / norm if 0 < largest < norm else 1.0
