"""Muster's worker: a process's place in a job, its session, its collectives.

The public API for scripts is in :mod:`muster`.
"""

if __name__ == "worker":
    raise ImportError(
        "Muster is imported under one name: write `import muster` for `import worker`, and"
        " `from muster import ...` for `from worker import ...`.",
        name=__name__,
    )
