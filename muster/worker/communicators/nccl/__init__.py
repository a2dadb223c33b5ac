"""Collectives over NCCL."""
