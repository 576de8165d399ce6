"""The block-scaled fp8 format: E4M3 codes, one fp32 scale for each tile of 128 numbers.

A number is code * scale. DeepSeek-V3 (arXiv 2412.19437, section 3.3): activations and gradients in tiles of 1x128
along the dimension that a matrix product sums over, weights in blocks of 128x128. A product then sums 128 terms
within one pair of tiles, multiplies by the two scales, and goes on in fp32.
"""

from __future__ import annotations

import torch

BLOCK = 128
E4M3_MAX = 448.0
CODE = torch.float8_e4m3fn

# The smallest amax a tile is taken to have. A tile of zeros would have scale 0, and one of very small numbers a scale
# whose inverse overflows. Gradients carry 1/(tokens of the global batch), 1e-8 and less: a floor that suits weights
# and activations would flush them to zero.
FORWARD_AMAX = 1e-4
GRADIENT_AMAX = 2.0**-100
# Below this floor a tile of zeros gets scale 1: products of two scales near 2^-100 are no fp32 numbers any more.
_SMALLEST_ZERO_AMAX = 2.0**-64


def scale_of(amax: torch.Tensor, smallest_amax: float, power_of_two: bool) -> torch.Tensor:
    """Scales [any shape] fp32 of tiles with the given largest magnitudes (fp32).

    max(amax, smallest_amax) / 448; with `power_of_two` rounded up to a power of two, by its bits (UE8M0).
    """
    scale = amax.clamp(min=smallest_amax) / E4M3_MAX
    if power_of_two:
        # Adding all ones below the exponent carries into it unless the mantissa is zero.
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return scale if smallest_amax >= _SMALLEST_ZERO_AMAX else scale.masked_fill_(amax == 0, 1.0)


def zero_scale(smallest_amax: float, power_of_two: bool) -> float:
    """The scale of a tile of zeros."""
    return scale_of(torch.zeros(1, dtype=torch.float32, device="cpu"), smallest_amax, power_of_two).item()


def blocks(size: int) -> int:
    """Tiles along a dimension: ceil(size / 128)."""
    return -(-size // BLOCK)


def padded_rows(rows: int, groups: int) -> int:
    """A bound, known without the group sizes, on the rows of `groups` groups that each start a new tile of 128."""
    return (blocks(rows) + groups) * BLOCK
