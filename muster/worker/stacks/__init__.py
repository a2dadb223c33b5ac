"""A process's stacks in Python and C, its threads in the kernel, and what libraries report about it."""
