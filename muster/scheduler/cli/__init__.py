"""Commands that query or control a scheduler, such as ``status`` and ``drain``."""
