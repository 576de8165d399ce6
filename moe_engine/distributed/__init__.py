"""The only room that calls torch.distributed: communicators (who talks, in which order) and how ranks start."""
