"""Who a launch starts, where, and with what environment."""

from __future__ import annotations

import pytest

from muster.errors import SettingsError
from muster.launch.parsing import HostShare
from muster.launch.plan import Layout, Request, plan_layout, plan_workers

HOSTS = (HostShare("a", 4), HostShare("b", 2))


def layout(request: Request, *, here: str = "a", devices: int = 0) -> Layout:
    return plan_layout(request, here=[here], devices=devices)


def test_one_host() -> None:
    assert layout(Request(workers=3)) == Layout(3, 3, 0)
    assert layout(Request(per_node=3)) == Layout(3, 3, 0)


def test_one_worker_per_gpu_unless_told() -> None:
    assert layout(Request(), devices=4) == Layout(4, 4, 0)
    with pytest.raises(SettingsError, match="-n"):
        layout(Request())


@pytest.mark.parametrize(("workers", "devices", "told"), [(2, 1, "1 device"), (5, 4, "4 devices")])
def test_more_workers_than_devices_are_refused_unless_they_are_to_share(
    workers: int, devices: int, told: str
) -> None:
    with pytest.raises(SettingsError, match=f"{workers} workers .* offers {told};") as refusal:
        layout(Request(workers=workers), devices=devices)
    for way in (f"-n {devices})", "--devices none", "--share-gpus"):
        assert way in str(refusal.value)
    shared = layout(Request(workers=workers, share_gpus=True), devices=devices)
    assert shared == Layout(workers, workers, 0)


def test_workers_that_share_gpus_each_call_themselves_a_host_to_nccl() -> None:
    plans = plan_workers(Layout(5, 5, 0), {}, common={}, host="node", devices=2)
    assert [plan.env["DEVICE_ID"] for plan in plans] == ["0", "0", "0", "1", "1"]
    assert len({plan.env["NCCL_HOSTID"] for plan in plans}) == 5
    (alone, other) = plan_workers(Layout(2, 2, 0), {}, common={}, host="node", devices=2)
    assert "NCCL_HOSTID" not in {**alone.env, **other.env}


def test_more_workers_than_the_cores_can_carry_are_meant_only_if_that_is_said() -> None:
    def count(workers: int, cores: int, *, oversubscribe: bool = False) -> int:
        request = Request(workers=workers, oversubscribe=oversubscribe)
        return plan_layout(request, here=["a"], devices=0, cores=cores).local_size

    assert [count(32, 1), count(64, 8)] == [32, 64]
    for workers, cores, told in ((33, 1, "1 core can carry 32"), (65, 8, "8 cores can carry 64")):
        with pytest.raises(SettingsError, match=f"{workers} workers .*whose {told}; .*--oversubscribe"):
            count(workers, cores)
        assert count(workers, cores, oversubscribe=True) == workers


@pytest.mark.parametrize(
    ("here", "expected"),
    [("a", Layout(6, 4, 0, "a")), ("b", Layout(6, 2, 4, "a", first_host=False))],
)
def test_each_host_of_a_list_takes_its_share(here: str, expected: Layout) -> None:
    assert layout(Request(hosts=HOSTS), here=here) == expected


def test_a_host_list_is_filled_in_order() -> None:
    assert layout(Request(hosts=HOSTS, workers=5), here="b") == Layout(5, 1, 4, "a", first_host=False)
    with pytest.raises(SettingsError, match="nothing to start here"):
        layout(Request(hosts=HOSTS, workers=4), here="b")
    with pytest.raises(SettingsError, match="room for 6"):
        layout(Request(hosts=HOSTS, workers=7))


def test_a_host_that_is_not_listed_must_say_which_it_is() -> None:
    with pytest.raises(SettingsError, match=r"c\).*not in the host list \(a, b\).*--node-rank"):
        layout(Request(hosts=HOSTS), here="c")
    assert layout(Request(hosts=HOSTS, node_rank=1), here="c").first_rank == 4


def test_one_listed_host_is_like_none() -> None:
    assert layout(Request(hosts=(HostShare("a", 2),))) == Layout(2, 2, 0)


def test_hosts_by_number() -> None:
    assert layout(Request(nodes=2, per_node=4, node_rank=1)) == Layout(8, 4, 4, first_host=False)
    assert layout(Request(nodes=2, workers=8)) == Layout(8, 4, None)
    assert layout(Request(nodes=2), devices=8) == Layout(16, 8, None)


def test_hosts_without_numbers_meet_where_the_address_is() -> None:
    for here, first in (("a", True), ("b", False)):
        assert layout(Request(nodes=2, per_node=1, meeting="a"), here=here).first_host == first
    # A number that was given decides alone: the address may be one that leads here by translation.
    assert layout(Request(nodes=2, per_node=1, node_rank=0, meeting="a"), here="b").first_host


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
        layout(request_)


def test_workers_get_their_place_in_the_environment() -> None:
    plans = plan_workers(Layout(6, 2, 4), {}, common={"MS_SCHED_PORT": "7000"}, devices=2)
    assert [plan.label for plan in plans] == ["4", "5"]
    assert plans[1].env["MS_ROLE"] == "MS_WORKER"
    assert plans[1].env["MS_WORKER_NUM"] == "6"
    assert plans[1].env["MS_LOCAL_INDEX"] == "1"
    assert plans[1].env["MS_NODE_ID"] == "5"
    assert plans[1].env["DEVICE_ID"] == "1"
    assert plans[1].env["MS_SCHED_PORT"] == "7000"


def test_unknown_ranks_leave_node_ids_to_the_worker() -> None:
    (first, second) = plan_workers(Layout(4, 2, None), {}, common={}, host="node/1")
    assert (first.label, second.label, second.number) == ("node_1_0", "node_1_1", "1")
    assert "MS_NODE_ID" not in first.env


@pytest.mark.parametrize(
    ("request_", "spares", "node_ids", "labels"),
    [
        (Request(workers=2, spares=2), (2, 2), ("2", "3"), ("spare_0", "spare_1")),
        (Request(nodes=2, per_node=2, node_rank=1, spares=1), (1, 2), ("5",), ("spare_1",)),
        (Request(nodes=2, per_node=2, spares=1), (1, 2), (None,), ("h_spare_0",)),
        (Request(hosts=HOSTS, spares=1), (1, 2), ("7",), ("spare_1",)),
        (Request(hosts=(HostShare("b", 2), *HOSTS[:1]), workers=2, spares=1), (1, 1), ("2",), ("spare_0",)),
    ],
)
def test_each_host_starts_its_spares_behind_its_workers(
    request_: Request, spares: tuple[int, int], node_ids: tuple[str | None, ...], labels: tuple[str, ...]
) -> None:
    made = layout(request_, here="b")
    assert (made.spares, made.all_spares) == spares
    workers = plan_workers(made, {}, common={}, host="h")
    own = workers[made.local_size :]
    assert [plan.env.get("MS_NODE_ID") for plan in own] == list(node_ids)
    assert [plan.label for plan in own] == list(labels)
    assert [plan.env.get("MS_WORKER_SPARE") for plan in workers] == [None] * made.local_size + ["1"] * spares[
        0
    ]
    assert {plan.env["MS_WORKER_NUM"] for plan in workers} == {str(made.world_size)}


def test_spares_have_devices_of_their_own() -> None:
    with pytest.raises(SettingsError, match=r"4 workers and 1 spare are asked .* offers 4 .*-n 3"):
        layout(Request(spares=1), devices=4)
    made = layout(Request(workers=3, spares=1), devices=4)
    assert [plan.env["DEVICE_ID"] for plan in plan_workers(made, {}, common={}, devices=4)] == list("0123")


def test_a_rank_table_leaves_node_ids_to_the_worker() -> None:
    (first, _) = plan_workers(Layout(2, 2, 0), {"RANK_TABLE_FILE": "table.json"}, common={}, host="h")
    assert "MS_NODE_ID" not in first.env
    assert (first.rank, first.label) == (None, "h_0")


def test_a_node_id_of_the_user_is_kept_and_told_apart() -> None:
    (alone,) = plan_workers(Layout(1, 1, 0), {"MS_NODE_ID": "left"}, common={})
    assert "MS_NODE_ID" not in alone.env
    (_, second) = plan_workers(Layout(2, 2, 0), {"MS_NODE_ID": "pod-3"}, common={}, host="h")
    assert second.env["MS_NODE_ID"] == "pod-3-1"
    assert (alone.label, second.label) == ("0", "h_1")  # of one worker the rank is known, of pod-3-1 not


def test_a_lone_worker_keeps_the_device_the_user_chose() -> None:
    (alone,) = plan_workers(Layout(1, 1, 0), {"DEVICE_ID": "3"}, common={}, devices=4)
    assert "DEVICE_ID" not in alone.env
    (first, _) = plan_workers(Layout(2, 2, 0), {"DEVICE_ID": "3"}, common={}, devices=4)
    assert first.env["DEVICE_ID"] == "0"


def test_threads_are_limited_unless_the_user_or_a_lone_worker_decides() -> None:
    (first, _) = plan_workers(Layout(2, 2, 0), {"MKL_NUM_THREADS": "4"}, common={})
    assert first.env["OMP_NUM_THREADS"] == first.env["OPENBLAS_NUM_THREADS"] == "1"
    assert "MKL_NUM_THREADS" not in first.env
    (alone,) = plan_workers(Layout(1, 1, 0), {}, common={})
    assert "OMP_NUM_THREADS" not in alone.env


def test_cores_are_spread_without_overlap_while_there_are_enough() -> None:
    plans = plan_workers(Layout(3, 3, 0), {}, common={}, cores=range(8))
    assert [plan.cores for plan in plans] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    crowded = plan_workers(Layout(3, 3, 0), {}, common={}, cores=(0, 1))
    assert [plan.cores for plan in crowded] == [(0,), (1,), (0,)]
