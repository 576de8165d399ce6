"""Counter-based random numbers: the right distribution, a function of (seed, name, index) alone."""

from __future__ import annotations

import pytest
import torch

from moe_engine.ops.random import BLOCK, normal

N = 200_000


def test_moments_are_those_of_a_normal_distribution() -> None:
    x = normal((N,), 2.0, "layers.0.moe.experts.7.down", seed=3, dtype=torch.float64) / 2.0
    error = N**-0.5
    assert abs(x.mean().item()) < 4 * error
    assert x.var().item() == pytest.approx(1.0, abs=4 * 2**0.5 * error)
    assert x.pow(3).mean().item() == pytest.approx(0.0, abs=4 * 15**0.5 * error)
    assert x.pow(4).mean().item() == pytest.approx(3.0, abs=4 * 96**0.5 * error)
    assert 4.0 < x.abs().max().item() < 6.5
    for limit, share in ((0.6744898, 0.5), (1.9599640, 0.95), (2.5758293, 0.99)):
        assert (x.abs() < limit).double().mean().item() == pytest.approx(share, abs=2.5 * error)


@pytest.mark.parametrize("other", [("b", 0), ("a", 1)])
def test_other_names_and_seeds_are_independent(other: tuple[str, int]) -> None:
    a = normal((N,), 1.0, "a", 0, dtype=torch.float64)
    b = normal((N,), 1.0, *other, dtype=torch.float64)
    for lag in (0, 1, 64):
        correlation = (a[lag:] * b[: N - lag]).mean().item()
        assert abs(correlation) < 4 * N**-0.5


def test_neighbours_in_one_stream_are_independent() -> None:
    a = normal((N,), 1.0, "a", 0, dtype=torch.float64)
    for lag in (1, 2, 64, 1024):
        assert abs((a[lag:] * a[:-lag]).mean().item()) < 4 * N**-0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_part_has_the_same_bits_as_the_whole(dtype: torch.dtype) -> None:
    whole = normal((37, 53), 0.5, "w", 1, dtype=dtype)
    flat = whole.flatten()
    assert torch.equal(normal((37 * 53,), 0.5, "w", 1, dtype=dtype), flat)
    for first, count in ((0, 1), (1, 2), (17, 999), (37 * 53 - 3, 3)):
        assert torch.equal(normal((count,), 0.5, "w", 1, dtype=dtype, first=first), flat[first : first + count])
    assert torch.equal(normal((7, 53), 0.5, "w", 1, dtype=dtype, first=30 * 53), whole[30:])


def test_blocks_join_without_a_seam() -> None:
    whole = normal((BLOCK + 5,), 1.0, "w", 0)
    assert torch.equal(normal((10,), 1.0, "w", 0, first=BLOCK - 5), whole[BLOCK - 5 :])


def test_values_are_fixed_for_ever() -> None:
    """A checkpoint of step 0 must be reproducible by later versions: splitmix64 of key + (i+1) * golden."""
    import hashlib
    import math
    import statistics

    def reference(index: int) -> float:
        mask = (1 << 64) - 1
        key = int.from_bytes(hashlib.sha256(b"5:embedding.weight").digest()[:8], "little")
        z = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        signed = z - (1 << 64) if z >> 63 else z
        uniform = (2 * (signed >> 11) + 1) / 2**53
        return statistics.NormalDist().inv_cdf((uniform + 1) / 2)

    x = normal((100,), 1.0, "embedding.weight", 5, dtype=torch.float64)
    assert all(math.isclose(x[i].item(), reference(i), rel_tol=1e-9, abs_tol=1e-9) for i in range(100))


def test_nothing_is_computed_on_the_meta_device_and_empty_shapes_work() -> None:
    assert normal((4, 5), 1.0, "w", 0, device="meta").is_meta
    assert normal((0, 5), 1.0, "w", 0).shape == (0, 5)
