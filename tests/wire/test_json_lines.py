"""One JSON object a line: which fields it has, how long it may be, and whose lines are left as they are."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from muster.wire.json_lines import (
    FACTS,
    FIELDS,
    MOST_LINE_BYTES,
    JsonFormatter,
    LineContext,
    fields_of,
    json_line,
    say,
    wanted,
    wrapped,
)

WORKER = LineContext("worker", "mine", 3, 1, node_id="7", host="gpu-17")


def record(text: str, **facts: object) -> logging.LogRecord:
    made = logging.LogRecord("muster.worker", logging.WARNING, __file__, 1, "%s", (text,), None)
    setattr(made, FACTS, facts)
    return made


def test_each_line_has_all_fields_in_their_order_and_facts_after_them() -> None:
    line = json.loads(JsonFormatter(WORKER).format(record("it is late", event="late", late_s=3)))
    assert tuple(line)[: len(FIELDS)] == FIELDS
    assert (line["job"], line["generation"], line["rank"], line["incident"]) == ("mine", 3, 1, None)
    assert (line["level"], line["component"], line["logger"]) == ("WARNING", "worker", "muster.worker")
    assert (line["event"], line["text"], line["late_s"]) == ("late", "it is late", 3)


def test_a_traceback_and_control_characters_stay_within_one_printable_line() -> None:
    entry = record("forged\n\x1b[2J\u202e")
    try:
        raise ValueError("a\nb")
    except ValueError:
        entry.exc_info = sys.exc_info()
    text = JsonFormatter(WORKER).format(entry)
    assert text.isprintable() and text.isascii()
    line = json.loads(text)
    assert line["text"] == "forged\n\x1b[2J\u202e" and "ValueError: a\nb" in line["traceback"]


@pytest.mark.parametrize("text", ["x" * 100_000, "\u202e" * 50_000])
def test_a_long_line_is_cut_in_the_middle_of_what_is_long(text: str) -> None:
    rendered = json_line("INFO", f"begin {text} end", WORKER, lines=[text, text])
    assert len(rendered) <= MOST_LINE_BYTES
    line = json.loads(rendered)
    assert line["text"].startswith("begin") and line["text"].endswith("end")
    assert line["job"] == "mine" and line["pid"]


def test_an_incident_lasts_from_the_end_of_a_generation_until_the_job_goes_on() -> None:
    context = LineContext("worker", "mine")
    context.over()
    assert context.incident is None  # nothing stood
    context.stands(1, 0)
    context.over()
    assert context.incident == "mine-g1"
    context.over()
    context.stands(2, 1)
    shown = json.loads(json_line("INFO", "", context))
    assert (shown["generation"], shown["rank"], shown["incident"]) == (2, 1, "mine-g1")
    context.resolved()
    assert context.incident is None


def test_a_programs_own_line_is_wrapped_and_ours_stays_as_it_is() -> None:
    ours = json_line("INFO", "said", WORKER).encode()
    assert wrapped(ours, LineContext("program")) == ours
    for own in (b"epoch 1\r", b'{"time": "now", "loss": 3}', b'{"time": "', b"\xff"):
        line = fields_of(wrapped(own, LineContext("program", "mine", rank=2)))
        assert line is not None and (line["component"], line["rank"]) == ("program", 2)
    assert fields_of(b"[" * 100_000) is None


def test_a_sentence_is_text_unless_json_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MS_LOG_FORMAT", raising=False)
    say("no", level="ERROR", as_text="muster: no")
    assert capsys.readouterr().err == "muster: no\n"
    monkeypatch.setenv("MS_LOG_FORMAT", "JSON")
    assert wanted({"MS_LOG_FORMAT": " Json "})
    say("no", level="ERROR", as_text="muster: no")
    assert json.loads(capsys.readouterr().err)["text"] == "no"
