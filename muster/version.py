"""The version of this Muster, once for scheduler and workers: docs/upgrading.md says which may meet."""

__version__ = "0.2.0"


def how_to_install(extra: str) -> str:
    """Says, as a sentence without a full stop, how Muster is installed with one of its extras.

    It is on no package index: there is a checkout, or a wheel that somebody has built.
    """
    return f"Run pip install '.[{extra}]' in a checkout of Muster, or 'WHEEL[{extra}]' with its wheel"
