"""Where a process stands: its stacks in Python and C, its threads in the kernel, what libraries say of it."""
