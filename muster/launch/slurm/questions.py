"""Runs Slurm's programs and returns their output."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

QUESTION_S = 30.0


def ask(env: Mapping[str, str], program: str, *arguments: str) -> str | None:
    """Returns the output of a program of Slurm; None if it fails."""
    done = run(env, program, *arguments)
    return done.stdout if done is not None and done.returncode == 0 else None


def run(env: Mapping[str, str], program: str, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    """Runs a program of Slurm; None if it is missing or does not end in time."""
    if shutil.which(program, path=env.get("PATH")) is None:
        return None
    command = [program, *arguments]
    try:
        return subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=QUESTION_S
        )
    except subprocess.TimeoutExpired:
        return None
