"""How the documentation site is built: ``make docs``."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from sphinx.util.nodes import make_refnode  # noqa: E402

from muster.version import __version__  # noqa: E402

project = "Muster"
author = "the Muster developers"
copyright = "the Muster developers"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sequence_diagrams"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(torch|numpy|pathlib|collections)\..*")]  # no inventories from elsewhere

autodoc_mock_imports = [] if find_spec("torch") else ["torch"]
autodoc_typehints = "none"  # the signatures of the stubs are long; docstrings give shapes and types
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"Muster {release}"
html_static_path = ["_static"]
html_css_files = ["width.css"]
html_theme_options = {
    "light_css_variables": {  # no fonts from elsewhere
        "font-stack": "system-ui, sans-serif",
        "font-stack--monospace": "ui-monospace, monospace",
    },
}
templates_path: list[str] = []
exclude_patterns = ["_build"]

# Pages that are files of the repository's top, and what their links are called here.
_FROM_THE_TOP = {
    "architecture": "ARCHITECTURE.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "security": "SECURITY.md",
    "deploying": "deploy/README.md",
}


# Made by others than the user: `muster.init` makes a session, `muster.capture_step` a step. What their
# constructors take is no part of the API.
_NOT_CALLED = {
    "muster.Session",
    "muster.Step",
    "muster.TrainingStep",
    "muster.torch.InPlaceStep",
    "muster.torch.Generation",
    "muster.ParallelModule",
    "muster.ParallelMode",
    "muster.Pending",
}


def _hide_constructor(app: Any, what: str, name: str, *_: Any) -> tuple[str, str] | None:
    return ("", "") if what == "exception" or name in _NOT_CALLED else None


def _read_from_the_top(app: Any, name: str, source: list[str]) -> None:
    """Puts the file of the top in place of its stub."""
    if name not in _FROM_THE_TOP:
        return
    path = ROOT / _FROM_THE_TOP[name]
    names = {file: f"{page}.md" for page, file in _FROM_THE_TOP.items()} | {"README.md": "index.md"}

    def link(found: re.Match[str]) -> str:
        target = os.path.relpath((path.parent / found[1]).resolve(), ROOT)
        return f"]({names.get(target) or os.path.relpath(ROOT / target, ROOT / 'docs')}{found[2] or ''})"

    source[0] = re.sub(r"\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)", link, path.read_text())


def _find_by_last_name(app: Any, env: Any, node: Any, text: Any) -> Any:
    """Resolves what docstrings call by its last name alone, if one object only is called so."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].rpartition(".")[2]
    objects = env.get_domain("py").objects
    found = [full for full in objects if full.rpartition(".")[2] == name]
    if len(found) != 1:
        return None
    there = objects[found[0]]
    return make_refnode(app.builder, node["refdoc"], there.docname, there.node_id, text, found[0])


def setup(app: Any) -> None:
    """Connects what this site needs with Sphinx."""
    app.connect("autodoc-process-signature", _hide_constructor)
    app.connect("source-read", _read_from_the_top)
    app.connect("missing-reference", _find_by_last_name)
