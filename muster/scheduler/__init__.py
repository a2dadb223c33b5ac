"""Muster's scheduler: authenticates a job's workers, assigns ranks, and keeps their group together.

Run it with ``MS_ROLE=MS_SCHED python -m scheduler``.
"""

from muster.version import __version__ as __version__

# A link at the top of a checkout leads here, too. Importing by its name must not make a second module.
if __name__ == "scheduler":
    import sys
    from importlib import import_module

    sys.modules[__name__] = import_module("muster.scheduler")
