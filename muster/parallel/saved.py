"""Reads the JSON files that users hand to the parallel modes: saved plans and measured machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from muster.errors import SettingsError
from muster.parallel.planning.plan_file import check_saved
from muster.wire.files import read_regular

MAX_BYTES = 64 * 1024 * 1024
"""Of a file: the plan of a model with 10,000 nodes has some 2 MB."""


def read_json(path: str | Path, what: str) -> Any:
    """Reads a JSON file; only a regular file, as a FIFO or a device might block.

    Args:
        path: the file.
        what: a name for the file in errors, such as "the plan".

    Raises:
        SettingsError: the file cannot be read, is larger than 64 MiB, or is not JSON.
    """
    try:
        return json.loads(read_regular(path, MAX_BYTES))
    except OSError as error:
        raise SettingsError(f"{what} {path} cannot be read: {error.strerror}") from error
    except RecursionError:
        raise SettingsError(f"{what} {path} cannot be read: it is nested too deep") from None
    except ValueError as error:
        raise SettingsError(f"{what} {path} cannot be read: it is not JSON: {error}") from error


def read_plan(path: str | Path) -> dict[str, Any]:
    """Reads a plan that :meth:`~muster.parallel.planning.plan.Plan.save` wrote.

    Raises:
        SettingsError: the file cannot be read, or is not a plan in this format.
    """
    return check_saved(read_json(path, "the plan"), path)
