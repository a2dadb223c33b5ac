"""``muster bench nccl-plugin``: measures what sealing costs NCCL's network plug-in, over loopback."""
