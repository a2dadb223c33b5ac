"""With what environment a launch starts its workers."""

from __future__ import annotations

import pytest

from muster.errors import SettingsError
from muster.launch.parsing import HostShare
from muster.launch.plan import plan_workers
from muster.launch.worker_counts import Request, WorkerCounts, count_workers

HOSTS = (HostShare("a", 4), HostShare("b", 2))


def counts_of(request: Request, *, here: str = "a", devices: int = 0) -> WorkerCounts:
    return count_workers(request, here=[here], devices=devices)


def test_workers_that_share_gpus_each_call_themselves_a_host_to_nccl() -> None:
    plans = plan_workers(WorkerCounts(5, 5, 0), {}, common={}, host="node", devices=2)
    assert [plan.env["DEVICE_ID"] for plan in plans] == ["0", "0", "0", "1", "1"]
    assert len({plan.env["NCCL_HOSTID"] for plan in plans}) == 5
    (alone, other) = plan_workers(WorkerCounts(2, 2, 0), {}, common={}, host="node", devices=2)
    assert "NCCL_HOSTID" not in {**alone.env, **other.env}


def test_workers_get_their_place_in_the_environment() -> None:
    plans = plan_workers(WorkerCounts(6, 2, 4), {}, common={"MS_SCHED_PORT": "7000"}, devices=2)
    assert [plan.label for plan in plans] == ["4", "5"]
    assert plans[1].env["MS_ROLE"] == "MS_WORKER"
    assert plans[1].env["MS_WORKER_NUM"] == "6"
    assert plans[1].env["MS_LOCAL_INDEX"] == "1"
    assert plans[1].env["MS_NODE_ID"] == "5"
    assert plans[1].env["DEVICE_ID"] == "1"
    assert plans[1].env["MS_SCHED_PORT"] == "7000"


def test_unknown_ranks_leave_node_ids_to_the_worker() -> None:
    (first, second) = plan_workers(WorkerCounts(4, 2, None), {}, common={}, host="node/1")
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
    made = counts_of(request_, here="b")
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
        counts_of(Request(spares=1), devices=4)
    made = counts_of(Request(workers=3, spares=1), devices=4)
    assert [plan.env["DEVICE_ID"] for plan in plan_workers(made, {}, common={}, devices=4)] == list("0123")


def test_a_rank_table_leaves_node_ids_to_the_worker() -> None:
    (first, _) = plan_workers(WorkerCounts(2, 2, 0), {"RANK_TABLE_FILE": "table.json"}, common={}, host="h")
    assert "MS_NODE_ID" not in first.env
    assert (first.rank, first.label) == (None, "h_0")


def test_a_node_id_of_the_user_is_kept_and_told_apart() -> None:
    (alone,) = plan_workers(WorkerCounts(1, 1, 0), {"MS_NODE_ID": "left"}, common={})
    assert "MS_NODE_ID" not in alone.env
    (_, second) = plan_workers(WorkerCounts(2, 2, 0), {"MS_NODE_ID": "pod-3"}, common={}, host="h")
    assert second.env["MS_NODE_ID"] == "pod-3-1"
    assert (alone.label, second.label) == ("0", "h_1")  # of one worker the rank is known, of pod-3-1 not


def test_a_lone_worker_keeps_the_device_the_user_chose() -> None:
    (alone,) = plan_workers(WorkerCounts(1, 1, 0), {"DEVICE_ID": "3"}, common={}, devices=4)
    assert "DEVICE_ID" not in alone.env
    (first, _) = plan_workers(WorkerCounts(2, 2, 0), {"DEVICE_ID": "3"}, common={}, devices=4)
    assert first.env["DEVICE_ID"] == "0"


def test_threads_are_limited_unless_the_user_or_a_lone_worker_decides() -> None:
    (first, _) = plan_workers(WorkerCounts(2, 2, 0), {"MKL_NUM_THREADS": "4"}, common={})
    assert first.env["OMP_NUM_THREADS"] == first.env["OPENBLAS_NUM_THREADS"] == "1"
    assert "MKL_NUM_THREADS" not in first.env
    (alone,) = plan_workers(WorkerCounts(1, 1, 0), {}, common={})
    assert "OMP_NUM_THREADS" not in alone.env
