"""Runs Slurm's programs, and gives what they answer."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

QUESTION_S = 30.0


def ask(env: Mapping[str, str], program: str, *arguments: str) -> str | None:
    """What a program of Slurm's answers; None where it fails."""
    done = run(env, program, *arguments)
    return done.stdout if done is not None and done.returncode == 0 else None


def run(env: Mapping[str, str], program: str, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    """Runs a program of Slurm's; None where it is not there or does not end."""
    if shutil.which(program, path=env.get("PATH")) is None:
        return None
    command = [program, *arguments]
    try:
        return subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=QUESTION_S
        )
    except subprocess.TimeoutExpired:
        return None
