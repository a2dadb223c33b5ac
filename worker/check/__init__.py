"""``muster check``: what would keep hosts from training together."""
