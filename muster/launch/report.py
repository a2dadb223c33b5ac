"""Decides which process of a launch failed first, and describes how each ended."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.wire.messages import FirstLoss

# ---------------------------------------------------------------- who was first


@dataclass(frozen=True, slots=True)
class LastWords:
    """The notes of a worker for its launcher (:mod:`muster.worker.ending`).

    Attributes:
        places: node ids and incarnations with which it joined; empty: it has not tried to join.
        error: a line on what ended it; empty: it did not say, for example because it was killed.
        consequence: whether other processes caused this error.
        left: whether it left the job as it was asked to.
        first: the worker that the scheduler saw go first; None once the others have gone on without it.
        lost: node ids and incarnations of all workers that the scheduler ever saw go first.
        group: the established group, as :meth:`describe_group` takes it; empty: none yet.
        waits: a sentence on the workers for which the job waits; empty: it does not wait.
        phase: the state of its membership in which it waits, as :attr:`Membership.phase` names it.
        goes_on: the reason why it need not wait any more; empty: a new group was established.
        encrypts_gloo: whether its program gets Muster's encrypted backend when it asks for Gloo.
    """

    places: frozenset[tuple[str, int]] = frozenset()
    error: str = ""
    consequence: bool = False
    left: bool = False
    first: FirstLoss | None = None
    lost: frozenset[tuple[str, int]] = frozenset()
    group: Mapping[str, Any] = field(default_factory=dict)
    waits: str = ""
    phase: str = ""
    goes_on: str = ""
    encrypts_gloo: bool = False

    @property
    def failed(self) -> bool:
        """Whether it recorded a failure of its own: not a leave, and not caused by others."""
        return bool(self.error) and not self.consequence and not self.left


def read_words(text: str) -> LastWords:
    """Reads the notes of a worker, one JSON object per line; skips other and truncated lines."""
    places: set[tuple[str, int]] = set()
    lost: set[tuple[str, int]] = set()
    said: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            facts = json.loads(line)
            if "node_id" in facts:
                places.add((str(facts["node_id"]), int(facts["incarnation"])))
            first = facts.get("first", said.get("first"))
            if first is not None and not isinstance(first, FirstLoss):
                first = FirstLoss(**first)
                lost.add((first.node_id, first.incarnation))
            said |= {**facts, "first": first}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return LastWords(
        frozenset(places),
        str(said.get("error", "")),
        bool(said.get("consequence")),
        bool(said.get("left")),
        said.get("first"),
        frozenset(lost),
        said["group"] if isinstance(said.get("group"), dict) else {},
        str(said.get("waits", "")),
        str(said.get("phase", "")),
        str(said.get("goes_on", "")),
        bool(said.get("encrypts_gloo")),
    )


@dataclass(frozen=True, slots=True)
class Ending:
    """The facts about one worker process that the launcher has started.

    Attributes:
        code: its exit code, negative for a signal; None: it is running.
        order: its number in the order in which workers were seen to end.
        stopped: whether the launcher had asked it to end.
    """

    code: int | None = None
    order: int = 0
    stopped: bool = False
    words: LastWords = field(default_factory=LastWords)

    @property
    def failed(self) -> bool:
        """Whether it has failed by itself."""
        return self.code not in (None, 0) and not self.stopped and not self.words.left


@dataclass(frozen=True, slots=True)
class Verdict:
    """The process that failed first, and how.

    Attributes:
        index: the index of the launcher's own worker; None: it runs elsewhere, or nobody has failed.
        elsewhere: the name of a process that another launcher, or another host, has started.
        sure: whether the verdict is final.
    """

    index: int | None = None
    elsewhere: FirstLoss | None = None
    sure: bool = False


def first_failure(endings: Sequence[Ending], replaced: Collection[tuple[str, int]] = frozenset()) -> Verdict:
    """Decides which failure is the cause of the others.

    The scheduler's report takes precedence, because the scheduler saw the order in which all left, on all
    hosts. Without a report, a worker that failed by itself comes before one that failed because of others.
    Among equals, the worker that was seen to end first comes first. A worker that has not tried to join has
    failed by itself.

    Args:
        endings: the endings of the launcher's workers.
        replaced: places of workers that the launcher has restarted, so that their failure ended nothing.
    """
    named = Counter(ending.words.first for ending in endings if ending.words.first is not None)
    for first, _ in named.most_common():
        place = (first.node_id, first.incarnation)
        if place in replaced:
            continue
        owner = next((i for i, ending in enumerate(endings) if place in ending.words.places), None)
        if owner is None:
            return Verdict(elsewhere=first, sure=True)
        ending = endings[owner]
        if not ending.stopped or ending.words.failed:
            return Verdict(owner, sure=ending.code is not None)
    failed = [(i, ending) for i, ending in enumerate(endings) if ending.failed]
    if not failed:
        return Verdict()
    index, ending = min(failed, key=lambda item: (item[1].words.consequence, item[1].order))
    words = ending.words
    return Verdict(index, sure=not words.places or words.failed)


def describe_other(ending: Ending, signal_names: Mapping[int, str]) -> str:
    """Returns a line on the end of a worker that was not the first to fail."""
    words, code = ending.words, ending.code or 0
    if words.left:
        return "left as it was asked to"
    if not code:
        return "ended well"
    how = describe_exit(code, signal_names)
    if words.consequence:
        return f"{how} because of that: {words.error}"
    if ending.stopped:
        return f"{how}, asked to end by this launcher"
    return f"{how}: {words.error}" if words.error else how


def exit_status(code: int) -> int:
    """Returns the shell's exit code for a process: 128 + signal if a signal ended it."""
    return code if code >= 0 else 128 - code


def describe_exit(code: int, signal_names: Mapping[int, str]) -> str:
    """Returns how a process ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    return f"was ended by {signal_names.get(-code, f'signal {-code}')}"


# ---------------------------------------------------------------- who the job waits for

AGAIN_S, AGAIN_AT_MOST_S = 60.0, 900.0
"""Seconds until a continued wait is shown again: the first number, doubled up to the second."""


class Waits:
    """Decides when to show what the job waits for: soon after a wait begins, then at growing intervals.

    The sentence about one wait may change every few seconds; the newest is shown when the next is due. A wait
    in another phase of the membership counts as another one.
    """

    def __init__(self) -> None:
        self._newest, self._shown, self._phase = "", "", ""
        self._due_s: float | None = None
        self._pause_s = AGAIN_S

    def hear(self, sentence: str, phase: str, now: float, *, after_s: float) -> bool:
        """Stores the newest sentence; empty: the job does not wait.

        Args:
            sentence: names the workers for which the job waits.
            phase: the state of the membership.
            now: seconds of a monotonic clock.
            after_s: the seconds after which a wait is shown.

        Returns:
            Whether a wait that was shown is over.
        """
        if sentence == self._newest and phase == self._phase:
            return False
        over = bool(self._shown) and not sentence
        if not sentence or phase != self._phase or not self._newest:
            self._shown, self._pause_s = "", AGAIN_S
            self._due_s = now + after_s if sentence else None
        self._newest, self._phase = sentence, phase
        return over

    @property
    def due_s(self) -> float | None:
        """Returns when there may be something to show; None: never."""
        return self._due_s if self._newest != self._shown else None

    def take(self, now: float) -> str:
        """Returns the sentence that is due, once; empty: none is due."""
        if self.due_s is None or now < self.due_s:
            return ""
        self._shown = self._newest
        self._due_s = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, AGAIN_AT_MOST_S)
        return self._newest


SUSPENDED = "suspended"
_TRAINS = ("running", "building", "changing")


def advice_on_wait(
    phase: str, *, min_workers: int, max_restarts: int, workers: int, spares: int = 0, replacement: str = ""
) -> str:
    """Returns advice on a wait: what ends it, and which option of ``muster run`` would have avoided it.

    Empty if there is no advice.

    Args:
        phase: the state of the membership.
        min_workers: as the options say; 0: all workers are needed.
        max_restarts: as the options say.
        workers: number of workers of the job.
        spares: number of spare workers, as the options say.
        replacement: the command line that starts a replacement for a worker that has ended.
    """
    if phase in _TRAINS and workers > 1 and not min_workers and not spares:
        return (
            f"(muster run --min-workers {workers - 1} lets the others go on without it, "
            "--spares 1 with another in its place.)"
        )
    if phase != SUSPENDED:
        return ""
    said = []
    if not max_restarts and not min_workers:
        said.append(
            "The job waits for a replacement: --max-restarts N restarts workers that fail, "
            "--min-workers N goes on with fewer, --spares N keeps others ready."
        )
    if replacement:
        said.append(f"To start one now: {replacement}")
    return " ".join(said)


# ---------------------------------------------------------------- the group


def describe_group(group: Mapping[str, Any], *, encrypts_gloo: bool = False) -> tuple[str, bool]:
    """Describes an established group in a line, with whether its traffic is encrypted.

    Args:
        group: ``generation``, ``workers``, ``hosts``, ``devices``, ``backend``, ``tls``, ``nccl_sealed``,
            ``nccl_plain_ways``, and ``reason`` of the generation, as the worker has noted them.
        encrypts_gloo: as in :class:`LastWords`.
    """
    backend, tls = str(group.get("backend", "")), bool(group.get("tls"))
    sealed = tls and bool(group.get("nccl_sealed"))
    by_gloo = tls and encrypts_gloo and backend == "torch"
    encrypted = tls and (backend == "tcp" or (by_gloo and (sealed or group.get("devices") == "CPU")))
    encrypted = encrypted or (sealed and backend == "nccl")
    if sealed and by_gloo:
        words = "scheduler, gloo and nccl between hosts encrypted"
    elif sealed:
        words = "scheduler and nccl between hosts encrypted" + (
            "" if encrypted else ", gloo's own traffic NOT"
        )
    elif by_gloo:
        words = "scheduler and gloo encrypted" + ("" if encrypted else ", nccl's own traffic NOT")
    elif encrypted:
        words = "encrypted"
    elif tls:
        words = f"scheduler encrypted, {backend}'s own traffic NOT"
    else:
        words = "NOT encrypted: no certificates (--config)"
    if sealed and (ways := str(group.get("nccl_plain_ways") or "")):
        words, encrypted = f"{words}, {ways} NOT", False
    number = _whole(group.get("generation"))
    text = (
        f"{_count(_whole(group.get('workers')), 'worker')} on {_count(_whole(group.get('hosts')), 'host')}, "
        f"{group.get('devices', '')}, {backend}, {words}"
    )
    return (text if number <= 1 else f"generation {number}: {text} ({group.get('reason', '')})"), encrypted


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def describe_progress(text: bytes) -> tuple[int, int, str] | None:
    """Reads a worker's progress from its note.

    Returns:
        The steps done, the total number of steps (0: unknown), and speed and loss as text. None: the note has
        no progress.
    """
    try:
        facts = json.loads(text)
        step, total = int(facts["step"]), int(facts.get("steps") or 0)
        speed, loss = facts.get("samples_per_s"), facts.get("loss")
        words = [f"{float(speed):,.0f} samples/s each"] if speed else []
        if loss is not None:
            words.append(f"loss {float(loss):.4g}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return step, total, "  ".join(words)


def duration(seconds: float) -> str:
    """Formats a duration as minutes and seconds, with hours if there are any: ``0:07``, ``1:02:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


COPY_FIGURES = ("step", "at", "bytes", "seconds", "partner")
"""Notes on the last snapshot in peers' memory; all but the partner also on the last checkpoint."""


def figures_of(text: bytes) -> dict[str, int | float | dict[str, int | float]]:
    """Converts a worker's note of its progress to numbers; leaves out what is not a number."""
    names = ("step", "steps", "epoch", "epochs", "samples_per_s", "loss", "learning_rate")
    copies = {"snapshot": COPY_FIGURES, "checkpoint": COPY_FIGURES[:-1]}
    try:
        facts = json.loads(text)
        listed = {
            f"{copy}_{name}": value
            for copy, figures in copies.items()
            for name, value in zip(figures, facts.get(copy, ()), strict=False)
        }
        found = {**{name: facts.get(name) for name in names}, **listed}
        figures: dict[str, int | float | dict[str, int | float]] = {
            name: value for name, value in found.items() if isinstance(value, int | float)
        }
        own = {name: each for name, each in facts.get("numbers", {}).items() if isinstance(each, int | float)}
        return {**figures, "numbers": own} if own else figures
    except (ValueError, AttributeError, TypeError):
        return {}
