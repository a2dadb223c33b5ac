"""One scheduler and many workers."""
