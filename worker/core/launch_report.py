"""What the launcher writes about processes: the head of a log, how one ended, whose lines are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worker.errors import SettingsError

_SHOWN_PREFIXES = (
    *("MS_", "CUDA", "NVIDIA_", "NCCL_", "GLOO_", "GRPC_", "OMP_", "OPENBLAS_", "MKL_"),
    *("SLURM_", "OMPI_COMM_", "PMI_", "PYTHON", "LD_LIBRARY", "VIRTUAL_ENV"),
)
_SHOWN_NAMES = ("DEVICE_ID", "RANK_TABLE_FILE", "DATA_PATH", "PATH", "LANG", "LC_ALL", "JOB_COMPLETION_INDEX")
_SECRET_WORDS = ("PASS", "PWD", "SECRET", "TOKEN", "KEY", "CRED", "JWT", "AUTH")


def environment_dump(env: Mapping[str, str]) -> list[str]:
    """The variables that matter for a run, sorted, one a line; secrets only as ``(set)``."""
    lines = []
    for name, value in sorted(env.items()):
        if name not in _SHOWN_NAMES and not name.startswith(_SHOWN_PREFIXES):
            continue
        secret = any(word in name.upper() for word in _SECRET_WORDS)
        lines.append(f"{name}={'(set)' if secret else value}")
    return lines


def parse_tail(text: str, labels: Sequence[str]) -> frozenset[str]:
    """Reads ``--tail``: ``all``, ``none`` or a comma-separated list of labels and numbers.

    A rank that runs on another host is no mistake; a word that is no label is.
    """
    if text in ("all", "none"):
        return frozenset(labels) if text == "all" else frozenset()
    wanted = [item.strip() for item in text.split(",")]
    for item in wanted:
        if not item.isdigit() and item not in labels:
            raise SettingsError(f"--tail is {text!r}; it must be all, none, scheduler or ranks such as 0,3.")
    return frozenset(wanted)


def exit_status(code: int) -> int:
    """The shell's number for a process's end: 128 + signal where a signal ended it."""
    return code if code >= 0 else 128 - code


def describe_exit(code: int, signal_names: Mapping[int, str]) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    return f"was ended by {signal_names.get(-code, f'signal {-code}')}"
