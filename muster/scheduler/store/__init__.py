"""The key-value store of a generation, used in place of TCPStore by torch.distributed programs."""
