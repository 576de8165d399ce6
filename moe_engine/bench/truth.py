"""Whether a candidate of a benchmark computes the right thing: its results beside the same in fp64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from moe_engine.bench.record import Verdict

BOUNDS = {"fp32": 1e-10, "bf16": 1e-4}  # calc_diff of a right result: its rounding


def beside_fp64(name: str, found: Mapping[str, Tensor], truth: Sequence[Tensor], bound: float) -> Verdict:
    """The results of candidate `name`, by what they are, in the order of `truth`, which is in fp64. bound: `BOUNDS` of
    their format."""
    differences = [calc_diff(result.double(), right) for result, right in zip(found.values(), truth, strict=True)]
    passed = all(difference < bound for difference in differences)  # NaN fails
    shown = ", ".join(f"{what} {x:.0e}" for what, x in zip(found, differences, strict=True))
    return Verdict(passed, f"{name}: calc_diff against fp64 {shown}; bound {bound:.0e}", {"diffs": differences})


def calc_diff(a: Tensor, b: Tensor) -> float:
    """1 - 2 <a, b> / (<a, a> + <b, b>) of fp64 tensors: 0 where they are equal, NaN where both are 0."""
    return float(1 - 2 * (a * b).sum() / (a.square().sum() + b.square().sum()))
