"""Block-scaled fp8 as the engine uses it: rows of numbers as E4M3 codes with a scale for each 128 of them.

DeepSeek-V3 (arXiv 2412.19437, section 3.3); the format is `moe_kernels.fp8_format`. Codes and scales are the same
on CPUs and GPUs for the same bits. `fp8_linear` computes with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from moe_kernels import dequantize_rows, quantize_blocks, quantize_rows
from moe_kernels.fp8_format import BLOCK, FORWARD_AMAX, GRADIENT_AMAX


@dataclass(frozen=True)
class Codes:
    """Rows in fp8: codes [R, D] in E4M3, scale [ceil(D/128), R] fp32; a number is its code times its tile's scale."""

    codes: Tensor
    scale: Tensor


def quantize(x: Tensor, gradient: bool = False, power_of_two: bool = True) -> Codes:
    """x [R, D] bf16 or fp32 in fp8 by tiles of 1x128; without autograd.

    gradient: x is one: its tiles may be as small as 2^-100, where a forward tile below 1e-4 loses bits. Numbers that
    came from codes with power-of-two scales give the same numbers again.
    """
    return Codes(*quantize_rows(x, GRADIENT_AMAX if gradient else FORWARD_AMAX, power_of_two))


def dequantize(x: Codes, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The numbers [R, D] that codes stand for: exact in bf16 if the scales are powers of two."""
    return dequantize_rows(x.codes, x.scale, dtype)


@dataclass(frozen=True)
class WeightCodes:
    """Matrices in fp8 by blocks of 128x128: codes [e, out, in] for the forward product, and their scales
    [e, ceil(out/128), ceil(in/128)]. kept: the same codes transposed, for the input gradient; None: made at each use.
    """

    codes: Tensor
    scale: Tensor
    kept: Tensor | None

    def transposed(self) -> tuple[Tensor, Tensor]:
        """Codes [e, in, out] and scales [e, ceil(in/128), ceil(out/128)]."""
        codes = self.kept
        if codes is None:
            codes = self.codes.view(torch.uint8).transpose(1, 2).contiguous().view(self.codes.dtype)
        return codes, self.scale.transpose(1, 2).contiguous()


class Fp8:
    """A recipe, and the codes of the weights it is used with: each weight is quantised once between two updates.

    Codes are made at a weight's first use and kept until `forget`, which whoever moves weights behind autograd's back
    must call (the engine's optimizer writes to the memory under the parameters). An in-place change that torch itself
    sees, as any ordinary optimizer makes, is noticed without it.

    wgrad: fp8 | bf16, the format of the operands of weight gradients. power_of_two: of scales; others are finer, but
    then changing the tiles of a cached input from rows to columns rounds once more. keep: False makes codes at every
    use, where nobody says when weights move (FSDP2 gathers them into the same tensors, and torch sees no change).
    keep_transposed: False makes transposed codes at every input gradient: half the bytes of codes, the same bits.
    """

    def __init__(
        self, wgrad: str = "fp8", power_of_two: bool = True, keep: bool = True, keep_transposed: bool = True
    ) -> None:
        self.wgrad, self.power_of_two, self.keep, self.keep_transposed = wgrad, power_of_two, keep, keep_transposed
        self._kept: dict[int, tuple[ref[Tensor], int, WeightCodes]] = {}

    def weight(self, weight: Tensor) -> WeightCodes:
        """The codes of a weight [out, in] or of stacked ones [e, out, in]."""
        kept = self._kept.get(id(weight))
        if kept is not None and kept[0]() is weight and kept[1] == weight._version:
            return kept[2]
        with torch.no_grad():
            stacked = weight.detach() if weight.dim() == 3 else weight.detach()[None]
            codes, transposed, scale = quantize_blocks(stacked, FORWARD_AMAX, self.power_of_two)
            made = WeightCodes(codes, scale, transposed if self.keep_transposed else None)
        if self.keep and weight.is_leaf:
            self._kept[id(weight)] = (ref(weight), weight._version, made)
        return made

    def forget(self) -> None:
        """The weights have moved: make new codes at their next use."""
        self._kept.clear()


class Fp8Rows(Fp8):
    """The recipe for a copy of some rows of a weight [out, in], from a border of its blocks to another.

    Their codes are cut out of the weight's own, so a product of these rows is a part of that of all.
    """

    def __init__(self, fp8: Fp8, weight: Tensor, rows: slice) -> None:
        super().__init__(fp8.wgrad, fp8.power_of_two, keep=False, keep_transposed=fp8.keep_transposed)
        if rows.start % BLOCK or rows.stop % BLOCK:
            raise ValueError(f"rows {rows.start} to {rows.stop} do not lie between borders of blocks of {BLOCK}")
        self._whole, self._weight, self._rows = fp8, weight, rows

    def weight(self, weight: Tensor) -> WeightCodes:
        """The codes of the rows; `weight` is their copy."""
        whole, blocks = self._whole.weight(self._weight), slice(self._rows.start // BLOCK, self._rows.stop // BLOCK)
        return WeightCodes(
            whole.codes[:, self._rows],
            whole.scale[:, blocks],
            None if whole.kept is None else whole.kept[:, :, self._rows].contiguous(),
        )

    def __deepcopy__(self, _memo: Any) -> Fp8:
        """A copied module has weights of its own."""
        return Fp8(self.wgrad, self.power_of_two, self.keep, self.keep_transposed)


def use_fp8(module: nn.Module, fp8: Fp8 | None) -> None:
    """Let every linear layer and expert inside `module` compute in fp8; with None, in their own format again."""
    for part in module.modules():
        if hasattr(part, "fp8"):
            part.fp8 = fp8  # type: ignore[assignment]
