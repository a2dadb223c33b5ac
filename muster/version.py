"""The version of this Muster, once for scheduler and workers: docs/upgrading.md says which may meet."""

__version__ = "0.2.0"
