"""Who goes when there are more handshakes than there is room for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.communicators.tcp.admission import Admission


def admission(under_way: int = 3, each: int = 2, parked: int = 2, parked_each: int = 1) -> Admission[str]:
    return Admission(
        max_under_way=under_way, max_under_way_each=each, max_parked=parked, max_parked_each=parked_each
    )


def test_the_oldest_stranger_goes_first() -> None:
    table = admission()
    assert [table.admit(name, neighbour=False) for name in "abcd"] == [None, None, None, "a"]


def test_a_stranger_does_not_displace_a_member() -> None:
    table = admission()
    assert [table.admit(name, neighbour=True) for name in "abc"] == [None] * 3
    assert table.admit("stranger", neighbour=False) == "stranger"


def test_a_member_displaces_a_stranger_with_a_hello() -> None:
    table = admission()
    for name in "abc":
        table.admit(name, neighbour=False)
        table.hello(name)
    assert table.admit("member", neighbour=True) == "a"


def test_the_silent_go_before_those_that_have_said_hello() -> None:
    table = admission()
    for name in "abc":
        table.admit(name, neighbour=True)
    table.hello("a")
    assert table.admit("d", neighbour=True) == "b"


def test_who_has_a_good_certificate_stays() -> None:
    table = admission()
    for name in "abc":
        table.admit(name, neighbour=False)
    assert table.prove("a", "one") is None
    assert table.admit("d", neighbour=True) == "b"


def test_of_one_certificate_the_oldest_from_a_strange_address_goes() -> None:
    table = admission(under_way=9)
    for name, neighbour in (("a", True), ("b", False), ("c", False)):
        table.admit(name, neighbour=neighbour)
    assert [table.prove(name, "one") for name in "abc"] == [None, None, "b"]


def test_parked_ones_take_nobodys_place_and_are_bounded_by_certificate() -> None:
    table = admission(under_way=1, parked=2, parked_each=1)
    for name, certificate, kept in (("a", 1, True), ("b", 1, False), ("c", 2, True), ("d", 3, False)):
        assert table.admit(name, neighbour=True) is None
        assert table.prove(name, certificate) is None
        assert table.park(name) is kept
        if not kept:
            table.remove(name)
    assert table.admit("under way", neighbour=False) is None
    assert table.weakest() == "under way"
    table.remove("under way")
    assert table.weakest() is None
    table.resume("a")
    assert table.weakest() == "a"


@given(st.lists(st.tuples(st.sampled_from("ahppprkx"), st.integers(0, 12), st.integers(0, 2))))
def test_its_bounds_hold_whatever_happens(story: list[tuple[str, int, int]]) -> None:
    """A caller that drops whom it is asked to never has more than the bounds say, and forgets everybody."""
    table: Admission[int] = Admission(max_under_way=4, max_under_way_each=2, max_parked=3, max_parked_each=2)
    under_way: dict[int, int | None] = {}
    parked: dict[int, int] = {}

    def drop(who: int | None) -> None:
        if who is not None:
            table.remove(who)
            del under_way[who]

    for what, who, certificate in story:
        if what == "a" and who not in under_way and who not in parked:
            under_way[who] = None
            drop(table.admit(who, neighbour=bool(certificate)))
        elif what == "h" and who in under_way:
            table.hello(who)
        elif what == "p" and who in under_way and under_way[who] is None:
            goes = table.prove(who, certificate)
            assert goes != who
            under_way[who] = certificate
            drop(goes)
        elif what == "k" and under_way.get(who) is not None and table.park(who):
            parked[who] = under_way.pop(who)  # type: ignore[assignment]
        elif what == "x":
            table.remove(who)
            under_way.pop(who, None)
            parked.pop(who, None)
        assert len(under_way) <= 4
        assert len(parked) <= 3
        for each in range(3):
            assert list(under_way.values()).count(each) <= 2
            assert list(parked.values()).count(each) <= 2
        assert (table.weakest() is None) is (not under_way)
    for who in (*under_way, *parked):
        table.remove(who)
    assert table.weakest() is None


def test_whom_nobody_knows_can_be_forgotten() -> None:
    table = admission()
    table.remove("nobody")
    with pytest.raises(KeyError):
        table.hello("nobody")
