"""``muster nccl-plugin`` builds the plug-in that encrypts NCCL's traffic between hosts, or shows it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from muster.communicators.nccl import library
from muster.errors import SettingsError
from muster.launch.screen import say

EPILOG = """\
examples:
  once on each host, or in an image, before jobs that ask for encryption:
    muster nccl-plugin build
  whether this host can encrypt, and with what:
    muster nccl-plugin show

A job that asks for encryption (muster run --encrypt-nccl) builds it by itself where it is not there."""


def parser() -> argparse.ArgumentParser:
    """Makes the parser of ``muster nccl-plugin``."""
    made = argparse.ArgumentParser(
        prog="muster nccl-plugin",
        description="The plug-in that encrypts NCCL's traffic between hosts, on this host. It is built by a"
        " C compiler (CC, cc or gcc) and needs the headers of OpenSSL 3.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "action",
        choices=("build", "show"),
        help="build: make it, unless it is there, and let it test itself; show: say where it is",
    )
    made.add_argument("--force", action="store_true", help="build: also where it is there")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command; the exit code is 0 if this host can encrypt, 1 if it cannot."""
    options = parser().parse_args(argv)
    try:
        if options.action == "build":
            library.build(os.environ, force=options.force)
        return show()
    except SettingsError as error:
        say(str(error))
        return 1


def show() -> int:
    """Prints path, version and self test of the plug-in.

    Raises:
        SettingsError: the plug-in is not built, or cannot be loaded.
    """
    path = library.find(os.environ)
    if path is None:
        raise SettingsError(
            "The plug-in that encrypts NCCL's traffic is not built on this host.",
            remedy="Run muster nccl-plugin build.",
        )
    plugin = library.load(path)
    wrong = plugin.self_test()
    print(f"path: {path}")
    print(f"version: {plugin.version()}")
    print(f"self test: {wrong or 'passed'}")
    return 1 if wrong else 0
