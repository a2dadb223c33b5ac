"""Pure logic of the worker: values and decisions, no clock, socket, thread or randomness."""
