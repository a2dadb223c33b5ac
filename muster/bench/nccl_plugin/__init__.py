"""``muster bench nccl-plugin``: what sealing costs NCCL's network plug-in, over loopback."""
