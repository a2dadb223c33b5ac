"""A worker process that carries out its stdin, one line of Python at a time, and answers.

It answers ``ok VALUE`` or ``error TYPE SENTENCE``. The first answer is that of ``muster.init()``.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import muster


def answer(word: str, *rest: object) -> None:
    print(word, *(str(each).replace("\n", " ") for each in rest), flush=True)


def attempt(code: str, scope: dict[str, Any]) -> None:
    try:
        answer("ok", eval(code, scope))
    except muster.WorkerError as error:
        answer("error", type(error).__name__, error)


def main() -> None:
    scope: dict[str, Any] = {"worker": muster, "np": np}
    try:
        scope["s"] = muster.init()
    except muster.WorkerError as error:
        answer("error", type(error).__name__, error)
        sys.exit(error.exit_code)
    answer("ok", scope["s"].rank)
    for line in sys.stdin:
        if line.startswith("raise "):
            raise ValueError(line[6:].strip())
        attempt(line, scope)


if __name__ == "__main__":
    main()
