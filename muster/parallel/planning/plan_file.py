"""Checks a saved plan: its format, and that it belongs to a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.errors import SettingsError
from muster.parallel.planning.graph import Graph

FORMAT = 1


def check_saved(saved: Any, path: str | Path) -> dict[str, Any]:
    """Checks that a plan's file has the parts that :meth:`Plan.save` writes; returns its content.

    Args:
        saved: the file's JSON.
        path: the file, for the error.

    Raises:
        SettingsError: the file is not a plan, has another format, or is damaged; names the first wrong part.
    """
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise SettingsError(f"{path} is no plan of format {FORMAT}")
    for key, (kind, inside) in _SAVED.items():
        value = saved.get(key)
        members = value.values() if isinstance(value, dict) else value or ()
        if not isinstance(value, kind) or not all(type(each) is inside for each in members):
            raise SettingsError(
                f"the plan {path} is damaged: it has no {key}, or something else in its place"
            )
    if not all(size > 0 for size in saved["mesh"]):
        raise SettingsError(f"the plan {path} is damaged: its mesh is {saved['mesh']}")
    return saved


_SAVED: dict[str, tuple[type, type]] = {
    "mesh": (list, int),
    "model": (list, str),
    "states": (dict, str),
    "strategies": (dict, str),
    **dict.fromkeys(("fingerprint", "mode", "batch_norm"), (str, str)),
}
"""Each part of a saved plan: its type, and the type of its members."""


def check_model(saved: Mapping[str, Any], graph: Graph, path: str | Path) -> None:
    """Checks that a saved plan belongs to this model.

    Raises:
        SettingsError: the plan is of another model; names the first difference.
    """
    theirs, ours = list(saved["model"]), graph.signature()
    for number, (a, b) in enumerate(zip(theirs, ours, strict=False)):
        if a != b:
            raise SettingsError(
                f"the plan {path} is of another model: its node {number} is {a!r}, and the model's is {b!r}"
            )
    if len(theirs) != len(ours):
        longer = theirs if len(theirs) > len(ours) else ours
        whose = "the plan's" if longer is theirs else "the model's"
        raise SettingsError(
            f"the plan {path} is of another model: {whose} node {min(len(theirs), len(ours))} is"
            f" {longer[min(len(theirs), len(ours))]!r}, and the other has none"
        )
    if saved["fingerprint"] != graph.fingerprint():
        raise SettingsError(
            f"the plan {path} is of another model: operators are the same, with other arguments"
        )
