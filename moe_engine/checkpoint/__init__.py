"""Checkpoints: named flat ranges in safetensors files with a JSON index, independent of the layout."""
