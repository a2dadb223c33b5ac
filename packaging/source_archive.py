"""How the source archive is made: it holds what git holds, muster/'s links to the packages as links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from setuptools.command.sdist import sdist


class SourceArchive(sdist):
    """Without this, setuptools follows the links, and each package is in the archive twice."""

    def make_release_tree(self, base_dir: str, files: Sequence[str]) -> None:
        """Fills the archive's folder."""
        links = [path for path in Path("muster").iterdir() if path.is_symlink()]
        own = [name for name in files if not any(Path(name).is_relative_to(link) for link in links)]
        super().make_release_tree(base_dir, own)
        for link in links:
            Path(base_dir, link).symlink_to(link.readlink())
