"""Checkpoints: one safetensors file each, written whole or not at all, proved sound when read.

A file holds every array of a :class:`~worker.state.TrainingState`; step, epoch, position, seed, random
generator and a digest over all of it stand in its metadata. Any safetensors reader can open it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.errors import WorkerError
from worker.state import TrainingState

_SUFFIX = ".safetensors"
_FORMAT = "1"


class CheckpointError(WorkerError):
    """A checkpoint could not be written or read."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file is cut off, altered, or not a checkpoint."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint file whose header can be read. ``saved_at`` is in seconds since 1970."""

    path: Path
    saved_at: float
    step: int


def save(
    directory: str | Path, state: TrainingState, *, keep: int = 3, clock: Callable[[], float] = time.time
) -> Path:
    """Writes the state; the file appears under its name only when it is whole and on disk.

    Call it on rank 0 alone.

    Args:
        directory: made if it is not there.
        state: what to write.
        keep: how many checkpoints to leave in the directory, the newest; 0: all.
        clock: tells the time of saving, in seconds since 1970.

    Returns:
        The file's path.

    Raises:
        CheckpointError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    folder = Path(directory)
    description, arrays = state.for_checkpoint()
    step = _step_of(description)  # the state's own attribute may be an adapter's, and late
    path = folder / f"step_{step:09d}{_SUFFIX}"
    unfinished = folder / f".{path.name}.{os.getpid()}.tmp"
    metadata = {
        "format": _FORMAT,
        "state": description,
        "step": str(step),
        "saved_at": repr(clock()),
        "digest": _digest(description, arrays),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(arrays, unfinished, metadata)
        _flush(unfinished)
        unfinished.replace(path)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {reason}.",
            remedy="Make room, or choose another directory with --checkpoint-dir.",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    for old in find(folder)[keep:] if keep else []:
        old.path.unlink(missing_ok=True)
    return path


def find(directory: str | Path) -> list[Found]:
    """Checkpoints of a directory, the last saved first; files whose header is damaged are left out."""
    found = []
    for path in _files(Path(directory)):
        with contextlib.suppress(DamagedCheckpointError):
            metadata = _metadata(path)
            found.append(Found(path, float(metadata["saved_at"]), _step_of(metadata["state"])))
    return sorted(found, key=lambda one: (one.saved_at, one.step), reverse=True)


def load(path: str | Path, state: TrainingState) -> None:
    """Reads one checkpoint into ``state``, arrays in place; a refused file changes nothing.

    Raises:
        DamagedCheckpointError: the file is damaged; names the sound one saved before it, if any.
        StateMismatchError: it is of another model or optimizer.
        CheckpointError: it is not there.
    """
    path = Path(path)
    try:
        _load(path, state)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(error.message, remedy=_offer_before(path)) from error


def load_latest(
    directory: str | Path, state: TrainingState, *, say: Callable[[str], None] = lambda sentence: None
) -> Path | None:
    """Reads the last sound checkpoint of a directory into ``state``.

    Args:
        directory: where to look.
        state: what to overwrite.
        say: gets a sentence for each damaged file that is passed over.

    Returns:
        The file that was read; None when the directory holds no checkpoint at all.

    Raises:
        DamagedCheckpointError: there are checkpoints, but none is sound.
        StateMismatchError: the last sound one is of another model or optimizer.
    """
    folder = Path(directory)
    for path in sorted(set(_files(folder)) - {one.path for one in find(folder)}):
        say(_reason_for_damage(path))
    for one in find(folder):
        try:
            _load(one.path, state)
            return one.path
        except DamagedCheckpointError as error:
            say(error.message)
    if any(_files(folder)):
        raise DamagedCheckpointError(
            f"No checkpoint in {folder} is sound.",
            remedy="Move them away to start anew, or name another directory.",
        )
    return None


class Folder:
    """Where one run keeps its checkpoints.

    Args:
        directory: "" keeps none.
        state: what is saved and resumed.
    """

    def __init__(self, directory: str, state: TrainingState) -> None:
        self._directory = directory
        self._state = state

    def save(self) -> None:
        """See :func:`save`."""
        if self._directory:
            save(self._directory, self._state)

    def resume(self, source: str, *, say: Callable[[str], None]) -> None:
        """Does what ``--resume`` asks for, and says what it read.

        Args:
            source: a file, or "latest" for the last sound one of the folder; "": nothing is read.
            say: gets the sentences.

        Raises:
            CheckpointError: see :func:`load` and :func:`load_latest`.
            StateMismatchError: the checkpoint is of another model or optimizer.
        """
        if not source:
            return
        path: Path | None = Path(source)
        if source == "latest":
            path = load_latest(self._directory, self._state, say=say)
        else:
            load(source, self._state)
        if path is None:
            say(f"no checkpoint in {self._directory!r}: starting anew")
        else:
            say(f"resumed after step {self._state.step} from {path}")


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"step_*{_SUFFIX}"))


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}.") from error
    if metadata.get("format") != _FORMAT or not {"state", "step", "saved_at", "digest"} <= metadata.keys():
        raise DamagedCheckpointError(f"{path} is not a checkpoint of this program, or its header is damaged.")
    return metadata


def _read(path: Path) -> tuple[str, dict[str, NDArray[Any]]]:
    """Description and arrays of a sound file."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint {path}.")
    metadata = _metadata(path)
    try:
        arrays: dict[str, NDArray[Any]] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}.") from error
    if _digest(metadata["state"], arrays) != metadata["digest"]:
        raise DamagedCheckpointError(f"{path} is damaged: its contents do not match its digest.")
    return metadata["state"], arrays


def _load(path: Path, state: TrainingState) -> None:
    description, arrays = _read(path)
    state.check(description, str(path))
    state.from_checkpoint(description, arrays)


def _step_of(description: str) -> int:
    """Steps finished. Files of version 0.1 may have a lower number in their names."""
    return int(json.loads(description)["step"])


def _reason_for_damage(path: Path) -> str:
    """Why the file is damaged; empty when it is sound."""
    try:
        _read(path)
    except DamagedCheckpointError as error:
        return error.message
    return ""


def _offer_before(path: Path) -> str:
    for one in find(path.parent):
        if one.path != path and not _reason_for_damage(one.path):
            return f"The last sound one beside it is of step {one.step}: resume with --resume {one.path}."
    return "There is no sound one beside it."


def _digest(description: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.blake2b(description.encode(), digest_size=32)
    for name in sorted(arrays):
        digest.update(f"\0{name}\0{arrays[name].dtype}{arrays[name].shape}\0".encode())
        digest.update(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """Makes a file's contents, or a directory's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
