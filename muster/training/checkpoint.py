"""Checkpoints: one safetensors file each, written atomically, checked when read.

A file holds every array of a ``TrainingState``. Its metadata has step, epoch, position, seed, random
generators and a digest over all of it. It also names the program, the model (a fingerprint of names, dtypes
and shapes) and the run to which the file belongs. A file is removed to make room only for a file with the
same program, model and run. Any safetensors reader can open a file.

Files are ordered by the number of the attempt, then by generation, then by step, and not by a clock. A launch
takes the folder's next number when it begins, and another one when it goes back to a checkpoint. So hosts
whose clocks differ agree on the order, and a late file of an expelled worker does not become the latest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from muster.errors import NotInitializedError, SettingsError, WorkerError
from muster.training.attempts import NO_LINKS, number_of_attempt
from muster.training.checkpoint_copy import arrays_in
from muster.training.mounted_path import mounted_path
from muster.training.paced_file import write_safetensors
from muster.training.state import TrainingState
from muster.training.writer_process import WriteOrder, WriterProcess
from muster.wire.files import beside, remove_left
from muster.worker import runtime as process

log = logging.getLogger("muster.worker")

_SUFFIX = ".safetensors"
_FORMAT = "1"


@runtime_checkable
class CheckpointSession(Protocol):
    """The part of a :class:`muster.worker.session.session.Session` that checkpoints need."""

    @property
    def launch(self) -> int:
        """A number that names this launch of the job; 0: not known."""

    @property
    def state_source_rank(self) -> int:
        """The rank with the training state; -1: none."""

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Context in which the scheduler knows that this rank works alone while the others wait for it."""

    def report_checkpoint(self, step: int, *, size_bytes: int, seconds: float) -> None:
        """Reports that a checkpoint has been written."""


class CheckpointError(WorkerError):
    """A checkpoint could not be written or read."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file is cut off, altered, or not a checkpoint."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint file whose header can be read.

    Attributes:
        path: the file's path.
        saved_at: time of saving, in seconds since 1970.
        step: number of finished steps.
        model: fingerprint of the arrays' names, dtypes and shapes.
        program: the script that saved it; "" in files of version 0.1.
        run: names the training; see :class:`~muster.training.state.TrainingState`.
        launch: names the launch that saved it.
        attempt: the attempt's number in the folder; 0 in files of version 0.2 and before.
        generation: the generation that it was saved in; 0: not in a job.
    """

    path: Path
    saved_at: float
    step: int
    model: str = ""
    program: str = ""
    run: str = ""
    launch: str = ""
    attempt: int = 0
    generation: int = 0

    @property
    def order(self) -> tuple[int, int, float, int]:
        """Sort key, greater for the later file; files from before there were attempts go by the clock."""
        return self.attempt, self.generation, 0.0 if self.attempt else self.saved_at, self.step

    @property
    def kin(self) -> tuple[str, str, str]:
        """The key by which files may replace one another: program, model and run."""
        return self.program, self.model, self.run


def save(
    directory: str | Path, state: TrainingState, *, keep: int = 3, clock: Callable[[], float] = time.time
) -> Path:
    """Writes the state; the file appears under its name only when it is complete and on disk.

    Call it on rank 0 alone.

    Args:
        directory: created if it does not exist.
        state: what to write.
        keep: how many checkpoints of this run to leave in the directory: this one and the latest before it.
            0: all. Checkpoints of other programs, models and runs stay. So do checkpoints that are later than
            this one or have a higher step.
        clock: gives the time of saving, in seconds since 1970.

    Returns:
        The file's path.

    Raises:
        CheckpointError: the file cannot be written; or a step is in progress, so half a step would be saved.
    """
    folder = mounted_path(directory)
    return _save(folder, folder, state, keep=keep, clock=clock)


def _save(
    root: Path, folder: Path, state: TrainingState, *, keep: int = 3, clock: Callable[[], float] = time.time
) -> Path:
    """See :func:`save`; ``root`` is where attempts are counted."""
    from safetensors.numpy import save_file

    _refuse_within_step(state)
    description, arrays = state.for_checkpoint()
    return _write(_naming(root, folder, state, description, keep, clock()), description, arrays, save_file)


def _refuse_within_step(state: TrainingState) -> None:
    if state.in_step:
        raise CheckpointError(
            f"The state is in the middle of a step: {state.step} are finished, and the next one has begun.",
            remedy="Save after the block of `with step`; after an error call state.roll_back() first.",
        )


@dataclass(frozen=True, slots=True)
class _Naming:
    """The path of a file that is written, and its metadata."""

    root: str
    folder: str
    unfinished: str
    keep: int
    saved_at: float
    step: int
    model: str
    program: str
    run: str
    launch: str
    attempt: str
    generation: int


def _naming(
    root: Path, folder: Path, state: TrainingState, description: str, keep: int, saved_at: float
) -> _Naming:
    step = _step_of(description)  # an adapter's own attribute may lag behind
    return _Naming(
        str(root),
        str(folder),
        str(beside(_path(folder, step))),
        keep,
        saved_at,
        step,
        _model_of(description, state.derived()),
        _program(),
        state.run,
        state.launch,
        state.attempt,
        state.generation,
    )


def write_copy(data: memoryview, what: Mapping[str, Any]) -> dict[str, Any]:
    """Writes what :meth:`Folder.save_beside` has copied; runs in the writer process.

    Args:
        data: the room's bytes.
        what: the arrays' places in the room, the description, and the file's naming.

    Returns:
        The file's size in bytes, and the seconds that writing took.

    Raises:
        CheckpointError: the file cannot be written.
    """
    begun = time.monotonic()

    def put(arrays: dict[str, NDArray[Any]], path: Path, metadata: dict[str, str]) -> None:
        write_safetensors(path, arrays, metadata, mbytes_per_s=what["mbytes_per_s"])

    path = _write(_Naming(**what["naming"]), what["description"], arrays_in(data, what["places"]), put)
    size_bytes = 0
    with contextlib.suppress(FileNotFoundError):  # a concurrent launch has removed it to make room
        size_bytes = path.stat().st_size
    return {"size_bytes": size_bytes, "seconds": time.monotonic() - begun}


def _write(
    naming: _Naming,
    description: str,
    arrays: dict[str, NDArray[Any]],
    put: Callable[[dict[str, NDArray[Any]], Path, dict[str, str]], object],
) -> Path:
    """Writes a file with ``put``, gives it its name, and removes the oldest files of the same run."""
    from safetensors import SafetensorError

    folder, unfinished = Path(naming.folder), Path(naming.unfinished)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_left(folder)
        new = Found(
            folder,
            naming.saved_at,
            naming.step,
            naming.model,
            naming.program,
            naming.run,
            naming.launch,
            _number(Path(naming.root), naming.attempt),
            naming.generation,
        )
        metadata = {
            "format": _FORMAT,
            "state": description,
            "step": str(new.step),
            "saved_at": repr(new.saved_at),
            "program": new.program,
            "model": new.model,
            "run": new.run,
            "launch": new.launch,
            "attempt": str(new.attempt),
            "generation": str(new.generation),
            "digest": digest_of(description, arrays),
        }
        put(arrays, unfinished, metadata)
        _flush(unfinished)
        path = _put(unfinished, folder, new)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"The checkpoint {_path(folder, naming.step)} could not be written: {reason}.",
            remedy="Make room, or choose another directory with --checkpoint-dir.",
        ) from None  # the message has the reason; a traceback of the serializer would hide it
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    before = [
        one
        for one in find(folder)
        if one.path.parent == folder and one.kin == new.kin and one.order < new.order and one.step <= new.step
    ]
    for old in [one for one in before if one.path != path][naming.keep - 1 :] if naming.keep else []:
        old.path.unlink(missing_ok=True)
    return path


def find(directory: str | Path) -> list[Found]:
    """Finds the checkpoints in a directory and in its directories of runs; returns the latest first.

    Files whose header is damaged are left out.
    """
    found = []
    for path in _files(mounted_path(directory)):
        with contextlib.suppress(DamagedCheckpointError):
            found.append(_found(path))
    return sorted(found, key=lambda one: one.order, reverse=True)


def load(path: str | Path, state: TrainingState) -> None:
    """Reads one checkpoint into ``state``, arrays in place; a refused file changes nothing.

    Later saves belong to a new attempt: they count as later than all existing files, whatever their step.

    Raises:
        DamagedCheckpointError: the file is damaged; the message names the latest sound one beside it, if any.
        StateMismatchError: the file is of another model or optimizer.
        CheckpointError: the file does not exist.
    """
    path = mounted_path(path)
    try:
        _load_as_new_attempt(path, state)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(error.message, remedy=_offer_before(path)) from error


def load_latest(
    directory: str | Path, state: TrainingState, *, say: Callable[[str], None] = lambda sentence: None
) -> Path | None:
    """Reads the latest sound checkpoint of a directory into ``state``; skips those of other models.

    Args:
        directory: where to look.
        state: what to overwrite.
        say: called with a sentence for each damaged file that is skipped.

    Returns:
        The file that was read; None if the directory holds no checkpoint at all.

    Raises:
        DamagedCheckpointError: there are checkpoints, but all are damaged.
        StateMismatchError: all sound ones are of another model or optimizer.
    """
    folder = mounted_path(directory)
    found = find(folder)
    for path in sorted(set(_files(folder)) - {one.path for one in found}):
        say(_reason_for_damage(path))
    model = _model_of(state.describe(), state.derived())
    for one in [each for each in found if each.model == model] or found:
        try:
            _load_as_new_attempt(one.path, state)
            return one.path
        except DamagedCheckpointError as error:
            say(error.message)
    if any(_files(folder)):
        raise DamagedCheckpointError(
            f"All checkpoints in {folder} are damaged.",
            remedy="Move them away to start over, or name another directory.",
        )
    return None


class Folder:
    """The directory in which one run keeps its checkpoints.

    A launch that starts over beside an earlier run of the same program and model saves in a subdirectory of
    its own, ``run_...``.

    Args:
        directory: its path; "": no checkpoints.
        state: the state that is saved and resumed.
        session: this worker's place in the job; None: that of ``muster.init()``, if there is one.
        mbytes_per_s: maximum rate of :meth:`save_beside`, in 10**6 bytes per second; 0: no limit.

    Raises:
        SettingsError: ``mbytes_per_s`` is below 0, or the directory is an address, such as s3://bucket/run.
    """

    def __init__(
        self,
        directory: str,
        state: TrainingState,
        session: CheckpointSession | None = None,
        *,
        mbytes_per_s: float = 0.0,
    ) -> None:
        if mbytes_per_s < 0:
            raise SettingsError(f"Folder: mbytes_per_s is {mbytes_per_s:g}, it must be >= 0.")
        self._directory = str(mounted_path(directory)) if directory else ""
        self._state = state
        self._session = session
        self._mbytes_per_s = mbytes_per_s
        self._place: Path | None = None
        self._read: Path | None = None
        self._writer: WriterProcess | None = None
        self._room_bytes = 0

    def save(self) -> None:
        """See :func:`save`; informs the scheduler, which would report a long save as a standstill."""
        if not self._directory:
            return
        self.wait()
        session = self._current()
        with self._busy("saves a checkpoint"):
            self._place = self._find_place()
            began = time.monotonic()
            path = _save(Path(self._directory), self._place, self._state)
            took_s = time.monotonic() - began
            with contextlib.suppress(FileNotFoundError):  # a concurrent launch has removed it to make room
                size_bytes = path.stat().st_size
                if session is not None:
                    session.report_checkpoint(self._state.step, size_bytes=size_bytes, seconds=took_s)

    def save_beside(self) -> None:
        """Saves like :meth:`save`, but in a process of its own, while the training goes on.

        Waits for the previous write first, and returns when the state is copied; on a GPU, when later work
        can no longer change the copy. A write that fails is logged. Planned changes of members, the end of an
        ElasticLoop (also by SIGTERM) and the end of this process wait for the write. If this process is
        killed, the file that is being written never appears.

        Raises:
            CheckpointError: a step is in progress, or there is no memory for the copy.
        """
        if not self._directory:
            return
        _refuse_within_step(self._state)
        self.wait()
        with self._busy("copies the state for a checkpoint"):
            place = self._place = self._find_place()
            if self._writer is None:
                self._writer = WriterProcess()
                self._state.writes.append(self.wait)
            try:
                copy = self._state.copy_for_checkpoint(self._writer.room)
            except OSError as error:
                raise CheckpointError(
                    f"There is not enough memory for the copy of the state by save_beside(): {error}.",
                    remedy="Call save(), which needs no copy.",
                ) from error
        if copy.size > self._room_bytes:
            self._room_bytes = copy.size
            log.info("Checkpoints beside the training take %.1f MB of this host's memory", copy.size / 1e6)
        naming = _naming(Path(self._directory), place, self._state, copy.description, 3, time.time())
        what = {
            "naming": asdict(naming),
            "description": copy.description,
            "places": copy.places,
            "mbytes_per_s": self._mbytes_per_s,
        }
        session = self._current()

        def done(found: Any) -> None:
            if session is not None and found["size_bytes"]:
                session.report_checkpoint(
                    naming.step, size_bytes=found["size_bytes"], seconds=found["seconds"]
                )

        self._writer.write(
            WriteOrder(
                f"{__name__}:{write_copy.__name__}",
                what,
                copy.size,
                Path(naming.unfinished),
                copy.ready,
                done,
            )
        )

    @property
    def is_writing(self) -> bool:
        """Whether a write of :meth:`save_beside` is still in progress."""
        return self._writer is not None and self._writer.is_writing

    def wait(self) -> None:
        """Waits for a write of :meth:`save_beside`; the scheduler knows, and reports no standstill."""
        if self._writer is not None and self.is_writing:
            with self._busy("waits for a checkpoint that is being written"):
                self._writer.wait()

    def _busy(self, what: str) -> AbstractContextManager[None]:
        session = self._current()
        return session.busy(what) if session is not None else contextlib.nullcontext()

    def _find_place(self) -> Path:
        """Returns the directory to save in; notes in the state which launch saves."""
        place = self._place or self._choose()
        if not self._state.launch and self._current() is not None:  # the script has a loop of its own
            self._state.launch = self._launch
        return place

    def resume(self, source: str, *, say: Callable[[str], None]) -> None:
        """Does what ``--resume`` asks for, and says what it read.

        Args:
            source: a file's path, or "latest" for the latest sound file of the folder. "": only a file of
                this same launch, if this worker replaces another one and no member holds the state any more.
            say: called with each sentence.

        Raises:
            CheckpointError: see :func:`load` and :func:`load_latest`.
            StateMismatchError: the checkpoint is of another model or optimizer.
        """
        self._take_number()
        if not source:
            self._begin(say)
            return
        path: Path | None = Path(source)
        if source == "latest":
            path = load_latest(self._directory, self._state, say=say)
        else:
            load(source, self._state)
        self._read = path
        if path is None:
            say(f"no checkpoint in {self._directory!r}: starting over")
        else:
            say(f"resumed after step {self._state.step} from {path}")

    def take_up(self, *, say: Callable[[str], None] = log.warning) -> None:
        """Reads the latest sound checkpoint of this launch, if it is later than the state.

        Args:
            say: called with each sentence.
        """
        state, launch = self._state, self._launch
        for one in [each for each in self._alike() if each.launch == launch] if launch else ():
            # A checkpoint of this launch is later than the one from which it resumed, even at a lower step.
            if one.path == self._read or (state.launch and one.step <= state.step):
                return
            try:
                _load(one.path, state)
            except DamagedCheckpointError as error:
                say(error.message)
                continue
            self._read = one.path
            say(f"no member holds the state: resumed after step {one.step} from {one.path}")
            return

    def _take_number(self) -> None:
        """Takes the launch's number at its start, so that late saves of an earlier launch stay earlier.

        If this worker cannot write to the folder, another worker takes the number: at the latest, the one
        that saves.
        """
        if self._directory and self._launch and not self._state.launch:
            with contextlib.suppress(OSError):
                _number(Path(self._directory), f"{self._launch}.0")

    def _begin(self, say: Callable[[str], None]) -> None:
        session = self._current()
        if session is None or session.state_source_rank >= 0:
            return
        self.take_up(say=say)
        place, earlier = self._choose(), self._alike()
        if place != Path(self._directory):
            step = earlier[0].step
            say(f"{self._directory} holds an earlier run up to step {step}, which --resume goes on with.")
            say(f"This run starts over and saves in {place}.")

    def _choose(self) -> Path:
        """Returns the directory in which this run has saved before; else the folder, or a subdirectory."""
        root, launch, run = Path(self._directory), self._launch, self._state.run
        found = self._alike()
        for one in found:
            if (launch and one.launch == launch) or (run and one.run == run):
                return one.path.parent
        beside = launch and any(one.path.parent == root for one in found)
        return root / f"run_{launch[:8]}" if beside else root

    def _alike(self) -> list[Found]:
        """Finds the checkpoints of this program and model, or of this model by version 0.1; latest first."""
        if not self._directory:
            return []
        model = _model_of(self._state.describe(), self._state.derived())
        return [
            one for one in find(self._directory) if one.model == model and one.program in ("", _program())
        ]

    @property
    def _launch(self) -> str:
        session = self._current()
        return f"{session.launch:016x}" if session is not None and session.launch else ""

    def _current(self) -> CheckpointSession | None:
        if self._session is None:
            with contextlib.suppress(NotInitializedError):
                self._session = process.current()
        return self._session


def _program() -> str:
    """The script's name, which keeps runs of different programs in one directory apart."""
    path = Path(sys.argv[0])
    return path.parent.name if path.name == "__main__.py" else path.stem or "python"


def _model_of(description: str, derived: set[str]) -> str:
    """The model's fingerprint, of the names, dtypes and shapes of its arrays."""
    arrays = json.loads(description)["arrays"]
    text = json.dumps({name: arrays[name] for name in sorted(arrays) if name not in derived})
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _number(root: Path, attempt: str) -> int:
    return number_of_attempt(root, attempt, (one.attempt for one in find(root)))


def _path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:09d}{_SUFFIX}"


def _put(unfinished: Path, folder: Path, new: Found) -> Path:
    """Gives a file its name; never replaces, unseen, a file that another host names at the same moment."""
    while True:
        path = _free_path(folder, new)
        if os.path.lexists(path):
            unfinished.replace(path)
            return path
        try:
            os.link(unfinished, path)
        except FileExistsError:
            continue
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            unfinished.replace(path)
        return path


def _free_path(folder: Path, new: Found) -> Path:
    """Returns the path for a new file.

    It may be the path of an existing file only if that is of the same run and step, and not later.
    """
    path = _path(folder, new.step)
    with contextlib.suppress(DamagedCheckpointError):
        if path.exists():
            there = _found(path)
            if (there.kin, there.step) != (new.kin, new.step):
                return _named_apart(path, *new.kin)
            if there.order > new.order:
                return _named_apart(path, *new.kin, str(new.attempt), str(new.generation))
    return path


def _named_apart(path: Path, *parts: str) -> Path:
    return path.with_stem(
        f"{path.stem}_{hashlib.blake2b(' '.join(parts).encode(), digest_size=4).hexdigest()}"
    )


def _files(folder: Path) -> list[Path]:
    named = [*folder.glob(f"step_*{_SUFFIX}"), *folder.glob(f"run_*/step_*{_SUFFIX}")]
    return sorted(path for path in named if path.is_file())  # opening a FIFO would wait for ever


def _found(path: Path) -> Found:
    metadata = _metadata(path)
    description = metadata["state"]
    try:
        saved_at = float(metadata["saved_at"])
        if not math.isfinite(saved_at):
            raise ValueError("the time of saving is no time")
        return Found(
            path,
            saved_at,
            _step_of(description),
            metadata.get("model") or _model_of(description, set()),
            program=metadata.get("program", ""),
            run=metadata.get("run", ""),
            launch=metadata.get("launch", ""),
            attempt=_count(metadata.get("attempt", "0")),
            generation=_count(metadata.get("generation", "0")),
        )
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: its header makes no sense.") from error


def _count(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 63:
        raise ValueError("the number of an attempt or a generation is none")
    return number


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
    """Reads the description and the arrays of a sound file."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint {path}.")
    metadata = _metadata(path)
    try:
        arrays: dict[str, NDArray[Any]] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}.") from error
    if digest_of(metadata["state"], arrays) != metadata["digest"]:
        raise DamagedCheckpointError(f"{path} is damaged: its contents do not match its digest.")
    return metadata["state"], arrays


def _load(path: Path, state: TrainingState) -> None:
    description, arrays = _read(path)
    state.check(description, str(path))
    state.from_checkpoint(description, arrays)


def _load_as_new_attempt(path: Path, state: TrainingState) -> None:
    """Reads one checkpoint; later saves belong to a new attempt."""
    returns = state.returns
    _load(path, state)
    state.returns = returns
    state.begin_attempt()


def _step_of(description: str) -> int:
    """Returns the number of finished steps. Files of version 0.1 may have a lower number in their names."""
    return int(json.loads(description)["step"])


def _reason_for_damage(path: Path) -> str:
    """Returns why the file is damaged; empty if it is sound."""
    try:
        _read(path)
    except DamagedCheckpointError as error:
        return error.message
    return ""


def _offer_before(path: Path) -> str:
    for one in find(path.parent):
        if one.path != path and one.path.parent == path.parent and not _reason_for_damage(one.path):
            return f"The last sound one beside it is of step {one.step}: resume with --resume {one.path}."
    return "There is no sound one beside it."


def digest_of(description: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    """The digest of a description and its arrays, for a checkpoint's metadata."""
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
