"""One suite for every communicator: real processes, every collective, against NumPy."""
