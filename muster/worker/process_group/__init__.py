"""torch.distributed's process groups on CPUs over Muster's encrypted connections: the backend "muster"."""
