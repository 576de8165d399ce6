"""What travels between ranks that share sequences, and how what arrives becomes keys and values again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe_engine.ops.fp8 import Fp8Rows
from moe_engine.ops.fp8_linear import fp8_linears
from moe_engine.ops.linear import Linear, linear
from moe_engine.ops.wgrad_queue import WgradQueue, gradient_dtype


class Opened(NamedTuple):
    """A block as keys [B, n, G, d] and values [B, n, G, e], and the way of their gradients back.

    back: (d_k, d_v), wide -> (gradient of the block, wide; gradient of the weight or None).
    """

    k: Tensor
    v: Tensor
    back: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


# Opens a block; with True so that its gradients can be found.
Open = Callable[[Tensor, bool], Opened]


class KeysValues(NamedTuple):
    """The payload `kv`: a block is [B, n, G (d + e)]."""

    k: Tensor  # [B, n, G, d]
    v: Tensor  # [B, n, G, e]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.k, self.v, None

    def opener(self, queue: WgradQueue | None) -> Open:
        (heads, key), value = self.k.shape[2:], self.v.shape[3]

        def opened(block: Tensor, graph: bool) -> Opened:
            k, v = block.split((heads * key, heads * value), dim=2)
            return Opened(k.unflatten(2, (heads, key)), v.unflatten(2, (heads, value)), back)

        def back(d_k: Tensor, d_v: Tensor) -> tuple[Tensor, None]:
            return torch.cat((d_k.flatten(2), d_v.flatten(2)), dim=2), None

        return opened


class Latents(NamedTuple):
    """The payload `latent`: a block is [B, n, rank + rope].

    `up`, weight [H (nope + e), rank], makes keys and values of all H heads; of these `heads` are made, from `first` on.
    """

    latent: Tensor  # [B, n, rank], normalised
    k_rope: Tensor  # [B, n, rope], turned by its position
    up: Linear
    value: int  # e
    first: int
    heads: int
    num_heads: int  # H

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.latent, self.k_rope, self.up.weight

    def opener(self, queue: WgradQueue | None) -> Open:
        rank, rope, up = self.latent.shape[2], self.k_rope.shape[2], self.up
        size = up.weight.shape[0] // self.num_heads
        nope, heads, rows = size - self.value, self.heads, slice(self.first * size, (self.first + self.heads) * size)

        def made(own: Tensor) -> tuple[Tensor, Tensor]:
            """Keys and values of a latent, and the weight they are made with."""
            launched = None if queue is None else queue.without_waiting()
            if heads == self.num_heads:
                return up(own, launched), up.weight
            used = up.weight.detach()[rows].requires_grad_()
            used.grad_dtype = gradient_dtype(up.weight)
            if up.fp8 is None:
                return linear(own, used), used
            return fp8_linears(own, [used], Fp8Rows(up.fp8, up.weight, rows), launched)[0], used

        def opened(block: Tensor, graph: bool) -> Opened:
            latent, k_rope = block.split((rank, rope), dim=2)
            own = latent.detach().requires_grad_(graph)
            with torch.set_grad_enabled(graph):
                kv, used = made(own)
            k_nope, v = kv.detach().unflatten(2, (heads, size)).split((nope, size - nope), dim=3)

            def back(d_k: Tensor, d_v: Tensor) -> tuple[Tensor, Tensor]:
                d_kv = torch.cat((d_k[..., :nope], d_v), dim=3).flatten(2).to(kv.dtype)
                d_latent, d_used = torch.autograd.grad(kv, (own, used), d_kv)
                d_weight = d_used
                if heads < self.num_heads:
                    d_weight = d_used.new_zeros(up.weight.shape)
                    d_weight[rows] = d_used
                return torch.cat((d_latent.to(d_k.dtype), d_k[..., nope:].sum(dim=2)), dim=2), d_weight

            return Opened(torch.cat((k_nope, k_rope[:, :, None].expand(-1, -1, heads, -1)), dim=3), v, back)

        return opened
