"""The rule of ranks, by property: dense, unique, deaf to arrival order, hosts and labels together."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from muster.scheduler.core import ledger, records
from muster.wire import messages
from muster.wire.rank_table import RankTable, RankTableEntry

names = st.text("ab01279.-", min_size=1, max_size=6)
hosts = st.builds(
    messages.Host,
    id=st.sampled_from("PQRST"),
    name=names,
    address=names,
    topology=st.sampled_from(["", "r1", "r2"]),
)
devices = st.builds(
    messages.Device, index=st.integers(-1, 3), pci_bus_id=st.sampled_from(["", "0000:01", "0000:41"])
)


def candidate(
    node_id: str, host: messages.Host, device: messages.Device, local_index: int = -1
) -> messages.Candidate:
    return messages.Candidate(node_id, 1, host, device, 4, 0, "tcp", local_index)


@st.composite
def pools(draw: st.DrawFn) -> list[messages.Candidate]:
    """Workers with distinct node ids; one host id always comes with one host."""
    ids = draw(st.lists(st.one_of(names, st.integers(0, 12).map(str)), min_size=1, max_size=8, unique=True))
    by_id: dict[str, messages.Host] = {}
    pool = []
    for node_id in ids:
        host = draw(hosts)
        host = by_id.setdefault(host.id, host)
        pool.append(candidate(node_id, host, draw(devices), draw(st.integers(-1, 3))))
    return pool


@st.composite
def quarrelsome_pools(draw: st.DrawFn) -> list[messages.Candidate]:
    """Workers that report different labels, names and addresses of one host id."""
    pool = draw(pools())
    return [one.replaced(host=draw(hosts).replaced(id=one.host.id)) for one in pool]


def ranked(pool: list[messages.Candidate], limit: int = 13) -> tuple[records.Placed, ...]:
    return ledger.assign(ledger.in_order(pool, limit=limit, table=None))


def runs(values: list[str]) -> int:
    return len(list(itertools.groupby(values)))


@given(pools(), st.randoms())
def test_arrival_order_never_decides(pool: list[messages.Candidate], chance: random.Random) -> None:
    shuffled = pool[:]
    chance.shuffle(shuffled)
    assert ranked(pool) == ranked(shuffled)


@given(pools())
def test_ranks_and_local_ranks_are_dense_and_unique(pool: list[messages.Candidate]) -> None:
    members = ranked(pool)
    assert [member.rank for member in members] == list(range(len(pool)))
    assert {member.candidate.node_id for member in members} == {c.node_id for c in pool}
    for host_id in {c.host.id for c in pool}:
        here = [member for member in members if member.candidate.host.id == host_id]
        assert [member.local_rank for member in here] == list(range(len(here)))
        assert {member.local_world_size for member in here} == {len(here)}


@given(pools())
def test_by_topology_hosts_are_contiguous_and_labels_adjacent(pool: list[messages.Candidate]) -> None:
    members = ranked(pool, limit=0)
    assert runs([m.candidate.host.id for m in members]) == len({c.host.id for c in pool})
    assert runs([m.candidate.host.topology for m in members]) == len({c.host.topology for c in pool})
    for one, other in itertools.pairwise(members):
        if one.candidate.host.id == other.candidate.host.id:
            assert one.candidate.device.index <= other.candidate.device.index


@given(quarrelsome_pools(), st.randoms())
def test_a_host_stays_together_whatever_its_workers_tell_of_it(
    pool: list[messages.Candidate], chance: random.Random
) -> None:
    members = ranked(pool, limit=0)
    assert runs([m.candidate.host.id for m in members]) == len({c.host.id for c in pool})
    shuffled = pool[:]
    chance.shuffle(shuffled)
    assert ranked(shuffled, limit=0) == members


def labelled(*workers: tuple[str, str, str]) -> list[str]:
    """Node ids in order of rank of workers on one device each: node id, host, label."""
    pool = [
        candidate(node_id, messages.Host(host, host, "a", label), messages.Device(index=index))
        for index, (node_id, host, label) in enumerate(workers)
    ]
    return [member.candidate.node_id for member in ranked(pool)]


def test_a_host_with_two_labels_counts_under_the_smaller_one() -> None:
    torn = [("w0", "h", "b"), ("w1", "h", "a"), ("w2", "h", "b"), ("w3", "h", "a")]
    assert labelled(*torn) == ["w0", "w1", "w2", "w3"]
    assert labelled(("y0", "g", "aa"), *torn, ("x0", "i", "a")) == ["w0", "w1", "w2", "w3", "x0", "y0"]


def test_a_label_that_only_some_workers_of_a_host_tell_is_the_hosts() -> None:
    alpha = [("w0", "alpha", ""), ("w1", "alpha", "r2")]
    assert labelled(*alpha, ("x0", "beta", "r1"), ("y0", "gamma", "")) == ["y0", "x0", "w0", "w1"]


@given(st.permutations(range(8)), st.integers(1, 8))
def test_integer_ids_are_the_ranks_of_a_full_job_and_keep_their_order_in_a_smaller_one(
    order: list[int], size: int
) -> None:
    host = messages.Host("h", "h", "a")
    pool = [candidate(str(number), host, messages.Device()) for number in order]
    assert [m.candidate.node_id for m in ranked(pool)] == [str(n) for n in range(8)]
    left = pool[:size]
    assert [m.candidate.node_id for m in ranked(left)] == sorted(c.node_id for c in left)


@given(names, names)
def test_natural_keys_tell_all_names_apart(one: str, other: str) -> None:
    assert (ledger.natural_key(one) == ledger.natural_key(other)) == (one == other)


def test_natural_order_of_hosts() -> None:
    wanted = [
        "node",
        "node1",
        "node2",
        "node2b",
        "node10",
        "node010",
        "rack1-9",
        "rack1-10",
        "x" + "9" * 5000,
    ]
    assert sorted(wanted, key=ledger.natural_key) == [
        "node", "node1", "node2", "node2b", "node010", "node10", "rack1-9", "rack1-10", wanted[-1],
    ]  # fmt: skip


def test_one_id_out_of_range_or_not_plain_means_topology() -> None:
    first, second = messages.Host("1", "alpha", "a"), messages.Host("2", "beta", "b")
    for odd in ("4", "01", "-1", "+1", "1.0", "²", "x"):
        pool = [candidate("0", second, messages.Device()), candidate(odd, first, messages.Device())]
        assert [m.candidate.node_id for m in ranked(pool, limit=4)] == [odd, "0"]


def test_two_hosts_with_one_name_stay_apart() -> None:
    twins = [messages.Host(host_id, "gpu", "a") for host_id in ("B", "A")]
    pool = [candidate(f"w{i}", twins[i % 2], messages.Device(index=i)) for i in range(4)]
    members = ranked(pool)
    assert [(m.candidate.host.id, m.local_rank, m.local_world_size) for m in members] == [
        ("A", 0, 2), ("A", 1, 2), ("B", 0, 2), ("B", 1, 2),
    ]  # fmt: skip


def test_the_device_index_decides_before_the_pci_bus_id() -> None:
    host = messages.Host("h", "h", "a")
    buses = ("c1", "81", "41")
    pool = [
        candidate(f"w{i}", host, messages.Device("cuda", i, f"0000:{bus}:00")) for i, bus in enumerate(buses)
    ]
    assert [m.candidate.node_id for m in ranked(pool[::-1])] == ["w0", "w1", "w2"]


def test_devices_with_one_index_go_by_pci_order() -> None:
    host = messages.Host("h", "h", "a")
    pool = [
        candidate(f"w{bus}", host, messages.Device("cuda", 0, f"0000:{bus}:00")) for bus in ("c1", "41", "81")
    ]
    assert [m.candidate.node_id for m in ranked(pool)] == ["w41", "w81", "wc1"]


def test_the_rank_table_decides_by_host_name_id_or_address_and_device() -> None:
    table = RankTable(
        (RankTableEntry(0, "beta", 1), RankTableEntry(1, "10.0.0.1", 0), RankTableEntry(2, "ID-b", 0))
    )
    alpha, beta = messages.Host("ID-a", "alpha", "10.0.0.1"), messages.Host("ID-b", "beta", "10.0.0.2")
    pool = [
        candidate("0", beta, messages.Device(index=0)),
        candidate("1", alpha, messages.Device(), local_index=0),
        candidate("2", beta, messages.Device(index=1)),
    ]
    ordered = ledger.in_order(pool, limit=3, table=table)
    assert [c.node_id for c in ordered] == ["2", "1", "0"]
    assert ledger.table_entry(table, pool[0]) == table.entries[2]
    assert ledger.table_entry(table, candidate("3", alpha, messages.Device(index=5))) is None
