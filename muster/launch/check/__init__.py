"""``muster check``: finds what would keep hosts from training together."""
