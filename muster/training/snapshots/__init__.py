"""Snapshots in peers' memory: which ranks keep a part, which snapshots count, which rank sends which part.

All of it is pure: it is told what happens, and decides what to do; others copy, send and receive.
"""
