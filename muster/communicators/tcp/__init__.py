"""Collectives over encrypted TCP connections, on CPUs."""
