"""Snapshots in peers' memory: where each rank's parts are kept, which of them count, and who hands out what.

Pure: what copies, sends and receives is torch's side. All of it is told what happens, and says what to do.
"""
