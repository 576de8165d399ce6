"""The k best of each row, with ties decided the same way everywhere: the lower index wins."""

from moe_kernels.reference.route import choose, chosen_ids

__all__ = ["choose", "chosen_ids"]
