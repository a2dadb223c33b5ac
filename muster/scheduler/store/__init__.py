"""The key-value store of a generation, in the place of TCPStore for torch.distributed programs."""
