"""Settings: every variable's range, and one sentence that names variable, value and legal range."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.scheduler.__main__ import main
from muster.scheduler.config import load_address, load_settings
from muster.scheduler.errors import SchedulerSettingsError
from muster.wire.settings import client_options, server_options

GOOD = {"MS_WORKER_NUM": "4"}


def test_defaults() -> None:
    loaded = load_settings(GOOD)
    assert (loaded.job_id, loaded.hosts, loaded.bind_host, loaded.port) == (
        "default",
        ("127.0.0.1",),
        "",
        6667,
    )
    assert (loaded.worker_num, loaded.worker_min, loaded.spares) == (4, 4, 0)
    assert (loaded.topo_timeout_s, loaded.node_timeout_s) == (1800.0, 5.0)
    assert loaded.metrics_port is None
    assert loaded.recovery_path is None
    core = loaded.core()
    assert (core.worker_num, core.heartbeat_interval_s) == (4, 1.0)


def test_evidence_of_hangs_is_kept_where_it_is_said_else_beside_the_journal(tmp_path: Path) -> None:
    journal = {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(tmp_path)}
    said = {"MS_INCIDENT_DIR": str(tmp_path / "hangs")}
    assert load_settings(GOOD).incident_directory is None
    assert load_settings(GOOD | journal).incident_directory == tmp_path / "incidents"
    assert load_settings(GOOD | journal | said).incident_directory == tmp_path / "hangs"


def test_heartbeats_come_often_enough_for_a_short_node_timeout() -> None:
    core = load_settings(GOOD | {"MS_NODE_TIMEOUT": "0.8"}).core()
    assert core.heartbeat_interval_s * 3 < core.node_timeout_s


@pytest.mark.parametrize("seconds", [0.5, 1.0, 5.0, 60.0])
def test_a_pause_shorter_than_node_timeout_costs_no_place(seconds: float) -> None:
    """It begins up to a heartbeat after the worker's last word, and ends with the next."""
    core = load_settings(GOOD | {"MS_NODE_TIMEOUT": str(seconds)}).core()
    assert seconds + core.heartbeat_interval_s < core.node_timeout_s <= seconds + 1.5
    pings = dict(server_options(seconds)) | dict(client_options(seconds))
    assert pings["grpc.http2.ping_timeout_ms"] >= 1000 * core.node_timeout_s


def test_a_foreign_jobs_size_is_not_the_own_jobs() -> None:
    core = load_settings(GOOD | {"MS_SPARES": "2"}, serve=True).core(own_job=False)
    assert (core.worker_num, core.worker_min, core.spares) == (0, 0, 2)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("MS_ROLE", "MS_WORKER", ("MS_ROLE", "MS_SCHED", "'MS_WORKER'")),
        ("MS_ROLE", "MS_PSERVER", ("MS_ROLE", "'MS_PSERVER'", "parameter servers")),
        ("MS_SERVER_NUM", "1", ("MS_SERVER_NUM", "0 or unset", "'1'")),
        ("MS_WORKER_NUM", "0", ("MS_WORKER_NUM", "1 to 65536", "'0'")),
        ("MS_WORKER_NUM", "-3", ("MS_WORKER_NUM", "1 to 65536", "'-3'")),
        ("MS_WORKER_NUM", "four", ("MS_WORKER_NUM", "1 to 65536", "'four'")),
        ("MS_WORKER_NUM", "4.0", ("MS_WORKER_NUM", "'4.0'")),
        ("MS_WORKER_NUM", "٤", ("MS_WORKER_NUM", "'٤'")),
        ("MS_WORKER_NUM", "9" * 5000, ("MS_WORKER_NUM",)),
        ("MS_WORKER_MIN", "5", ("MS_WORKER_MIN", "1 to 4", "'5'")),
        ("MS_WORKER_MIN", "0", ("MS_WORKER_MIN", "1 to 4", "'0'")),
        ("MS_SPARES", "2000", ("MS_SPARES", "0 to 1024", "'2000'")),
        ("MS_SCHED_PORT", "0", ("MS_SCHED_PORT", "1 to 65535", "'0'")),
        ("MS_SCHED_PORT", "65536", ("MS_SCHED_PORT", "1 to 65535", "'65536'")),
        ("MS_SCHED_PORT", "72203", ("MS_SCHED_PORT", "'72203'")),
        ("MS_SCHED_HOST", "10.0.0.1:6667", ("MS_SCHED_HOST", "MS_SCHED_PORT")),
        ("MS_SCHED_HOST", "a b", ("MS_SCHED_HOST", "'a b'")),
        ("MS_JOB_ID", "a/b", ("MS_JOB_ID", "'a/b'")),
        ("MS_JOB_ID", "..", ("MS_JOB_ID", "'..'")),
        ("MS_JOB_ID", "x" * 129, ("MS_JOB_ID", "1 to 128")),
        ("MS_TOPO_TIMEOUT", "0", ("MS_TOPO_TIMEOUT", "1 to 604800 seconds", "'0'")),
        ("MS_TOPO_TIMEOUT", "nan", ("MS_TOPO_TIMEOUT", "'nan'")),
        ("MS_TOPO_TIMEOUT", "soon", ("MS_TOPO_TIMEOUT", "'soon'")),
        ("MS_NODE_TIMEOUT", "0.1", ("MS_NODE_TIMEOUT", "0.5 to 3600 seconds", "'0.1'")),
        ("MS_NODE_TIMEOUT", "inf", ("MS_NODE_TIMEOUT", "'inf'")),
        ("MS_STALL_TIMEOUT", "0", ("MS_STALL_TIMEOUT", "1 to 604800 seconds", "'0'")),
        ("MS_COLLECTIVE_TIMEOUT", "0", ("MS_COLLECTIVE_TIMEOUT", "0.1 to 604800 seconds", "'0'")),
        ("MS_HANG_TIMEOUT", "0", ("MS_HANG_TIMEOUT", "1 to 604800 seconds", "'0'")),
        ("MS_ENABLE_RECOVERY", "yes", ("MS_ENABLE_RECOVERY", "0 or 1", "'yes'")),
        ("MS_ENABLE_RECOVERY", "1", ("MS_RECOVERY_PATH", "MS_ENABLE_RECOVERY=1")),
        ("MS_RECOVERY_PATH", "/nowhere", ("MS_RECOVERY_PATH is set", "MS_ENABLE_RECOVERY is not")),
        ("MS_ALLOW_INSECURE", "true", ("MS_ALLOW_INSECURE", "0 or 1", "'true'")),
        ("MS_METRICS_HOST", "a b", ("MS_METRICS_HOST", "'a b'")),
        ("MS_METRICS_HOST", "10.0.0.1:80", ("MS_METRICS_HOST", "MS_METRICS_PORT")),
        ("MS_CONFIG_FILE", "/nowhere/config.json", ("MS_CONFIG_FILE", "/nowhere/config.json")),
        ("MS_METRICS_PORT", "99999", ("MS_METRICS_PORT", "1 to 65535", "'99999'")),
        ("MS_LOG_LEVEL", "loud", ("MS_LOG_LEVEL", "DEBUG, INFO, WARNING, ERROR", "'loud'")),
        ("RANK_TABLE_FILE", "/nowhere/table.json", ("RANK_TABLE_FILE", "/nowhere/table.json")),
        ("MS_AUDIT_LOG", "a\nb", ("MS_AUDIT_LOG", "printable")),
    ],
)
def test_a_wrong_value_ends_in_one_sentence(
    variable: str, value: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([], GOOD | {variable: value}) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("scheduler: ")
    assert told.err.count("\n") == 1
    for word in words:
        assert word in told.err


def test_the_number_of_workers_may_be_left_out_only_when_serving_several_jobs() -> None:
    with pytest.raises(SchedulerSettingsError, match="MS_WORKER_NUM is not set"):
        load_settings({})
    assert load_settings({}, serve=True).worker_num == 0


@pytest.mark.parametrize(
    ("env", "seconds"),
    [
        ({}, 600.0),
        ({"MS_COLLECTIVE_TIMEOUT": "90"}, 90.0),
        ({"MS_COLLECTIVE_TIMEOUT": "0.5"}, 1.0),
        ({"MS_COLLECTIVE_TIMEOUT": "90", "MS_HANG_TIMEOUT": "30"}, 30.0),
    ],
)
def test_a_rank_hangs_for_as_long_as_a_collective_may_take(env: dict[str, str], seconds: float) -> None:
    assert load_settings(GOOD | env).core().hang_timeout_s == seconds


def test_an_empty_variable_counts_as_unset() -> None:
    loaded = load_settings(GOOD | {"MS_SCHED_PORT": "", "MS_NODE_TIMEOUT": " ", "MS_SERVER_NUM": ""})
    assert (loaded.port, loaded.node_timeout_s) == (6667, 5.0)


@pytest.mark.parametrize(
    ("given", "host"), [("::1", "::1"), ("[fe80::1]", "fe80::1"), ("sched.example.org", "sched.example.org")]
)
def test_hosts(given: str, host: str) -> None:
    assert load_settings(GOOD | {"MS_SCHED_HOST": given}).hosts == (host,)


def test_recovery_needs_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    env = GOOD | {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(path)}
    assert load_settings(env).recovery_path == path
    path.write_text("")
    with pytest.raises(SchedulerSettingsError, match="must name a directory"):
        load_settings(env)
    assert load_settings(env | {"MS_ENABLE_RECOVERY": "0"}).recovery_path is None


def test_the_command_line_wins_over_the_environment(tmp_path: Path) -> None:
    loaded = load_settings(
        GOOD | {"MS_CONFIG_FILE": "/a/config.json", "MS_SCHED_PORT": "7000"},
        config_path=tmp_path,
        port=0,
        bind_host="0.0.0.0",
    )
    assert (loaded.config_path, loaded.port, loaded.bind_host) == (tmp_path, 0, "0.0.0.0")
    assert loaded.hosts == ("127.0.0.1",)


def test_operators_address() -> None:
    address = load_address({"MS_SCHED_HOST": "::1", "MS_SCHED_PORT": "7001", "MS_JOB_ID": "a"}, job_id="b")
    assert (address.hosts, address.port, address.job_id) == (("::1",), 7001, "b")


def _server_list(ranks: int) -> str:
    devices = [{"device_id": str(i), "rank_id": str(i)} for i in range(ranks)]
    return json.dumps({"server_list": [{"server_id": "10.0.0.1", "device": devices}], "status": "completed"})


def test_rank_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(_server_list(4))
    assert load_settings(GOOD | {"MINDSPORE_HCCL_CONFIG_PATH": str(path)}).rank_table is not None
    with pytest.raises(SchedulerSettingsError, match="MINDSPORE_HCCL_CONFIG_PATH, its old name, is"):
        load_settings(GOOD | {"RANK_TABLE_FILE": str(path), "MINDSPORE_HCCL_CONFIG_PATH": "/else"})
    table = load_settings(GOOD | {"RANK_TABLE_FILE": str(path)}).rank_table
    assert table is not None
    assert [(e.rank, e.server_id, e.device_index) for e in table.entries] == [
        (i, "10.0.0.1", i) for i in range(4)
    ]


def test_a_rank_table_says_how_many_workers_there_are(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(_server_list(4))
    env = {"MS_ROLE": "MS_SCHED", "RANK_TABLE_FILE": str(path)}
    assert load_settings(env).worker_num == 4
    assert load_settings(env | {"RANK_SIZE": "4", "DEVICE_NUM": "8"}).worker_num == 4
    with pytest.raises(
        SchedulerSettingsError, match="RANK_SIZE must be 4, the number of workers, beside RANK_TABLE"
    ):
        load_settings(env | {"RANK_SIZE": "8"})
    with pytest.raises(
        SchedulerSettingsError, match="DEVICE_NUM must be at least 4, the devices that RANK_TABLE"
    ):
        load_settings(env | {"DEVICE_NUM": "3"})
    assert load_settings(GOOD | {"RANK_SIZE": "3"}).rank_table is None  # without a table it is not ours


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "no rank table"),
        (b"\xff\xfe\x00", "not JSON"),
        (_server_list(3), "MS_WORKER_NUM must be 3"),
    ],
)
def test_a_bad_rank_table_is_refused(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SchedulerSettingsError, match=words) as caught:
        load_settings(GOOD | {"RANK_TABLE_FILE": str(path)})
    assert str(path) in str(caught.value)


VARIABLES = (
    "MS_ROLE",
    "MS_SERVER_NUM",
    "MS_WORKER_NUM",
    "MS_WORKER_MIN",
    "MS_SPARES",
    "MS_SCHED_HOST",
    "MS_SCHED_PORT",
    "MS_JOB_ID",
    "MS_TOPO_TIMEOUT",
    "MS_NODE_TIMEOUT",
    "MS_STALL_TIMEOUT",
    "MS_HANG_TIMEOUT",
    "MS_COLLECTIVE_TIMEOUT",
    "MS_ENABLE_RECOVERY",
    "MS_ALLOW_INSECURE",
    "MS_METRICS_PORT",
    "MS_METRICS_HOST",
    "MS_LOG_LEVEL",
    "MS_LOG_FORMAT",
)


@given(st.dictionaries(st.sampled_from(VARIABLES), st.text(max_size=30)))
@settings(max_examples=400, deadline=None)
def test_whatever_stands_in_a_variable_the_error_is_one_line(env: dict[str, str]) -> None:
    try:
        loaded = load_settings(GOOD | env)
    except SchedulerSettingsError as error:
        assert str(error).isprintable()
        assert "MS_" in str(error)
    else:
        assert 1 <= loaded.worker_min <= loaded.worker_num
        assert 1 <= loaded.port <= 65_535


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                (
                    "server_list",
                    "group_list",
                    "device",
                    "server_id",
                    "device_id",
                    "rank_id",
                    "instance_list",
                    "x",
                )
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(document=JSON)
@settings(max_examples=200, deadline=None)
def test_whatever_stands_in_a_rank_table_the_error_is_typed(
    tmp_path_factory: pytest.TempPathFactory, document: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed-table.json"
    path.write_text(json.dumps(document))
    with contextlib.suppress(SchedulerSettingsError):
        table = load_settings(GOOD | {"RANK_TABLE_FILE": str(path)}).rank_table
        assert table is not None
        assert [entry.rank for entry in table.entries] == [0, 1, 2, 3]


@pytest.mark.parametrize("written", ["FD77:0:0:0::1", "[fd77::1]", "fd77::0001"])
def test_an_ipv6_address_is_taken_in_its_one_form(written: str) -> None:
    assert load_address({"MS_SCHED_HOST": written}).hosts == ("fd77::1",)


def test_a_journal_in_etcd() -> None:
    found = load_settings(
        GOOD | {"MS_RECOVERY_PATH": "etcd://a,b:2380,[fd77::1]:1/muster/", "MS_JOB_ID": "j"}
    )
    assert found.recovery_path is None
    assert found.etcd is not None
    assert found.etcd.endpoints == (("a", 2379), ("b", 2380), ("fd77::1", 1))
    assert found.etcd.prefix == "/muster/j"
    assert (
        load_settings(GOOD | {"MS_RECOVERY_PATH": "etcd://a/muster", "MS_ENABLE_RECOVERY": "0"}).etcd is None
    )


@pytest.mark.parametrize(
    "wrong",
    [
        "etcd://",
        "etcd://a:2379",
        "etcd://a:0/x",
        "etcd://a:70000/x",
        "etcd://a:b/x",
        "etcd:///x",
        "etcd://a,,b/x",
        "etcd://fd77::1/x",
        "etcd://a/x y",
        "etcd://a/" + "x" * 200,
        "etcd://u@a/x",
    ],
)
def test_a_wrong_address_of_etcd_is_named(wrong: str) -> None:
    with pytest.raises(SchedulerSettingsError, match="MS_RECOVERY_PATH"):
        load_settings(GOOD | {"MS_RECOVERY_PATH": wrong})


def test_several_schedulers_need_a_journal_in_common() -> None:
    several = GOOD | {"MS_SCHED_HOST": "a,b"}
    assert load_settings(several | {"MS_RECOVERY_PATH": "etcd://e/muster"}).hosts == ("a", "b")
    with pytest.raises(SchedulerSettingsError, match="no journal in common"):
        load_settings(several)
