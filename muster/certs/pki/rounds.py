"""Reads from a PKCS#12 file how often its password would be hashed, before anything hashes it.

The file itself gives that number, and the parser hashes while it holds the interpreter's lock. So 60 million
rounds in a file in place of a renewed one would stop a scheduler for minutes.

In all schemes (RFC 7292 for the MAC and its own encryption, RFC 8018 for PBES1 and PBES2, RFC 7914 for
scrypt) the number is the INTEGER that follows the salt, an OCTET STRING. This module looks for that pair, at
every depth, in DER and in BER, which Firefox's tools write.
"""

from __future__ import annotations

MAX_DEPTH = 40
MAX_VALUES = 100_000
_INTEGER, _OCTETS, _SEQUENCE = 0x02, 0x04, 0x30
_CONSTRUCTED = 0x20


class MalformedDerError(ValueError):
    """The bytes are not ASN.1, or have too many or too deeply nested values."""


class _LimitError(MalformedDerError):
    """There are too many or too deeply nested values."""


def count_rounds(data: bytes) -> int:
    """Adds up all hash rounds in a PKCS#12 file; 0 if it has none. Encrypted parts are not read.

    Raises:
        MalformedDerError: the bytes are no ASN.1, or have too many or too deeply nested values.
    """
    reader = _DerReader()
    reader.read(memoryview(data), 0, len(data), 0)
    return reader.rounds


class _DerReader:
    def __init__(self) -> None:
        self.rounds = 0
        self._values = 0
        self._pieces: list[memoryview] | None = None

    def read(self, data: memoryview, at: int, end: int, depth: int, *, until_marked: bool = False) -> int:
        """Reads values one after the other; returns where they end."""
        if depth > MAX_DEPTH:
            raise _LimitError(f"values are nested deeper than {MAX_DEPTH}")
        after_octets = False
        while at < end:
            tag, start, stop = _header(data, at, end)
            if until_marked and tag == 0 and stop == start:
                return start
            self._values += 1
            if self._values > MAX_VALUES:
                raise _LimitError(f"there are more than {MAX_VALUES} values")
            if tag == _INTEGER and after_octets:
                self.rounds += int.from_bytes(data[start:stop], "big")
            after_octets = tag & ~_CONSTRUCTED == _OCTETS
            if tag & _CONSTRUCTED:
                outer, self._pieces = self._pieces, [] if tag & ~_CONSTRUCTED == _OCTETS else None
                ends_by_mark = stop < 0
                stop = self.read(
                    data, start, end if ends_by_mark else stop, depth + 1, until_marked=ends_by_mark
                )
                pieces, self._pieces = self._pieces, outer
                octets = memoryview(b"".join(pieces)) if pieces is not None else None
            else:
                octets = data[start:stop] if tag == _OCTETS else None
            if octets is not None and self._pieces is not None:
                self._pieces.append(octets)  # of an OCTET STRING in pieces, which counts as a whole
            elif octets is not None:
                self._read_within(octets, depth)
            at = stop
        if until_marked:
            raise MalformedDerError("a value has no end")
        return at

    def _read_within(self, octets: memoryview, depth: int) -> None:
        """Reads the content of an OCTET STRING as values, if it is exactly one value.

        Most contain something else; a random salt looks like a value of the right length once in 65,536
        times.
        """
        try:
            _, _, stop = _header(octets, 0, len(octets))
            if octets[0] == _SEQUENCE and stop in (-1, len(octets)):
                self.read(octets, 0, len(octets), depth + 1)
        except _LimitError:
            raise
        except MalformedDerError:
            self._pieces = None  # as it was before: what was read of it is no OCTET STRING in pieces


def _header(data: memoryview, at: int, end: int) -> tuple[int, int, int]:
    """Returns tag, begin and end of a value's content; the end is -1 if an end mark follows the content."""
    if end - at < 2:
        raise MalformedDerError("a value is cut off")
    tag, length, start = data[at], data[at + 1], at + 2
    if tag & 0x1F == 0x1F:
        raise MalformedDerError("a tag of several bytes")  # PKCS#12 has none
    if length == 0x80:
        if not tag & _CONSTRUCTED:
            raise MalformedDerError("a value without parts has no length")
        return tag, start, -1
    if length > 0x80:
        count = length & 0x7F
        length = int.from_bytes(data[start : start + count], "big")
        start += count
    if start + length > end:
        raise MalformedDerError("a value is cut off")
    return tag, start, start + length
