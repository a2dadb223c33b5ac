"""Both layouts of rank tables are read; whatever is wrong is named with its place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from muster.wire.rank_table import RankTableEntry, RankTableError, parse_rank_table

SERVERS: dict[str, Any] = {
    "version": "1.0",
    "server_count": "2",
    "server_list": [
        {
            "server_id": "10.0.0.2",
            "device": [
                {"device_id": "4", "device_ip": "192.168.0.4", "rank_id": "2"},
                {"device_id": 5, "device_ip": "192.168.0.5", "rank_id": 3},
            ],
            "host_nic_ip": "reserve",
        },
        {
            "server_id": "10.0.0.1",
            "device": [
                {"device_id": "0", "rank_id": "0"},
                {"device_id": "1", "rank_id": "1"},
            ],
        },
    ],
    "status": "completed",
}
GROUPS: dict[str, Any] = {
    "board_id": "0x0000",
    "deploy_mode": "lab",
    "group_count": "1",
    "group_list": [
        {
            "device_num": "2",
            "server_num": "1",
            "group_name": "",
            "instance_count": "2",
            "instance_list": [
                {"devices": [{"device_id": "1", "device_ip": "i"}], "rank_id": "1", "server_id": "alpha"},
                {"devices": [{"device_id": "0", "device_ip": "i"}], "rank_id": "0", "server_id": "alpha"},
            ],
        }
    ],
    "para_plane_nic_num": "2",
    "status": "completed",
}


def test_server_list() -> None:
    assert parse_rank_table(SERVERS).entries == (
        RankTableEntry(0, "10.0.0.1", 0),
        RankTableEntry(1, "10.0.0.1", 1),
        RankTableEntry(2, "10.0.0.2", 4),
        RankTableEntry(3, "10.0.0.2", 5),
    )


def test_group_list() -> None:
    assert parse_rank_table(GROUPS).entries == (RankTableEntry(0, "alpha", 0), RankTableEntry(1, "alpha", 1))


def set_at(*path: str | int, to: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return change


def drop(*path: str | int) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return change


DEVICE = ("server_list", 0, "device", 0)
INSTANCE = ("group_list", 0, "instance_list", 0)
FAULTS: list[tuple[dict[str, Any], Callable[[Any], None], str, str]] = [
    (SERVERS, drop("server_list"), "the document", "neither"),
    (SERVERS, set_at("group_list", to=[]), "the document", "both"),
    (SERVERS, set_at("server_list", to={}), "server_list", "must be a JSON array, not an object"),
    (SERVERS, set_at("server_list", to=[]), "server_list", "is empty"),
    (SERVERS, set_at("server_list", 1, to="x"), "server_list[1]", "must be a JSON object, not a string"),
    (SERVERS, set_at("server_count", to="3"), "server_count", "is '3', but 2 are listed"),
    (SERVERS, set_at("status", to="initializing"), "status", "only a completed table"),
    (SERVERS, drop("server_list", 0, "server_id"), "server_list[0].server_id", "is missing"),
    (SERVERS, set_at("server_list", 0, "server_id", to=" "), "server_list[0].server_id", "printable"),
    (SERVERS, set_at("server_list", 0, "server_id", to="a\x7f"), "server_list[0].server_id", "'a\\x7f'"),
    (SERVERS, drop("server_list", 0, "device"), "server_list[0].device", "is missing"),
    (SERVERS, drop(*DEVICE, "rank_id"), "server_list[0].device[0].rank_id", "is missing"),
    (SERVERS, set_at(*DEVICE, "rank_id", to="-1"), "server_list[0].device[0].rank_id", "integer from 0 on"),
    (SERVERS, set_at(*DEVICE, "rank_id", to=True), "server_list[0].device[0].rank_id", "not True"),
    (SERVERS, set_at(*DEVICE, "rank_id", to=1.5), "server_list[0].device[0].rank_id", "not 1.5"),
    (SERVERS, set_at(*DEVICE, "device_id", to=4096), "server_list[0].device[0].device_id", "from 0 to 4095"),
    (SERVERS, set_at("server_list", 0, "server_id", to="x" * 254), "server_list[0].server_id", "has 254"),
    (SERVERS, set_at(*DEVICE, "device_id", to="²"), "server_list[0].device[0].device_id", "integer"),
    (SERVERS, set_at(*DEVICE, "rank_id", to=4), "server_list[0].device[0].rank_id", "from 0 to 3"),
    (SERVERS, set_at(*DEVICE, "rank_id", to=3), "server_list[0].device[1].rank_id", "as is that of"),
    (SERVERS, set_at(*DEVICE, "device_id", to=5), "server_list[0].device[1]", "names device 5"),
    (GROUPS, set_at("group_count", to=2), "group_count", "1 are listed"),
    (GROUPS, drop("group_list", 0, "instance_list"), "group_list[0].instance_list", "is missing"),
    (GROUPS, set_at("group_list", 0, "device_num", to="8"), "group_list[0].device_num", "2 are listed"),
    (GROUPS, set_at("group_list", 0, "instance_count", to=1), "group_list[0].instance_count", "2 are"),
    (GROUPS, set_at("group_list", 0, "server_num", to=2), "group_list[0].server_num", "1 are listed"),
    (GROUPS, set_at(*INSTANCE, "devices", to=[]), "group_list[0].instance_list[0].devices", "is empty"),
    (
        GROUPS,
        set_at(*INSTANCE, "devices", to=[{"device_id": 0}, {"device_id": 1}]),
        "group_list[0].instance_list[0].devices",
        "has 2 devices",
    ),
    (GROUPS, set_at(*INSTANCE, to=None), "group_list[0].instance_list[0]", "not null"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "harm", "where", "what"), FAULTS)
def test_every_fault_is_named_with_its_place(
    document: dict[str, Any], harm: Callable[[Any], None], where: str, what: str
) -> None:
    broken = copy.deepcopy(document)
    harm(broken)
    with pytest.raises(RankTableError) as caught:
        parse_rank_table(broken)
    assert caught.value.where == where
    assert what in caught.value.what


@pytest.mark.parametrize("document", [None, [], "x", 3, True])
def test_a_document_that_is_no_object_is_refused(document: object) -> None:
    with pytest.raises(RankTableError, match="the document: must be a JSON object"):
        parse_rank_table(document)
