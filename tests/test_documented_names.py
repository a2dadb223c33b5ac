"""The API's page has every public name, by the name that users import, and no other."""

from __future__ import annotations

import ast
import re

import muster
from tests.scheduler.processes import ROOT

DIRECTIVE = re.compile(
    r"^\.\. auto(?:function|class|exception|module):: (\S+)(?:\n   :members: (.*))?", re.MULTILINE
)
PAGE = (ROOT / "docs" / "api.md").read_text()
BESIDE = {
    "muster.torch.huggingface.train",
    "muster.torch.lightning.fit",
    "muster.torch.resumed_training.resumed",
    "muster.training.checkpoint.Folder",
    "muster.training.checkpoint.load",
    "muster.training.checkpoint.load_latest",
    "muster.training.checkpoint.save",
}
"""What users import from modules of its own."""


def offered_by_torch() -> set[str]:
    """The names of ``muster.torch``, which only torch could import."""
    tree = ast.parse((ROOT / "muster" / "torch" / "__init__.py").read_text())
    return {
        each.asname
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if each.asname
    }


def test_each_public_name_is_documented_once_and_nothing_else() -> None:
    documented = [name for name, _ in DIRECTIVE.findall(PAGE)]
    in_both = {name for name in offered_by_torch() if name in muster.__all__}
    public = {f"muster.{name}" for name in muster.__all__}
    public |= {f"muster.torch.{name}" for name in offered_by_torch() - in_both}
    assert sorted(documented) == sorted(public | BESIDE)


def test_no_private_member_is_documented() -> None:
    members = [each for _, words in DIRECTIVE.findall(PAGE) for each in words.split(", ")]
    assert [each for each in members if each.startswith("_") and each != "__call__"] == []
    assert len(members) > 50
