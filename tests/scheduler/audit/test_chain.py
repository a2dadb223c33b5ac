"""The chain of an audit log: what is missing, changed, moved or forged shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from muster.scheduler.audit.chain import Anchor, Head, public_text, read_line, signed, verify

KEY = Ed25519PrivateKey.generate()
OTHER = Ed25519PrivateKey.generate()


def a_log(
    *events: str, key: Ed25519PrivateKey = KEY, log: str = "one", named: bool = True
) -> tuple[list[bytes], Head]:
    """The lines of a log, and its head."""
    head, lines = Head(log), []
    for number, event in enumerate(events):
        entry = {"event": event, **({"key": public_text(key)} if named and not number else {})}
        line, head = signed(entry, head, key)
        lines.append(line.removesuffix(b"\n"))
    return lines, head


LINES, HEAD = a_log("began", "joined", "formed", "lost", "over")


def problems(lines: list[bytes], *anchors: Anchor, key: str = "") -> list[str]:
    return verify([(f"f:{n}", line) for n, line in enumerate(lines, 1)], anchors, key).problems


def test_a_whole_log_is_as_it_was_written_in_whatever_order_its_files_come() -> None:
    anchor = Anchor(HEAD, public_text(KEY))
    for lines in (LINES, LINES[3:] + LINES[:3]):
        verdict = verify([("f:1", line) for line in lines], [anchor], public_text(KEY))
        assert verdict.problems == []
        assert [line.entry["event"] for line in verdict.lines] == [
            "began",
            "joined",
            "formed",
            "lost",
            "over",
        ]


def changed(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], lines[3].replace(b'"lost"', b'"left"'), lines[4]]


def cut(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], lines[3][:40], lines[4]]


def forged(lines: list[bytes]) -> list[bytes]:
    before = read_line(lines[2], "")
    assert before is not None
    return [*lines[:3], signed({"event": "left"}, before.head, OTHER)[0].strip(), lines[4]]


def of_another_log(lines: list[bytes]) -> list[bytes]:
    """The same key has signed it, in a log that nothing else is left of."""
    strange, _ = a_log("began", "joined", "formed", "left", log="two")
    return [*lines[:3], strange[3], lines[4]]


@pytest.mark.parametrize(
    ("attack", "told"),
    [
        (lambda lines: lines[:1] + lines[2:], "Line 2 of log one is missing before f:2."),
        (lambda lines: lines[:1] + lines[4:], "Lines 2 to 4 of log one are missing before f:2."),
        (lambda lines: lines[1:], "Line 1 of log one is missing before f:1."),
        (changed, "f:4 (line 4 of log one) was changed, or another key has signed it."),
        (cut, "f:4 is damaged: it is cut off, or no line of an audit log."),
        (forged, "f:4 (line 4 of log one) was changed, or another key has signed it."),
        (of_another_log, "Line 4 of log one is missing before f:5."),
    ],
    ids=["one is missing", "several are", "the first is", "changed", "cut off", "forged", "another log's"],
)
def test_what_was_done_to_a_log_is_said(attack: Callable[[list[bytes]], list[bytes]], told: str) -> None:
    assert told in problems(attack(LINES), key=public_text(KEY))


def test_what_is_cut_off_at_the_end_shows_by_what_the_journal_knows() -> None:
    assert problems(LINES[:3]) == []
    told = problems(LINES[:3], Anchor(HEAD, public_text(KEY)))
    assert told == ["Lines 4 to 5 of log one are missing at its end: the journal knows that there were 5."]
    gone = problems([], Anchor(HEAD, public_text(KEY)))
    assert gone == ["Lines 1 to 5 of log one are missing at its end: the journal knows that there were 5."]


def test_whoever_has_the_key_cannot_write_another_end_than_the_journal_knows() -> None:
    other, _ = a_log("began", "joined", "formed", "lost", "left")
    told = problems(other, Anchor(HEAD, public_text(KEY)))
    assert told == ["Line 5 of log one is not the one that the journal knows."]


def test_a_log_that_was_written_as_a_whole_by_another_key_shows_by_the_key_that_is_named() -> None:
    lines, _ = a_log("began", "joined", key=OTHER)
    assert problems(lines) == []
    assert len(problems(lines, key=public_text(KEY))) == 2


def test_a_line_that_stands_twice_is_one_and_two_of_a_number_are_not() -> None:
    assert problems([*LINES, LINES[4]], key=public_text(KEY)) == []
    before = read_line(LINES[3], "")
    assert before is not None
    again = signed({"event": "joined"}, before.head, KEY)[0].strip()
    assert problems([*LINES, again]) == ["f:6 is a second line 5 of log one."]


def test_lines_of_versions_that_did_not_sign_are_counted() -> None:
    verdict = verify([("f:1", b'{"time": "t", "event": "joined"}'), ("f:2", LINES[0])])
    assert (verdict.unsigned, verdict.problems) == (1, [])


@pytest.mark.parametrize("end", [1_000, 1_000_000_000_000])
def test_a_journals_note_is_read_as_it_was_written(end: int) -> None:
    head = Head("one", end, "ab" * 32)
    assert Anchor.decoded("one", head.encoded("cd" * 32)) == Anchor(head, "cd" * 32)
    with pytest.raises(ValueError, match=r"values to unpack|invalid literal"):
        Anchor.decoded("one", "nothing of that kind")
