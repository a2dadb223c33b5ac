"""Snapshots in peers' memory: which ranks keep a part, which snapshots count, which rank sends which part.

All of it is pure: events go in and decisions come out. Other modules copy, send and receive.
"""
