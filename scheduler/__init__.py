"""Muster's scheduler: gathers a job's workers, knows who they are, and keeps their group alive.

Run it with ``MS_ROLE=MS_SCHED python -m scheduler``.
"""

__version__ = "0.1.0"
