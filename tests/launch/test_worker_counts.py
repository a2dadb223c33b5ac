"""Who a launch starts on which host, and with which ranks."""

from __future__ import annotations

import pytest

from muster.errors import SettingsError
from muster.launch.parsing import HostShare
from muster.launch.worker_counts import Request, WorkerCounts, count_workers

HOSTS = (HostShare("a", 4), HostShare("b", 2))


def counts_of(request: Request, *, here: str = "a", devices: int = 0) -> WorkerCounts:
    return count_workers(request, here=[here], devices=devices)


def test_one_host() -> None:
    assert counts_of(Request(workers=3)) == WorkerCounts(3, 3, 0)
    assert counts_of(Request(per_node=3)) == WorkerCounts(3, 3, 0)


def test_one_worker_per_gpu_unless_told() -> None:
    assert counts_of(Request(), devices=4) == WorkerCounts(4, 4, 0)
    with pytest.raises(SettingsError, match="-n"):
        counts_of(Request())


@pytest.mark.parametrize(("workers", "devices", "told"), [(2, 1, "1 device"), (5, 4, "4 devices")])
def test_more_workers_than_devices_are_refused_unless_they_are_to_share(
    workers: int, devices: int, told: str
) -> None:
    with pytest.raises(SettingsError, match=f"{workers} workers .* offers {told};") as refusal:
        counts_of(Request(workers=workers), devices=devices)
    for way in (f"-n {devices})", "--devices none", "--share-gpus"):
        assert way in str(refusal.value)
    shared = counts_of(Request(workers=workers, share_gpus=True), devices=devices)
    assert shared == WorkerCounts(workers, workers, 0)


def test_more_workers_than_the_cores_can_carry_are_meant_only_if_that_is_said() -> None:
    def count(workers: int, cores: int, *, oversubscribe: bool = False) -> int:
        request = Request(workers=workers, oversubscribe=oversubscribe)
        return count_workers(request, here=["a"], devices=0, cores=cores).local_size

    assert [count(32, 1), count(64, 8)] == [32, 64]
    for workers, cores, told in ((33, 1, "1 core can carry 32"), (65, 8, "8 cores can carry 64")):
        with pytest.raises(SettingsError, match=f"{workers} workers .*whose {told}; .*--oversubscribe"):
            count(workers, cores)
        assert count(workers, cores, oversubscribe=True) == workers


@pytest.mark.parametrize(
    ("here", "expected"),
    [("a", WorkerCounts(6, 4, 0, "a")), ("b", WorkerCounts(6, 2, 4, "a", first_host=False))],
)
def test_each_host_of_a_list_takes_its_share(here: str, expected: WorkerCounts) -> None:
    assert counts_of(Request(hosts=HOSTS), here=here) == expected


def test_a_host_list_is_filled_in_order() -> None:
    assert counts_of(Request(hosts=HOSTS, workers=5), here="b") == WorkerCounts(
        5, 1, 4, "a", first_host=False
    )
    with pytest.raises(SettingsError, match="none is left for it"):
        counts_of(Request(hosts=HOSTS, workers=4), here="b")
    with pytest.raises(SettingsError, match="room for 6"):
        counts_of(Request(hosts=HOSTS, workers=7))


def test_a_host_that_is_not_listed_must_say_which_it_is() -> None:
    with pytest.raises(SettingsError, match=r"c\).*not in the host list \(a, b\).*--node-rank"):
        counts_of(Request(hosts=HOSTS), here="c")
    assert counts_of(Request(hosts=HOSTS, node_rank=1), here="c").first_rank == 4


def test_one_listed_host_is_like_none() -> None:
    assert counts_of(Request(hosts=(HostShare("a", 2),))) == WorkerCounts(2, 2, 0)


def test_hosts_by_number() -> None:
    assert counts_of(Request(nodes=2, per_node=4, node_rank=1)) == WorkerCounts(8, 4, 4, first_host=False)
    assert counts_of(Request(nodes=2, workers=8)) == WorkerCounts(8, 4, None)
    assert counts_of(Request(nodes=2), devices=8) == WorkerCounts(16, 8, None)


def test_hosts_without_numbers_meet_where_the_address_is() -> None:
    for here, first in (("a", True), ("b", False)):
        assert counts_of(Request(nodes=2, per_node=1, meeting="a"), here=here).first_host == first
    # A number that was given decides alone: the address may be one that leads here by translation.
    assert counts_of(Request(nodes=2, per_node=1, node_rank=0, meeting="a"), here="b").first_host


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (Request(workers=2, per_node=3), "differ, and there is one host"),
        (Request(workers=7, nodes=2), "-n is 7, which 2 hosts cannot share evenly"),
        (Request(workers=2, nodes=3), "-n is 2, which 3 hosts cannot share evenly"),
        (Request(workers=2, nodes=2, per_node=2), "2 hosts with 2 workers make 4"),
        (Request(per_node=2, nodes=2, node_rank=2), "it must be from 0 to 1"),
        (Request(workers=2, node_rank=1), "needs --nnodes or -H"),
        (Request(hosts=HOSTS, nodes=3), "the host list names 2 hosts"),
        (Request(hosts=HOSTS, node_rank=2), "--node-rank"),
        (Request(nodes=2), "--nproc-per-node"),
    ],
)
def test_contradictions_are_refused(request_: Request, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        counts_of(request_)
