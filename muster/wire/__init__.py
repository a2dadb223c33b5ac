"""Code that scheduler and workers share: messages, codec, settings, rank tables, errors, log lines."""
