"""The speed of training."""
