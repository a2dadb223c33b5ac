"""The version of Muster, for scheduler and workers. docs/upgrading.md says which versions may be combined."""

__version__ = "0.3.0"


def how_to_install(extra: str) -> str:
    """Returns a sentence without a full stop that says how to install Muster with one of its extras.

    Muster is not on a package index, so it is installed from a checkout or from a wheel that somebody has
    built.
    """
    return f"Run pip install '.[{extra}]' in a checkout of Muster, or 'WHEEL[{extra}]' with its wheel"
