"""Differentiable ops: autograd over `moe_kernels` and torch, with weight gradients that can be run later."""
