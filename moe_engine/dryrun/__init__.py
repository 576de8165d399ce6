"""One rank of a job of any size, run on a laptop: the engine's own code on tensors without data."""
