"""The operator's client: what goes wrong is said in words."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from muster.certs.errors import CertificateError, NameMismatchError
from muster.certs.pki.identity import Identity
from muster.scheduler.cli.client import Following, RefusedByScheduler, SchedulerClient, UnreachableError
from muster.scheduler.config import Address
from tests.ports import free_port
from tests.scheduler.processes import Pki, Scheduler, environment, run_scheduler, scheduler


@pytest.fixture(scope="module")
def running(pki: Pki) -> Iterator[Scheduler]:
    with scheduler(**pki.env()) as process:
        yield process


def address(pki: Pki | None, port: int, *, host: str = "127.0.0.1", job: str = "default") -> Address:
    return Address((host,), port, job, pki.config if pki is not None else None)


def test_status(running: Scheduler, pki: Pki) -> None:
    for host in ("127.0.0.1", "localhost"):
        with SchedulerClient(address(pki, running.port, host=host), pki.env()) as client:
            reply = client.status()
        assert (reply.job_id, reply.state, reply.worker_num) == ("default", "forming", 2)


def test_a_refusal_has_its_code(running: Scheduler, pki: Pki) -> None:
    with SchedulerClient(address(pki, running.port), pki.env()) as client:
        with pytest.raises(RefusedByScheduler, match="needs operator") as caught:
            client.drain("node-0", "")
        assert caught.value.code == "PERMISSION_DENIED"
    operator = SchedulerClient(
        address(pki, running.port), pki.env(), certificate=pki.directory / "operator.p12"
    )
    with operator, pytest.raises(RefusedByScheduler, match="no node 'node-0'") as caught:
        operator.drain("node-0", "")
    assert caught.value.code == "NOT_FOUND"


def test_nobody_there(pki: Pki) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(UnreachableError, match=f"127.0.0.1:{port}: Connection refused"):
            SchedulerClient(address(pki, port), pki.env())
        with (
            SchedulerClient(address(None, port), {}) as client,
            pytest.raises(UnreachableError, match="MS_SCHED_PORT"),
        ):
            client.status()


def test_a_scheduler_that_is_stopped(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.scheduler.cli.client.TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # its system accepts, and nobody answers
        port = stopped.getsockname()[1]
        with pytest.raises(UnreachableError) as caught:
            SchedulerClient(address(pki, port), pki.env())
    assert str(caught.value).startswith(
        f"No scheduler can be reached at 127.0.0.1:{port}: it accepts connections but does not answer. Check"
    )


def test_who_waits_longer_for_stacks_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.scheduler.cli.client.STACKS_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        port = stopped.getsockname()[1]
        with (
            SchedulerClient(address(None, port), {}) as client,
            pytest.raises(UnreachableError, match=r"did not answer within 0\.2 s"),
        ):
            client.stacks()


HOSTS = ("127.0.0.1", "127.0.0.2")


@pytest.fixture
def port() -> int:
    """Free on all addresses."""
    return free_port("0.0.0.0")


def test_of_several_schedulers_the_next_to_lead_is_waited_for(port: int) -> None:
    replies: list[str] = []

    def ask() -> None:
        with SchedulerClient(Address(HOSTS, port, "default", None), {}, wait_s=60.0) as client:
            replies.append(client.status().state)

    with pytest.raises(UnreachableError, match="None of the schedulers"):
        SchedulerClient(Address(HOSTS, port, "default", None), {}, wait_s=0.0)
    asking = threading.Thread(target=ask)
    asking.start()
    with scheduler(port=str(port), MS_SCHED_HOST=HOSTS[1]):
        asking.join(100.0)
    assert replies == ["forming"]


def test_who_watches_goes_on_with_the_scheduler_that_leads_next(port: int) -> None:
    address = Address(HOSTS, port, "default", None)
    with scheduler(port=str(port), MS_SCHED_HOST=HOSTS[0]):
        one = Following(lambda: SchedulerClient(address, {}, wait_s=60.0), several=False)
        several = Following(lambda: SchedulerClient(address, {}, wait_s=60.0), several=True)
        assert one.status().state == several.status().state == "forming"
    with one, pytest.raises(UnreachableError):
        one.status()
    with scheduler(port=str(port), MS_SCHED_HOST=HOSTS[1]), several:
        assert several.status().state == "forming"


def test_a_scheduler_for_another_job_is_not_believed(running: Scheduler, pki: Pki) -> None:
    with pytest.raises(CertificateError, match="'default', not 'other'"):
        SchedulerClient(address(pki, running.port, job="other"), pki.env())


def test_a_certificate_for_another_host_is_not_believed(own_pki: Pki) -> None:
    own_pki.issue("server", Identity("default", "scheduler"), ("sched.example.org",))
    with (
        scheduler(**own_pki.env()) as running,
        pytest.raises(NameMismatchError, match=r"sched\.example\.org"),
    ):
        SchedulerClient(address(own_pki, running.port), own_pki.env())


def test_a_scheduler_of_another_authority_is_not_believed(running: Scheduler, own_pki: Pki) -> None:
    with pytest.raises(CertificateError, match="not trusted here"):
        SchedulerClient(address(own_pki, running.port), own_pki.env())


@pytest.mark.parametrize("command", [("status",), ("health",), ("drain", "node-0")])
def test_a_command_without_tls_is_told_that_the_scheduler_speaks_it(
    running: Scheduler, command: tuple[str, ...]
) -> None:
    asked = run_scheduler(*command, env=environment(MS_SCHED_PORT=str(running.port)))
    assert (asked.returncode, asked.stdout) == (1, "")
    assert asked.stderr == (
        f"scheduler: The scheduler at {running.target} speaks TLS, and no config.json is set here. "
        "Set MS_CONFIG_FILE, or give --config.\n"
    )


@pytest.mark.parametrize("command", [("status",), ("health",), ("drain", "node-0")])
def test_a_command_with_tls_is_told_that_the_scheduler_does_not_speak_it(
    pki: Pki, command: tuple[str, ...]
) -> None:
    with scheduler() as plain:
        asked = plain.command(*command, **pki.env())
    assert (asked.returncode, asked.stdout) == (1, "")
    assert f"scheduler: {plain.target} does not speak TLS. " in asked.stderr


def test_health_by_the_schedulers_own_certificate(running: Scheduler, pki: Pki) -> None:
    with SchedulerClient(address(pki, running.port), pki.env(), role="scheduler") as client:
        assert client.health() == "SERVING"


def test_the_health_command_of_a_probe() -> None:
    with scheduler() as plain:
        healthy = plain.command("health", "--host", "127.0.0.1", MS_SCHED_HOST="not-this-one.invalid")
        assert (healthy.returncode, healthy.stdout, healthy.stderr) == (0, "SERVING\n", "")
        plain.signal(signal.SIGKILL)
        plain.wait()
        gone = plain.command("health")
    assert gone.returncode == 1
    assert "No scheduler can be reached" in gone.stderr


def test_the_health_command_over_mutual_tls(running: Scheduler) -> None:
    env = {key: value for key, value in running.env.items() if key != "MS_CLIENT_PASSWORD"}
    env["MS_SCHED_PORT"] = str(running.port)
    healthy = run_scheduler("health", env=env)
    assert (healthy.returncode, healthy.stdout, healthy.stderr) == (0, "SERVING\n", "")
