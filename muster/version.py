"""The version of this Muster, once for scheduler and workers: they must be equal."""

__version__ = "0.1.0"
