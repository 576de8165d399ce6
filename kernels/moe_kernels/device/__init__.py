"""Triton kernels, one family of ops a file with its launcher beside it: needs Triton; imported on first use.

A launcher takes what its namesake in `reference` takes, with group sizes as a tensor that stays on the device.
"""

from moe_kernels.device.quantize import quantize_blocks, quantize_columns, quantize_rows, quantize_rows_and_columns

__all__ = ["quantize_blocks", "quantize_columns", "quantize_rows", "quantize_rows_and_columns"]
