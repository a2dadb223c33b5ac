"""The scheduler's log and audit log, and the limits on how many lines peers can cause in them."""
