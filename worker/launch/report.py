"""What the launcher writes of processes: a log's head, how one ended, who failed first, whose lines show."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.worker.errors import SettingsError

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


# ---------------------------------------------------------------- who was first


@dataclass(frozen=True, slots=True)
class FirstLoss:
    """Whom the scheduler saw go first, and not because of others. ``exit_code`` 0: not known."""

    node_id: str
    incarnation: int
    sentence: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class LastWords:
    """What a worker has let its launcher know (:mod:`muster.worker.launch.last_words`).

    Attributes:
        places: node ids and incarnations under which it joined; empty: it has not tried to.
        error: what ended it, in a line; empty: it did not say, as one that is killed cannot.
        consequence: that came from what other processes did.
        left: it left the job as it was asked to.
        first: whom the scheduler saw go first.
    """

    places: frozenset[tuple[str, int]] = frozenset()
    error: str = ""
    consequence: bool = False
    left: bool = False
    first: FirstLoss | None = None


def read_words(text: str) -> LastWords:
    """Reads what a worker has noted, a JSON object a line; what is none, or is cut off, is passed over."""
    places: set[tuple[str, int]] = set()
    said: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            facts = json.loads(line)
            if "node_id" in facts:
                places.add((str(facts["node_id"]), int(facts["incarnation"])))
            first = facts.get("first", said.get("first"))
            if first is not None and not isinstance(first, FirstLoss):
                first = FirstLoss(**first)
            said |= {**facts, "first": first}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return LastWords(
        frozenset(places),
        str(said.get("error", "")),
        bool(said.get("consequence")),
        bool(said.get("left")),
        said.get("first"),
    )


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known of one worker process that the launcher has started.

    Attributes:
        code: its exit code, negative for a signal; None: it lives.
        order: in which it was seen to end, among the others.
        stopped: the launcher had asked it to end before it did.
    """

    code: int | None = None
    order: int = 0
    stopped: bool = False
    words: LastWords = field(default_factory=LastWords)

    @property
    def failed(self) -> bool:
        """Whether it has ended by itself, and not well."""
        return self.code not in (None, 0) and not self.stopped and not self.words.left


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who was the first to fail.

    Attributes:
        index: of the launcher's own worker; None: it runs elsewhere, or nobody has failed.
        elsewhere: whom another launcher, or host, has started.
        sure: nothing is to come that could say otherwise.
    """

    index: int | None = None
    elsewhere: FirstLoss | None = None
    sure: bool = False


def first_failure(endings: Sequence[Ending], replaced: Collection[tuple[str, int]] = frozenset()) -> Verdict:
    """Decides which failure is the cause of the others.

    The scheduler's word goes first, since it saw who left before whom on all hosts. Without it, a worker that
    failed by itself comes before one that failed because of others, and then the order counts in which they
    were seen to end. Whoever never asked for a place was in nobody's way: its own failure is sure.

    Args:
        endings: of the launcher's workers.
        replaced: places of workers that it has started again: the launch has outlived their failure.
    """
    named = Counter(ending.words.first for ending in endings if ending.words.first is not None)
    for first, _ in named.most_common():
        place = (first.node_id, first.incarnation)
        if place in replaced:
            continue
        owner = next((i for i, ending in enumerate(endings) if place in ending.words.places), None)
        if owner is None:
            return Verdict(elsewhere=first, sure=True)
        if not endings[owner].stopped:
            return Verdict(owner, sure=endings[owner].code is not None)
    failed = [(i, ending) for i, ending in enumerate(endings) if ending.failed]
    if not failed:
        return Verdict()
    index, ending = min(failed, key=lambda item: (item[1].words.consequence, item[1].order))
    words = ending.words
    return Verdict(index, sure=not words.places or bool(words.error and not words.consequence))


def describe_other(ending: Ending, signal_names: Mapping[int, str]) -> str:
    """How a worker ended that was not the first to fail, in one line."""
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


def shortened(text: str, length: int = 300) -> str:
    """The text, cut to fit a line of so many characters."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def exit_status(code: int) -> int:
    """The shell's number for a process's end: 128 + signal where a signal ended it."""
    return code if code >= 0 else 128 - code


def describe_exit(code: int, signal_names: Mapping[int, str]) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    return f"was ended by {signal_names.get(-code, f'signal {-code}')}"
