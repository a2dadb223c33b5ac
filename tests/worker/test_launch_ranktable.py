"""Rank tables as ``python -m worker ranktable`` writes them."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from scheduler.core.rank_table import parse_rank_table
from worker.__main__ import main
from worker.core.rank_table_file import make_table, merge_tables, parse_interval
from worker.errors import SettingsError


def test_an_interval_leaves_out_its_end() -> None:
    assert parse_interval("[4,8)") == (4, 5, 6, 7)


@pytest.mark.parametrize("text", ["4-8", "[4,8]", "[8,4)", "[0,0)", "[a,b)", "[4)", "[0,5000)", "", "[-1,2)"])
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


def test_merging_numbers_ranks_anew_in_the_order_given() -> None:
    first, second = (make_table([(name, name)], (0, 1)) for name in ("b", "a"))
    merged = merge_tables([("b.json", first), ("a.json", second)])
    entries = parse_rank_table(merged).entries
    assert [(entry.rank, entry.server_id, entry.device_index) for entry in entries] == [
        *((0, "b", 0), (1, "b", 1), (2, "a", 0), (3, "a", 1))
    ]
    assert merged["server_count"] == "2"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([], "no server_list"),
        ({"server_list": [{}]}, "server_id"),
        ({"server_list": [{"server_id": "a", "device": [{"device_id": "0"}]}]}, "rank_id"),
    ],
)
def test_what_is_no_table_cannot_be_merged(table: object, words: str) -> None:
    with pytest.raises(SettingsError, match=rf"x\.json.*{words}"):
        merge_tables([("x.json", table)])


def test_mistakes_end_with_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps(make_table([("a", "a")], (0,))))
    for arguments, words in (
        (["--device_num", "[0,2)", "--output", str(file)], "exists already"),
        (["merge", str(file), str(file), "--output", str(tmp_path / "all.json")], "host 'a' stands in"),
        (["merge", str(tmp_path / "none.json")], "cannot be read"),
        (["--device_num", "[0,2)", "--hosts", "a,a"], "names a host twice"),
    ):
        assert main(["ranktable", *arguments]) == 2
        assert words in capsys.readouterr().err
