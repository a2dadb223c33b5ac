"""Collectives over torch's Gloo."""
