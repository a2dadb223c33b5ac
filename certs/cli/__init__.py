"""``muster certs``."""
