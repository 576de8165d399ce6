"""Measurements: what a run, a kernel or a wire really does, and the means to measure it on one machine."""
