"""The optimizer: AdamW on sharded states (ZeRO-1), the exact global gradient norm, the learning rate."""
