"""The time from a loss to the next good step."""
