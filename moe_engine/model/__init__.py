"""The decoder: attention, blocks in four phases, stages of a pipeline, multi-token prediction."""
