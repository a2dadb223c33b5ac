"""Muster's scheduler: gathers a job's workers, knows who they are, and keeps their group alive.

Run it with ``MS_ROLE=MS_SCHED python -m scheduler``.
"""

from muster.version import __version__ as __version__
