"""``status`` and ``drain``: commands that ask a scheduler."""
