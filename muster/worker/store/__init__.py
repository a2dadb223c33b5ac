"""Runs unmodified torch programs: an agent with their session, and their store over mutual TLS."""
