"""Muster's scheduler: authenticates a job's workers, assigns ranks, and keeps their group together.

Run it with ``MS_ROLE=MS_SCHED python -m scheduler``.
"""

from muster.version import __version__ as __version__
