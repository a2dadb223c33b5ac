"""Example training jobs."""
