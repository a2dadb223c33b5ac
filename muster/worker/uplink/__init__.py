"""The host's uplink: one stream to the scheduler for all workers of a host, and how workers connect to it."""
