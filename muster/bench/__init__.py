"""Benchmarks: each measures, checks its numbers, and writes JSON."""
