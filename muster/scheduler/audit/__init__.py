"""The scheduler's log: refusals, failed handshakes, and the limits on how many lines they cause."""
