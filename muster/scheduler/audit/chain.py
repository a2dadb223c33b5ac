"""The chain of an audit log: each line has the number and hash of the previous line, and is signed.

A line is a JSON object. Its last fields are ``log`` (a random id of the log), ``number`` (from 1 on),
``before`` (the SHA-256 hash of the previous line; 64 zeros in the first line) and ``signature`` (Ed25519, RFC
8032, computed over everything before it in the line). The signature proves who wrote a line. The number and
the hash prove that no line in between is missing. The head, which the scheduler records in its journal,
proves that no line is missing at the end.
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
"""The value of ``before`` in the first line, which has no predecessor."""

_SIGNATURE = b', "signature": "'
_END = b'"}'


@dataclass(frozen=True, slots=True)
class Head:
    """The last line of a log.

    Attributes:
        log: the random id of the log.
        number: the line's number; 0 if the log is empty.
        digest: the line's hash, in hexadecimal digits.
    """

    log: str
    number: int = 0
    digest: str = NOTHING

    def encoded(self, key: str) -> str:
        """Encodes the head and the log's public key as the text that the journal stores."""
        return f"{self.number} {self.digest} {key}"


@dataclass(frozen=True, slots=True)
class Anchor:
    """A head and a public key as recorded in a journal."""

    head: Head
    key: str

    @classmethod
    def decoded(cls, log: str, text: str) -> Anchor:
        """Parses what :meth:`Head.encoded` returned.

        Raises:
            ValueError: the text is not in that form.
        """
        number, digest, key = text.split(" ")
        return cls(Head(log, int(number), digest), key)


def public_text(key: Ed25519PrivateKey | Ed25519PublicKey) -> str:
    """Returns a public key, or that of a private key, as 64 hexadecimal digits."""
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    return public.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


def signed(entry: Mapping[str, object], head: Head, key: Ed25519PrivateKey) -> tuple[bytes, Head]:
    """Signs an entry as the line after ``head``; returns the line with its line break, and the new head."""
    chained = {**entry, "log": head.log, "number": head.number + 1, "before": head.digest}
    body = json.dumps(chained, ensure_ascii=True).encode("ascii")
    signature = base64.b64encode(key.sign(body))
    line = body[:-1] + _SIGNATURE + signature + _END
    return line + b"\n", Head(head.log, head.number + 1, hashlib.sha256(line).hexdigest())


@dataclass(frozen=True, slots=True)
class SignedLine:
    """A parsed line of a log. Its signature has not been checked yet.

    Attributes:
        where: the file and the line's number in it, for messages.
        entry: the line's fields.
        head: the line's log, number and hash.
        before: the previous line's hash, as this line gives it.
    """

    where: str
    entry: Mapping[str, Any]
    head: Head
    before: str
    _body: bytes
    _signature: bytes

    def is_by(self, key: str) -> bool:
        """Whether the line was signed with this public key (hexadecimal digits)."""
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(self._signature, self._body)
        except (InvalidSignature, ValueError):
            return False
        return True


def read_line(line: bytes, where: str) -> SignedLine | None:
    """Parses one line without its line break; returns None if the line is incomplete or not signed."""
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
    """The result of checking the files of one or more logs.

    Attributes:
        lines: the valid lines, in order.
        problems: a sentence for each line, or run of lines, that is missing, changed or signed with another
            key.
        unsigned: the number of unsigned lines, which a version before 0.3 wrote.
        keys: the public key of each log.
    """

    lines: list[SignedLine] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unsigned: int = 0
    keys: dict[str, str] = field(default_factory=dict)


def verify(lines: Iterable[tuple[str, bytes]], anchors: Iterable[Anchor] = (), key: str = "") -> AuditVerdict:
    """Checks that lines of audit logs are complete, unchanged and signed with the log's first key.

    Args:
        lines: for each line, its place (file and line number) and its bytes without the line break. The files
            of a log may come in any order.
        anchors: the heads recorded in a journal.
        key: the public key with which all lines must verify, in hexadecimal digits. If empty, the anchor's
            key is used, or without an anchor, the key in the log's first line. The latter only proves that
            all lines have the same author.
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
    """Whether the line was written by a version of Muster that did not sign lines."""
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
    """Yields the problems of one log, in order; adds its valid lines to ``good``."""
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
