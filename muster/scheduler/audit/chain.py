"""The chain of an audit log: each line names the one before it by number and hash, and is signed.

A line is a JSON object whose last fields are ``log`` (which log it is of, at random), ``number`` (from 1 on),
``before`` (SHA-256 of the line before, 64 zeros in the first) and ``signature`` (Ed25519, RFC 8032), over all
that stands before it. The signature shows who wrote a line; number and hash show that none is missing between
two; the head, which the scheduler notes in its journal, shows that none is missing at the end.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

NOTHING = "0" * 64
"""What stands for the line before the first."""

_SIGNATURE = b', "signature": "'
_END = b'"}'


@dataclass(frozen=True, slots=True)
class Head:
    """The last line of a log.

    Attributes:
        log: which log.
        number: the line's number; 0: there is none yet.
        digest: the line's hash, in hexadecimal digits.
    """

    log: str
    number: int = 0
    digest: str = NOTHING

    def encoded(self, key: str) -> str:
        """As it stands in a journal, with the public key of the log."""
        return f"{self.number} {self.digest} {key}"


@dataclass(frozen=True, slots=True)
class Anchor:
    """A head and a public key, as a journal says that they were."""

    head: Head
    key: str

    @classmethod
    def decoded(cls, log: str, text: str) -> Anchor:
        """Reads what :meth:`Head.encoded` has written.

        Raises:
            ValueError: it is nothing of that kind.
        """
        number, digest, key = text.split(" ")
        return cls(Head(log, int(number), digest), key)


def public_text(key: Ed25519PrivateKey | Ed25519PublicKey) -> str:
    """A public key, or that of a private one, in 64 hexadecimal digits."""
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    return public.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


def signed(entry: Mapping[str, object], head: Head, key: Ed25519PrivateKey) -> tuple[bytes, Head]:
    """The line of an entry that follows a head, with its line break; and the head that it is then."""
    chained = {**entry, "log": head.log, "number": head.number + 1, "before": head.digest}
    body = json.dumps(chained, ensure_ascii=True).encode("ascii")
    signature = base64.b64encode(key.sign(body))
    line = body[:-1] + _SIGNATURE + signature + _END
    return line + b"\n", Head(head.log, head.number + 1, hashlib.sha256(line).hexdigest())


@dataclass(frozen=True, slots=True)
class SignedLine:
    """A line of a log, read; whether its signature is right depends on the key.

    Attributes:
        where: its file and line, for a sentence.
        entry: its fields.
        head: its place in the log.
        before: the hash of the line before it.
    """

    where: str
    entry: Mapping[str, Any]
    head: Head
    before: str
    _body: bytes
    _signature: bytes

    def is_by(self, key: str) -> bool:
        """Whether the holder of a key, in hexadecimal digits, has signed it."""
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(self._signature, self._body)
        except (InvalidSignature, ValueError):
            return False
        return True


def read_line(line: bytes, where: str) -> SignedLine | None:
    """Reads one line, without its line break; None: it is cut off, or not signed."""
    front, mark, rest = line.rpartition(_SIGNATURE)
    try:
        if not mark or not rest.endswith(_END):
            return None
        body = front + b"}"
        entry = json.loads(body)
        head = Head(str(entry["log"]), int(entry["number"]), hashlib.sha256(line).hexdigest())
        signature = base64.b64decode(rest[: -len(_END)], validate=True)
        return SignedLine(where, entry, head, str(entry["before"]), body, signature)
    except (LookupError, TypeError, ValueError, RecursionError):
        return None


@dataclass
class AuditVerdict:
    """What is found in the files of one or more logs.

    Attributes:
        lines: the lines that are as they were written, in order.
        problems: a sentence for each line, or run of lines, that is missing, changed or of another key.
        unsigned: how many lines no key has signed: a version before 0.3 wrote them.
        keys: the public key of each log.
    """

    lines: list[SignedLine] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unsigned: int = 0
    keys: dict[str, str] = field(default_factory=dict)


def verify(lines: Iterable[tuple[str, bytes]], anchors: Iterable[Anchor] = (), key: str = "") -> AuditVerdict:
    """Looks whether lines of audit logs are whole, unchanged and by the key that their log began with.

    Args:
        lines: where each stands, and its bytes without line break; files of one log in any order.
        anchors: the heads that a journal knows.
        key: the public key that all must be of, in hexadecimal digits; "": that of the anchor, else the one
            that the log names in its first line, which only shows that all lines are by one hand.
    """
    verdict = AuditVerdict()
    logs: dict[str, list[SignedLine]] = {}
    for where, data in lines:
        line = read_line(data, where)
        if line is not None:
            logs.setdefault(line.head.log, []).append(line)
        elif _is_older(data):
            verdict.unsigned += 1
        else:
            verdict.problems.append(f"{where} is damaged: it is cut off, or no line of an audit log.")
    known = {anchor.head.log: anchor for anchor in anchors}
    for log in sorted(logs.keys() | known.keys()):
        found = sorted(logs.get(log, []), key=lambda line: line.head.number)
        anchor = known.get(log)
        named = key or (anchor.key if anchor else "") or _named_key(found)
        verdict.keys[log] = named
        verdict.problems += _problems(log, found, named, anchor, verdict.lines)
    return verdict


def _is_older(data: bytes) -> bool:
    """Whether it is a line of a version that did not sign."""
    try:
        entry = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and "event" in entry and "log" not in entry


def _named_key(lines: list[SignedLine]) -> str:
    return next((str(line.entry["key"]) for line in lines if "key" in line.entry), "")


def _problems(
    log: str, lines: list[SignedLine], key: str, anchor: Anchor | None, good: list[SignedLine]
) -> Iterator[str]:
    """The faults of one log, in order; its sound lines are added to ``good``."""
    if lines and not key:
        yield f"The key of log {log} is not known: name it with --key, or add the file with its first line."
        return
    last = Head(log)
    for line in lines:
        number = line.head.number
        if not line.is_by(key):
            yield f"{line.where} (line {number} of log {log}) was changed, or another key has signed it."
        elif number <= last.number:
            if line.head != last:
                yield f"{line.where} is a second line {number} of log {log}."
            continue
        else:
            if number > last.number + 1:
                yield f"{_span(log, last.number + 1, number - 1)} missing before {line.where}."
            elif line.before != last.digest:
                yield f"{line.where} does not follow the line before it: that one was changed."
            good.append(line)
        last = line.head
    if anchor is None:
        return
    if last.number < anchor.head.number:
        yield (
            f"{_span(log, last.number + 1, anchor.head.number)} missing at its end: the journal knows that"
            f" there were {anchor.head.number}."
        )
    elif any(line.head.number == anchor.head.number and line.head != anchor.head for line in lines):
        yield f"Line {anchor.head.number} of log {log} is not the one that the journal knows."


def _span(log: str, first: int, last: int) -> str:
    return f"Line {first} of log {log} is" if first == last else f"Lines {first} to {last} of log {log} are"
