"""SPIFFE IDs: which are taken, and for which identity each stands."""

from __future__ import annotations

import pytest

from muster.certs.errors import IdentityError
from muster.certs.pki.identity import Identity
from muster.certs.pki.spiffe import read_identity_map, split_spiffe_id, why_not_mapped

WORKER = {"uri": "spiffe://prod.example/ns/{job}/worker/{node}", "role": "worker"}
SCHEDULER = {"uri": "spiffe://prod.example/ns/{job}/scheduler", "role": "scheduler"}
OPERATOR = {"uri": "spiffe://prod.example/people/{}", "role": "operator", "job": "*"}


def test_a_spiffe_id_is_taken_apart() -> None:
    assert split_spiffe_id("spiffe://prod.example/ns/red/worker") == ("prod.example", ("ns", "red", "worker"))


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://prod.example",  # a trust domain, and no workload
        "spiffe://prod.example/",
        "spiffe://prod.example/a/",
        "spiffe://prod.example//a",
        "spiffe://prod.example/./a",
        "spiffe://prod.example/a/..",
        "spiffe://prod.example/%61",
        "spiffe://prod.example/a?b",
        "spiffe://prod.example/a#b",
        "spiffe://prod.example/a b",
        "spiffe://prod.example/\u0430",  # Cyrillic, and looks like a
        "spiffe://Prod.example/a",
        "SPIFFE://prod.example/a",
        "spiffe://prod.example:443/a",
        "spiffe://me@prod.example/a",
        "spiffe:///a",
        "spiffe://prod.example/" + "a" * 2048,
        "spiffe://" + "d" * 256 + "/a",
        "https://prod.example/a",
    ],
)
def test_what_is_no_spiffe_id_is_refused(uri: str) -> None:
    with pytest.raises(IdentityError, match="is not a SPIFFE ID"):
        read_identity_map([{"uri": "spiffe://prod.example/{}", "role": "worker", "job": "red"}]).identity_of(
            uri
        )


@pytest.mark.parametrize(
    ("uri", "identity"),
    [
        ("spiffe://prod.example/ns/red/worker/n1", "muster://red/worker/n1"),
        ("spiffe://prod.example/ns/red/scheduler", "muster://red/scheduler"),
        ("spiffe://prod.example/people/ada", "muster://*/operator"),
    ],
)
def test_a_spiffe_id_stands_for_what_its_rule_says(uri: str, identity: str) -> None:
    found = read_identity_map([WORKER, SCHEDULER, OPERATOR]).identity_of(uri)
    assert (found.uri(), found.spiffe_id) == (identity, uri)
    assert str(found) == f"{uri} ({identity})"


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://prod.example/ns/red/worker",  # a segment too few
        "spiffe://prod.example/ns/red/worker/n1/x",
        "spiffe://prod.example/ns/red/workers/n1",
        "spiffe://evil.example/ns/red/worker/n1",
        "spiffe://prod.example.evil/ns/red/worker/n1",
        "spiffe://prod.exampl/ns/red/worker/n1",
    ],
)
def test_what_no_rule_fits_is_refused_by_name(uri: str) -> None:
    with pytest.raises(IdentityError) as caught:
        read_identity_map([WORKER]).identity_of(uri)
    assert caught.value.message == f"{uri} stands for no job and role here."


def test_what_two_rules_say_differently_is_refused_and_what_they_say_alike_is_not() -> None:
    blue = {"uri": "spiffe://prod.example/ns/{}/worker/{node}", "role": "worker", "job": "blue"}
    both = read_identity_map([WORKER, blue])
    with pytest.raises(
        IdentityError, match=r"fits several rules .* muster://blue/worker/n1 and muster://red"
    ):
        both.identity_of("spiffe://prod.example/ns/red/worker/n1")
    assert both.identity_of("spiffe://prod.example/ns/blue/worker/n1").job == "blue"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({}, "it must be a list"),
        ([WORKER] * 257, "at most 256 rules"),
        (["x"], "rule 1: it must be an object"),
        ([WORKER, {**WORKER, "node": 3}], "rule 2: it must be an object whose values are strings"),
        ([{"uri": WORKER["uri"]}], "uri and role are needed"),
        ([{**WORKER, "other": "x"}], "uri and role are needed"),
        ([{**WORKER, "role": "host"}], "role is 'host'"),
        ([{**WORKER, "uri": "spiffe://prod.example/x"}], "it says no job"),
        ([{**WORKER, "job": "red"}], "job is given twice"),
        ([{**WORKER, "node": "n1"}], "node is given twice"),
        ([{**WORKER, "uri": "spiffe://prod.example/{job}/{job}"}], "job is given twice"),
        ([{**WORKER, "uri": "spiffe://prod.example/x{job}"}], "is not a SPIFFE ID"),
        ([{**WORKER, "uri": "spiffe://prod.example/{rank}/{job}"}], "is not a SPIFFE ID"),
        ([{**WORKER, "uri": "spiffe://{job}/x"}], "is not a SPIFFE ID"),
        ([{**WORKER, "uri": "https://prod.example/{job}"}], "is not a SPIFFE ID"),
        ([{"uri": "spiffe://d/x", "role": "worker", "job": ""}], "A job name has 1 to 128"),
        ([{"uri": "spiffe://d/x", "role": "worker", "job": "*", "node": "*"}], "The node name"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(value: object, why: str) -> None:
    with pytest.raises(IdentityError, match=why):
        read_identity_map(value)


def test_who_was_accepted_is_refused_once_it_stands_for_something_else() -> None:
    rules = read_identity_map([WORKER])
    known = rules.identity_of("spiffe://prod.example/ns/red/worker/n1")
    assert why_not_mapped(known, rules) is None
    assert "stands for no job" in str(why_not_mapped(known, None))
    other = read_identity_map([{**WORKER, "role": "operator"}])
    assert "stands for muster://red/operator/n1 now" in str(why_not_mapped(known, other))
    assert why_not_mapped(Identity("red", "worker"), None) is None
