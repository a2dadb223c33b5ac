"""Settings of a worker, by tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.errors import SettingsError
from muster.wire.variables import TABLE
from muster.worker.config import SecurityContext, Settings, load_settings
from tests.scheduler.processes import ROOT

BASE = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4"}


def load(**changes: str) -> Settings:
    return load_settings({**BASE, **changes})


def test_without_tls_beyond_loopback_two_switches_must_say_so() -> None:
    off = SecurityContext(enable_ssl=False)
    env = {**BASE, "MS_CONFIG_FILE": "/keys/config.json"}
    assert load_settings(env, off).config_path is None
    far = {**env, "MS_SCHED_HOST": "10.0.0.1"}
    with pytest.raises(SettingsError, match="MS_ALLOW_INSECURE=1"):
        load_settings(far, off)
    assert load_settings({**far, "MS_ALLOW_INSECURE": "1"}, off).config_path is None


def test_defaults() -> None:
    settings = load()
    assert settings == Settings(worker_num=4, worker_min=4)
    assert settings.scheduler_address == "127.0.0.1:6667"
    assert (settings.topo_timeout_s, settings.node_timeout_s) == (1800.0, 5.0)


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("MS_WORKER_MIN", "2", "worker_min", 2),
        ("MS_SCHED_HOST", "localhost", "scheduler_hosts", ("localhost",)),
        ("MS_SCHED_HOST", "[::1]", "scheduler_address", "[::1]:6667"),
        ("MS_SCHED_PORT", "65535", "scheduler_port", 65535),
        ("MS_JOB_ID", "resnet-50_a.b", "job_id", "resnet-50_a.b"),
        ("MS_NODE_ID", "gpu-host-3", "node_id", "gpu-host-3"),
        ("MS_WORKER_SPARE", "1", "spare", True),
        ("MS_TOPO_TIMEOUT", "90.5", "topo_timeout_s", 90.5),
        ("MS_COLLECTIVE_TIMEOUT", "7", "collective_timeout_s", 7.0),
        ("MS_RECONNECT_TIMEOUT", "7", "reconnect_timeout_s", 7.0),
        ("MS_LEAVE_TIMEOUT", "7", "leave_timeout_s", 7.0),
        ("MS_LAST_CALL_TIMEOUT", "8", "last_call_s", 8.0),
        ("MS_LOCAL_INDEX", "3", "local_index", 3),
        ("DEVICE_ID", "0", "device_id", 0),
        ("MS_BACKEND", "TCP", "backend", "tcp"),
        ("MS_TOPOLOGY", "rack 4", "topology", "rack 4"),
        ("MS_LOG_LEVEL", "debug", "log_level", "DEBUG"),
        ("MS_LOG_FORMAT", "JSON", "log_format", "json"),
        ("MS_SERVER_NUM", "0", "worker_num", 4),
        ("MS_NODE_TIMEOUT", "", "node_timeout_s", 5.0),
        ("CUDA_VISIBLE_DEVICES", "", "visible_devices", ()),
        ("CUDA_VISIBLE_DEVICES", "2, 3", "visible_devices", ("2", "3")),
        ("CUDA_VISIBLE_DEVICES", "0,-1,1", "visible_devices", ("0",)),
        ("CUDA_VISIBLE_DEVICES", "GPU-8f2a", "visible_devices", ("GPU-8f2a",)),
    ],
)
def test_legal_values(variable: str, value: str, field: str, expected: object) -> None:
    assert getattr(load(**{variable: value}), field) == expected


@pytest.mark.parametrize(
    ("hosts", "timeout", "without_limit"),
    [("a", "", False), ("a,b,c", "", True), ("a,b,c", "120", False), ("a", "120", False)],
)
def test_several_schedulers_are_waited_for_without_limit_unless_a_time_is_set(
    hosts: str, timeout: str, without_limit: bool
) -> None:
    settings = load(MS_SCHED_HOST=hosts, MS_RECONNECT_TIMEOUT=timeout, MS_ALLOW_INSECURE="1")
    assert settings.waits_without_limit is without_limit


@pytest.mark.parametrize(
    ("variable", "value", "legal"),
    [
        ("MS_ROLE", "", "a job with muster run -n N --scheduler -- python train.py"),
        ("MS_ROLE", "MS_SCHED", "python -m scheduler"),
        ("MS_ROLE", "MS_PSERVER", "no parameter servers"),
        ("MS_ROLE", "worker", "must be MS_WORKER"),
        ("MS_WORKER_NUM", "", "from 1 to 65536"),
        ("MS_WORKER_NUM", "0", "from 1 to 65536"),
        ("MS_WORKER_NUM", "-1", "from 1 to 65536"),
        ("MS_WORKER_NUM", "4.0", "from 1 to 65536"),
        ("MS_WORKER_NUM", "٤", "from 1 to 65536"),
        ("MS_WORKER_MIN", "5", "from 1 to 4"),
        ("MS_SERVER_NUM", "1", "0 or unset"),
        ("MS_SCHED_PORT", "0", "from 1 to 65535"),
        ("MS_SCHED_PORT", "65536", "from 1 to 65535"),
        ("MS_SCHED_HOST", "10.0.0.1:6667", "without a port"),
        ("MS_SCHED_HOST", "a b", "IPv4 address, an IPv6 address or a host name"),
        ("MS_JOB_ID", "-x", "letters, digits"),
        ("MS_JOB_ID", "a/b", "letters, digits"),
        ("MS_NODE_ID", "a b", "without blanks"),
        ("MS_NODE_ID", "x" * 129, "128 characters"),
        ("MS_NODE_ID", "*", "must be a name"),
        ("MS_NODE_ID", "a\tb", "printable"),
        ("MS_WORKER_SPARE", "yes", "0 or 1"),
        ("MS_TOPO_TIMEOUT", "0", "from 1 to 604800 seconds"),
        ("MS_TOPO_TIMEOUT", "nan", "from 1 to 604800 seconds"),
        ("MS_NODE_TIMEOUT", "soon", "from 0.5 to 3600 seconds"),
        ("MS_COLLECTIVE_TIMEOUT", "inf", "from 0.1 to 604800 seconds"),
        ("MS_LOCAL_INDEX", "-1", "from 0 to 4095"),
        ("DEVICE_ID", "gpu0", "from 0 to 4095"),
        ("MS_BACKEND", "mpi", "nccl, tcp"),
        ("MS_LOG_LEVEL", "LOUD", "DEBUG, INFO, WARNING, ERROR"),
        ("MS_LOG_FORMAT", "yaml", "text, json"),
        ("MS_INTERFACE", "e" * 65, "64 characters"),
        ("CUDA_VISIBLE_DEVICES", "2,2", "names device '2' twice"),
        ("CUDA_VISIBLE_DEVICES", "9" * 5000, "from 0 to 4095"),
    ],
)
def test_wrong_values_are_refused_in_one_sentence(variable: str, value: str, legal: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(**{variable: value})
    assert variable in caught.value.message
    assert legal in str(caught.value)
    assert value.strip()[:80] in str(caught.value) or not value.isprintable()
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("value", ["gloo", "GLOO"])
def test_a_removed_backend_is_answered_with_what_became_of_it(value: str) -> None:
    became = TABLE["MS_BACKEND"].removed["gloo"]
    with pytest.raises(SettingsError) as caught:
        load(MS_BACKEND=value)
    assert caught.value.message == f"MS_BACKEND is {value!r}: {became}."
    assert caught.value.exit_code == 2
    page = (ROOT / "docs" / "upgrading.md").read_text().replace("`", "'")
    assert became.removeprefix("the backend") in " ".join(page.split())


def test_plaintext_stays_on_this_machine_unless_asked_for() -> None:
    with pytest.raises(SettingsError, match="MS_ALLOW_INSECURE=1"):
        load(MS_SCHED_HOST="10.0.0.1")
    assert load(MS_SCHED_HOST="10.0.0.1", MS_ALLOW_INSECURE="1").allow_insecure
    assert load(MS_SCHED_HOST="10.0.0.1", MS_CONFIG_FILE="/etc/muster/config.json").config_path


def test_the_scripts_security_context_wins_over_the_environment() -> None:
    env = {**BASE, "MS_CONFIG_FILE": "/etc/a.json"}
    assert load_settings(env).config_path == Path("/etc/a.json")
    given = SecurityContext(config_file_path="/etc/b.json", client_password="geheim")
    settings = load_settings(env, given)
    assert settings.config_path == Path("/etc/b.json")
    assert settings.client_password == b"geheim"
    assert load_settings(env, SecurityContext(enable_ssl=False)).config_path is None


def test_tls_without_a_configuration_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"config\.json"):
        load_settings(BASE, SecurityContext(enable_ssl=True))


def test_passwords_do_not_show() -> None:
    settings = load_settings(
        BASE, SecurityContext(config_file_path="/c", client_password="geheim", server_password="geheim")
    )
    assert "geheim" not in repr(settings)
    assert "geheim" not in repr(SecurityContext(client_password="geheim", server_password="geheim"))


@pytest.mark.parametrize("written", ["FD77:0:0:0::1", "[fd77::1]", "fd77::0001"])
def test_an_ipv6_address_is_taken_in_its_one_form(written: str) -> None:
    env = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "1", "MS_SCHED_HOST": written, "MS_ALLOW_INSECURE": "1"}
    assert load_settings(env).scheduler_hosts == ("fd77::1",)


def test_several_schedulers_are_named_with_commas_between() -> None:
    settings = load(MS_SCHED_HOST="127.0.0.1, 127.0.0.2,127.0.0.1", MS_SCHED_PORT="7000")
    assert settings.scheduler_hosts == ("127.0.0.1", "127.0.0.2")
    assert settings.scheduler_address == "127.0.0.1:7000,127.0.0.2:7000"
    for wrong in ("a,,b", "a,b,c,d,e,f", ",a"):
        with pytest.raises(SettingsError, match="MS_SCHED_HOST"):
            load(MS_SCHED_HOST=wrong)
    with pytest.raises(SettingsError, match="loopback"):
        load(MS_SCHED_HOST="127.0.0.1,10.0.0.1")
