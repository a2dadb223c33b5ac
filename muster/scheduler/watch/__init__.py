"""Streams a running scheduler's jobs, members and events to operators."""
