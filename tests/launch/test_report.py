"""What the launcher writes about processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from muster.launch.process import environment_dump
from muster.launch.report import (
    Ending,
    LastWords,
    Verdict,
    Waits,
    advice_on_wait,
    describe_exit,
    describe_other,
    exit_status,
    first_failure,
    read_words,
)
from muster.launch.screen import shortened
from muster.wire.messages import FirstLoss


def test_the_dump_shows_what_matters_and_no_secret() -> None:
    env = {
        "MS_WORKER_NUM": "2",
        "MS_CLIENT_PASSWORD": "hunter2",
        "NCCL_DEBUG": "INFO",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "MS_API_TOKEN": "hunter2",
        "SLURM_JWT": "hunter2",
        "MS_PROXY_AUTH": "hunter2",
        "NVIDIA_DB_PASS": "hunter2",
        "PYTHON_REGISTRY_CREDS": "hunter2",
        "HOME": "/root",
    }
    assert environment_dump(env) == [
        "MS_API_TOKEN=(set)",
        "MS_CLIENT_PASSWORD=(set)",
        "MS_PROXY_AUTH=(set)",
        "MS_WORKER_NUM=2",
        "NCCL_DEBUG=INFO",
        "NVIDIA_DB_PASS=(set)",
        "PYTHON_REGISTRY_CREDS=(set)",
        "SLURM_JWT=(set)",
    ]


def test_exits_in_words_and_as_the_shell_counts_them() -> None:
    assert describe_exit(3, {}) == "exited with code 3"
    assert describe_exit(-9, {9: "SIGKILL"}) == "was ended by SIGKILL"
    assert describe_exit(-40, {}) == "was ended by signal 40"
    assert exit_status(3) == 3
    assert exit_status(-9) == 137


BOOM = "ValueError: boom"
B = FirstLoss("b", 2, "rank 1 (node b on host h) left: ValueError: boom", 1)


def words(node: str = "", error: str = "", **facts: Any) -> LastWords:
    """What the worker of this node id said; of none: it never asked for a place."""
    return LastWords(frozenset({(node, "abc".index(node) + 1)} if node else ()), error, **facts)


def changed(node: str, first: FirstLoss | None = None) -> LastWords:
    return words(node, "MembershipChanged: over", consequence=True, first=first)


@pytest.mark.parametrize(
    ("endings", "verdict"),
    [
        # The scheduler's word counts, no matter who was seen to end first; it is awaited that this one ends.
        ([Ending(1, 1, words=changed("a", B)), Ending(1, 2, words=words("b", BOOM))], Verdict(1, sure=True)),
        ([Ending(1, 1, words=changed("a", B)), Ending(words=words("b"))], Verdict(1)),
        ([Ending(words=words("a", first=B)), Ending(-9, 1, words=words("b"))], Verdict(1, sure=True)),
        # Also of one that ended with 0 and without a goodbye, and of one on another host.
        ([Ending(1, 2, words=changed("a", B)), Ending(0, 1, words=words("b"))], Verdict(1, sure=True)),
        (
            [Ending(1, 1, words=changed("a", B)), Ending(words=words("c"))],
            Verdict(elsewhere=B, sure=True),
        ),
        # Not of one that this launcher had asked to end.
        (
            [Ending(7, 1, words=words("a")), Ending(-15, 2, stopped=True, words=words("b", first=B))],
            Verdict(0),
        ),
        # Without it, own failures come before those that come from others.
        ([Ending(1, 1, words=changed("a")), Ending(1, 2, words=words("b", BOOM))], Verdict(1, sure=True)),
        ([Ending(1, 1, words=changed("a")), Ending(words=words("b"))], Verdict(0)),
        ([Ending(-9, 1, words=words("a")), Ending(words=words("b"))], Verdict(0)),
        # A worker that never asked for a place was in nobody's way.
        ([Ending(2, 1, words=words(error="SettingsError: no")), Ending()], Verdict(0, sure=True)),
        ([Ending(3, 2), Ending(4, 1)], Verdict(1, sure=True)),
        # A leave, an ending that was asked for, and a good end are no failures.
        (
            [Ending(143, 1, words=words("a", left=True)), Ending(0, 2), Ending(-15, 3, stopped=True)],
            Verdict(),
        ),
    ],
)
def test_who_failed_first(endings: list[Ending], verdict: Verdict) -> None:
    assert first_failure(endings) == verdict


def test_a_failure_after_which_a_worker_was_started_again_is_not_the_cause_of_the_end() -> None:
    again = LastWords(frozenset({("b", 7)}), BOOM)
    endings = [Ending(1, 1, words=changed("a", B)), Ending(1, 2, words=again)]
    assert first_failure(endings, {("b", 2)}) == Verdict(1, sure=True)


def test_what_a_worker_has_noted_is_read_in_order() -> None:
    first = {"node_id": "b", "incarnation": 2, "sentence": "b left"}
    lines = [
        {"node_id": "a", "incarnation": 1},
        {"first": first},
        {"node_id": "a", "incarnation": 7},
        {"error": BOOM, "consequence": True, "left": False},
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    read = read_words(text)
    assert read.places == {("a", 1), ("a", 7)}
    assert (read.error, read.consequence, read.left) == (BOOM, True, False)
    assert read.first == FirstLoss("b", 2, "b left")
    went_on = read_words(text + '\n{"first": null}')
    assert went_on.first is None and went_on.lost == read.lost == {("b", 2)}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"first": {"x": 1}}', '{"node_id": "a"}', '{"incarnation": []}']
)
def test_what_is_no_note_is_passed_over(text: str) -> None:
    assert read_words(text) == LastWords()


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        (Ending(1, words=changed("a")), "exited with code 1 because of that: MembershipChanged: over"),
        (Ending(-15, stopped=True), "was ended by SIGTERM, asked to end by this launcher"),
        (Ending(143, words=words("a", left=True)), "left as it was asked to"),
        (Ending(0), "ended well"),
        (Ending(1, words=words("a", BOOM)), f"exited with code 1: {BOOM}"),
    ],
)
def test_each_other_worker_has_its_line(ending: Ending, told: str) -> None:
    assert describe_other(ending, {15: "SIGTERM"}) == told


def test_a_long_line_is_cut() -> None:
    assert shortened("short") == "short"
    assert len(shortened("x" * 1000)) == 300


def test_a_wait_is_shown_soon_and_then_ever_more_rarely_whatever_is_said_of_it() -> None:
    waits, shown = Waits(), []
    for now in range(2000):
        waits.hear(f"built for {now // 10 * 10} s", "building", now, after_s=2)
        if sentence := waits.take(now):
            shown.append((now, sentence))
    assert [now for now, _ in shown] == [2, 62, 182, 422, 902, 1802]
    assert shown[1][1] == "built for 60 s", "the newest"


def test_another_kind_of_wait_is_shown_at_once_and_a_short_one_never() -> None:
    waits = Waits()
    waits.hear("rank 1 hangs", "running", 0.0, after_s=2)
    assert waits.take(2.0) == "rank 1 hangs"
    waits.hear("rank 1 was expelled", "suspended", 3.0, after_s=2)
    assert (waits.take(4.0), waits.take(5.0), waits.take(500.0)) == ("", "rank 1 was expelled", "")
    assert waits.hear("", "running", 501.0, after_s=2), "it was shown, so it is shown that it is over"
    waits.hear("rank 0 hangs", "running", 502.0, after_s=2)
    assert not waits.hear("", "running", 503.0, after_s=2)
    assert waits.take(600.0) == ""


def test_advice_names_what_would_help() -> None:
    def advice(phase: str, **changed: Any) -> str:
        facts = {"min_workers": 0, "max_restarts": 0, "workers": 4, "replacement": "", **changed}
        return advice_on_wait(phase, **facts)

    assert advice("running") == (
        "(muster run --min-workers 3 lets the others go on without it, --spares 1 with another in its place.)"
    )
    assert advice("running", min_workers=3) == advice("running", spares=1) == advice("reconnecting") == ""
    assert advice("suspended", max_restarts=2, replacement="train") == "To start one now: train"
    assert "--max-restarts N restarts workers that fail" in advice("suspended")
