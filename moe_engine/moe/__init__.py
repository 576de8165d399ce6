"""Mixture of experts: router, balance, placement, dispatch and combine, experts, and the layer made of them."""
