"""What ``kubectl apply -k`` would apply, for a machine without kubectl: resources, and merge patches.

Only what deploy/kubernetes uses is understood; anything else is an error. test_kubernetes.py compares the
results with kubectl's own where there is one.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
# Lists whose items are merged by a key; all others are replaced.
_KEYS = {"containers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath"}


def documents(path: Path) -> list[Object]:
    """The objects of one file."""
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def build(folder: Path) -> list[Object]:
    """The objects that a kustomization stands for.

    Raises:
        NotImplementedError: it has fields that this helper does not know.
    """
    [kustomization] = documents(folder / "kustomization.yaml")
    if unknown := set(kustomization) - {"apiVersion", "kind", "resources", "patches"}:
        raise NotImplementedError(f"{folder}/kustomization.yaml: {sorted(unknown)}")
    objects: list[Object] = []
    for name in kustomization["resources"]:
        path = folder / name
        objects += build(path) if path.is_dir() else documents(path)
    for patch in kustomization.get("patches", []):
        if set(patch) != {"patch"}:
            raise NotImplementedError(f"{folder}/kustomization.yaml: {sorted(patch)}")
        _apply(objects, yaml.safe_load(patch["patch"]))
    return objects


def identity(one: Object) -> tuple[str, ...]:
    """What tells an object from all others."""
    metadata = one["metadata"]
    return (one["apiVersion"], one["kind"], metadata.get("namespace", ""), metadata["name"])


def _apply(objects: list[Object], patch: Object) -> None:
    [place] = [number for number, one in enumerate(objects) if identity(one) == identity(patch)]
    if patch.get("$patch") == "delete":
        del objects[place]
    else:
        objects[place] = _merged(objects[place], patch)


def _merged(old: Any, new: Any, key: str = "") -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: _merged(old.get(name), value, name) for name, value in new.items()}
    if isinstance(old, list) and isinstance(new, list) and key in _KEYS:
        found = {one[_KEYS[key]]: one for one in old}
        for one in new:
            found[one[_KEYS[key]]] = _merged(found.get(one[_KEYS[key]]), one)
        return list(found.values())
    return copy.deepcopy(new)
