"""Rank tables as ``muster ranktable`` writes them."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from muster.__main__ import main
from muster.errors import SettingsError
from muster.launch.rank_table import to_text
from muster.launch.rank_table_file import make_table, merge_tables, parse_interval
from muster.wire.rank_table import parse_rank_table, ranks_of


def test_an_interval_leaves_out_its_end() -> None:
    assert parse_interval("[4,8)") == (4, 5, 6, 7)


@pytest.mark.parametrize(
    "text",
    [
        *("4-8", "[4,8]", "[8,4)", "[0,0)", "[a,b)", "[4)", "[0,5000)", "", "[-1,2)"),
        *("[٠,٨)", f"[0,{'9' * 5000})"),
    ],
)
def test_other_intervals_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--device_num"):
        parse_interval(text)


def test_the_scheduler_reads_what_is_written(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    assert main(["ranktable", "--device_num", "[4,6)", "--hosts", "localhost", "--output", str(file)]) == 0
    table = json.loads(file.read_text())
    assert (table["version"], table["server_count"], table["status"]) == ("1.0", "1", "completed")
    entries = parse_rank_table(table).entries
    assert [(entry.rank, entry.server_id, entry.device_index) for entry in entries] == [
        (0, "localhost", 4),
        (1, "localhost", 5),
    ]


def test_the_default_is_this_host_and_a_telling_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ranktable", "--device_num", "[0,2)"]) == 0
    name = socket.gethostname()
    table = json.loads((tmp_path / f"rank_table_2p_01_{name}.json").read_text())
    assert [server["server_id"] for server in table["server_list"]] == [name]


def test_merging_numbers_ranks_again_in_the_order_given() -> None:
    first, second = (make_table([(name, name)], (0, 1)) for name in ("b", "a"))
    merged = merge_tables([("b.json", first), ("a.json", second)])
    entries = parse_rank_table(merged).entries
    assert [(entry.rank, entry.server_id, entry.device_index) for entry in entries] == [
        *((0, "b", 0), (1, "b", 1), (2, "a", 0), (3, "a", 1))
    ]
    assert merged["server_count"] == "2"


def test_numbers_may_be_json_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    devices = [{"device_id": device, "rank_id": 11 - device} for device in (9, 10)]
    (tmp_path / "a.json").write_text(json.dumps({"server_list": [{"server_id": "a", "device": devices}]}))
    assert main(["ranktable", "merge", "a.json"]) == 0
    entries = parse_rank_table(json.loads((tmp_path / "rank_table_2p_109_a.json").read_text())).entries
    assert [(entry.rank, entry.device_index) for entry in entries] == [(0, 10), (1, 9)]


def test_a_table_of_many_devices_has_a_name_that_a_file_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ranktable", "--device_num", "[0,4096)", "--hosts", "a"]) == 0
    assert (tmp_path / "rank_table_4096p_0-4095_a.json").exists()


@pytest.mark.parametrize(
    ("document", "names", "devices", "expected"),
    [
        ("servers", ("10.0.0.1", "alpha"), (0, 1), (1, 0)),
        ("servers", ("10.0.0.2",), (0, 1), (2, None)),
        ("servers", ("10.0.0.1",), (1, 1), (None, None)),
        ("groups", ("10.0.0.1",), (0, 1), (1, 0)),
    ],
)
def test_ranks_are_looked_up_by_host_and_device(
    document: str, names: tuple[str, ...], devices: tuple[int, ...], expected: tuple[int | None, ...]
) -> None:
    lines = [("alpha", 0, 1), ("10.0.0.1", "1", "0"), ("10.0.0.2", 0, 2)]
    servers = [
        {"server_id": name, "device": [{"device_id": device, "rank_id": rank}]}
        for name, device, rank in lines
    ]
    instances = [
        {"server_id": "10.0.0.1", "rank_id": rank, "devices": [{"device_id": device}]}
        for _, device, rank in lines[:2]
    ]
    tables = {
        "servers": {"server_list": servers},
        "groups": {"group_list": [{"instance_list": instances}]},
    }
    assert ranks_of(parse_rank_table(tables[document]), names, devices) == expected


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([], "no server_list"),
        ({"server_list": []}, "no server_list"),
        ({"server_list": [{}]}, "server_id"),
        ({"server_list": [{"server_id": "a", "device": []}]}, "is empty"),
        ({"server_list": [{"server_id": "a\n", "device": []}]}, "printable"),
        ({"server_list": [{"server_id": ["a"], "device": [{"device_id": 0, "rank_id": 0}]}]}, "server_id"),
        ({"server_list": [{"server_id": "a", "device": [{"device_id": 0, "rank_id": True}]}]}, "rank_id"),
        ({"server_list": [{"server_id": "a", "device": [{"device_id": 0, "rank_id": "٤"}]}]}, "rank_id"),
        (
            {"server_list": [{"server_id": "a", "device": [{"device_id": 0, "rank_id": 0}] * 2}]},
            "device 0 of server a, as",
        ),
        ({"server_list": [{"server_id": "a", "device": [{"device_id": "0"}]}]}, "rank_id"),
    ],
)
def test_what_is_no_table_cannot_be_merged(table: object, words: str) -> None:
    with pytest.raises(SettingsError, match=rf"x\.json.*{words}"):
        merge_tables([("x.json", table)])


def test_what_merging_keeps_may_be_nested_too_deeply_to_be_written() -> None:
    kept: list[object] = []
    for _ in range(100_000):
        kept = [kept]
    with pytest.raises(SettingsError, match="nested too deeply"):
        to_text({**make_table([("a", "a")], (0,)), "note": kept})


def test_mistakes_end_with_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps(make_table([("a", "a")], (0,))))
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    for arguments, words in (
        (["--device_num", "[0,2)", "--output", str(file)], "exists already"),
        (["merge", str(file), str(file), "--output", str(tmp_path / "all.json")], "host 'a' stands in"),
        (["merge", str(tmp_path / "none.json")], "none.json cannot be read: No such file or directory."),
        (["merge", str(deep)], "cannot be read as JSON"),
        (["merge"], "nothing to merge"),
        (["--device_num", f"[0,{'9' * 5000})"], "--device_num is"),
        (["--device_num", "[0,2)", "--output", str(tmp_path / ("x" * 300))], "cannot be written"),
        (["--device_num", "[0,2)", "--hosts", "a,a"], "names a host twice"),
    ):
        assert main(["ranktable", *arguments]) == 2
        assert words in capsys.readouterr().err
