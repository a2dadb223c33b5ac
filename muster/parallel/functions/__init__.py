"""Autograd functions and kernels that sharded models use in place of torch's operators."""
