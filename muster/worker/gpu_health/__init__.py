"""Whether a GPU is well: readings of the driver, and what they mean."""
