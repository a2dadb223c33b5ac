"""``muster bench nccl-plugin``: measures what encryption costs NCCL's network plug-in, over loopback."""
