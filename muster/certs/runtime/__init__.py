"""Credentials of a running process: loaded, checked and renewed."""
