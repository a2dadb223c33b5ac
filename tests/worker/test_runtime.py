"""The default session of a process, and what importing the package costs."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import muster
from muster import errors
from muster.communicators import BACKENDS
from muster.errors import (
    JobEndedError,
    LeaveGranted,
    LeaveNow,
    SecurityError,
    SettingsError,
    WorkerError,
)
from muster.launch.check.command import check
from muster.wire.messages import Device
from muster.wire.variables import TABLE
from muster.worker import host, runtime
from muster.worker.config import SecurityContext, Settings
from muster.worker.host import DeviceChoice
from muster.worker.session import events
from muster.worker.session.credentials import load_keyring
from muster.worker.uplink.door import OUTER, make_door, named
from tests.scheduler.processes import environment
from tests.worker.session.machine import Machine
from tests.worker.session.scripted import StubBackend

NEED_TORCH = {
    *("CaptureError", "DataParallel", "ShardedOptimizer", "TrainingStep", "capture_step"),
    *("ParallelTrainingState", "ParallelModule", "layerwise", "load_divided", "parallelize", "save_divided"),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    runtime.process.context = SecurityContext()


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment(**env),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = "{'grpc', 'numpy', 'cryptography', 'google.protobuf', 'asyncio', 'ssl'}"
    done = run(f"import sys, muster; muster.WorkerError; print({heavy} & set(sys.modules))")
    assert done.stdout == "set()\n", done.stderr


def test_every_public_name_is_there() -> None:
    missing = [name for name in muster.__all__ if name not in NEED_TORCH and not hasattr(muster, name)]
    assert missing == []
    assert set(muster.__all__) <= set(dir(muster))
    family = {
        name
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, errors.WorkerError)
    }
    assert family <= set(muster.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        muster.nonsense  # noqa: B018


def test_what_set_ps_context_gives_adds_up() -> None:
    muster.set_ps_context(config_file_path="/etc/a.json", enable_ssl=True)
    muster.set_ps_context(client_password="geheim", server_password="x")
    assert runtime.process.context == SecurityContext("/etc/a.json", True, "geheim", "x")


def test_set_ps_context_checks_its_arguments() -> None:
    with pytest.raises(SettingsError, match="enable_ssl must be a bool; it is a str"):
        muster.set_ps_context(enable_ssl="yes")  # type: ignore[arg-type]


def test_set_ps_context_takes_what_later_releases_give() -> None:
    muster.set_ps_context(enable_ps=True, client_password="geheim")
    assert runtime.process.context == SecurityContext(client_password="geheim")
    with pytest.raises(SettingsError, match="enable_ps must be a bool"):
        muster.set_ps_context(enable_ps=1)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"scheduler_manage_port has no counterpart.*muster status"):
        muster.set_ps_context(scheduler_manage_port=11202)


def test_the_scheduler_s_role_takes_what_the_script_has_set() -> None:
    env = {"MS_CONFIG_FILE": "/a.json", "MS_SERVER_PASSWORD_FILE": "/password", "MS_WORKER_NUM": "2"}
    context = SecurityContext("/b.json", True, "client's", "server's")
    given = {"MS_CONFIG_FILE": "/b.json", "MS_SERVER_PASSWORD": "server's", "MS_WORKER_NUM": "2"}
    assert context.for_scheduler(env) == given
    assert SecurityContext().for_scheduler(env) == env
    assert SecurityContext(enable_ssl=False).for_scheduler(env)["MS_CONFIG_FILE"] == ""
    with pytest.raises(SettingsError, match=r"enable_ssl is True, but there is no config\.json"):
        SecurityContext(enable_ssl=True).for_scheduler({})


def test_a_wrong_setting_ends_the_script_with_one_sentence() -> None:
    code = (
        "import sys, muster\n"
        "try: muster.init()\n"
        "except muster.WorkerError as error: print(error); sys.exit(error.exit_code)"
    )
    done = run(code, MS_ROLE="MS_WORKER", MS_WORKER_NUM="none")
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == "MS_WORKER_NUM must be a whole number from 1 to 65536; it is 'none'.\n"


def test_release_without_a_session_does_nothing() -> None:
    muster.release()


def test_a_broken_configuration_names_the_file(tmp_path: Path) -> None:
    settings = Settings(worker_num=1, worker_min=1, config_path=tmp_path / "config.json")
    with pytest.raises(SettingsError, match=r"config\.json"):
        load_keyring(settings, {})


def test_without_a_configuration_there_are_no_credentials() -> None:
    assert load_keyring(Settings(worker_num=1, worker_min=1), {}) is None


def test_a_certificate_that_is_none_is_a_matter_of_security(tmp_path: Path) -> None:
    for name in ("server.p12", "client.p12", "ca.crt"):
        (tmp_path / name).write_text("nonsense")
    (tmp_path / "config.json").write_text(
        '{"server_cert_path": "server.p12", "client_cert_path": "client.p12", "ca_cert_path": "ca.crt"}'
    )
    settings = Settings(worker_num=1, worker_min=1, config_path=tmp_path / "config.json")
    with pytest.raises(SecurityError, match=r"client\.p12|ca\.crt"):
        load_keyring(settings, {"MS_CLIENT_PASSWORD": "x"})


def test_what_may_pass_is_tried_again() -> None:
    failures = [SettingsError("not yet"), SettingsError("not yet")]
    slept: list[float] = []

    def attempt() -> str:
        if failures:
            raise failures.pop()
        return "there"

    found = runtime.retried(attempt, SettingsError, pauses_s=(1.0, 2.0, 4.0), sleep=slept.append)
    assert (found, slept) == ("there", [1.0, 2.0])


def test_what_does_not_pass_is_raised_in_the_end() -> None:
    def attempt() -> None:
        raise SettingsError("never")

    slept: list[float] = []
    with pytest.raises(SettingsError, match="never"):
        runtime.retried(attempt, SettingsError, pauses_s=(1.0, 2.0), sleep=slept.append)
    assert slept == [1.0, 2.0]


def test_what_cannot_pass_is_raised_at_once() -> None:
    def attempt() -> None:
        raise SecurityError("no")

    with pytest.raises(SecurityError):
        runtime.retried(attempt, SettingsError, sleep=lambda _: pytest.fail("it slept"))


def test_a_failed_init_leaves_nothing_behind() -> None:
    code = (
        "import muster\n"
        "for _ in range(2):\n"
        "    try: muster.init()\n"
        "    except muster.SchedulerUnreachableError: print('unreachable')\n"
        "try: muster.get_rank()\n"
        "except muster.NotInitializedError: print('none')\n"
    )
    env = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "1", "MS_TOPO_TIMEOUT": "1", "MS_BACKEND": "tcp"}
    done = run(code, MS_SCHED_PORT="1", **env)
    assert done.stdout == "unreachable\nunreachable\nnone\n", done.stderr


@pytest.mark.parametrize(("argument", "variable"), [("", "gloo"), ("'gloo'", "")])
def test_who_asks_for_a_removed_backend_reads_what_became_of_it(argument: str, variable: str) -> None:
    env = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "1", "MS_BACKEND": variable}
    done = run(f"import muster\nmuster.init({argument})\n", **env)
    assert done.returncode == 2, done.stderr
    assert TABLE["MS_BACKEND"].removed["gloo"] in done.stderr
    assert "Traceback" not in done.stderr


class Opening:
    """Stands for a session that waits for its place: ``wait`` plays what happens meanwhile."""

    released = False

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait
        self.ended: list[BaseException | None] = []
        self.handlers: list[object] = []
        self.told: list[str] = []

    def leave_now(self, reason: str) -> None:
        self.told.append(reason)

    def open(self) -> None:
        try:
            self._wait()
        finally:
            self.handlers.append(signal.getsignal(signal.SIGTERM))

    def end(self, error: BaseException | None) -> None:
        self.ended.append(error)
        self.released = True


Begin = Callable[[Callable[[], object]], Opening]


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Makes ``init`` open such a session."""

    def begin(wait: Callable[[], object]) -> Opening:
        session = Opening(wait)
        monkeypatch.setattr(runtime, "open_session", lambda *_, sleep: session)
        monkeypatch.setattr(runtime, "watch_the_end", lambda *_: None)
        monkeypatch.setattr(runtime.process, "session", None)
        return session

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield begin
    finally:
        signal.signal(signal.SIGTERM, before)


def sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


def test_sigterm_while_waiting_for_a_place_ends_without_an_error(opening: Begin) -> None:
    session = opening(sigterm)
    with pytest.raises(SystemExit) as caught:
        muster.init()
    assert caught.value.code == 143
    assert [type(error) for error in session.ended] == [LeaveNow]
    assert session.handlers == [signal.SIG_DFL], "a second SIGTERM must end it at once"


def test_the_same_sigterm_to_process_and_group_is_one(
    opening: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opening(sigterm)
    monkeypatch.setattr("muster.worker.ending.pause_for_twin", sigterm)
    with pytest.raises(SystemExit) as caught:
        muster.init()
    assert caught.value.code == 143
    assert session.handlers == [signal.SIG_DFL]


def test_sigterm_raises_nothing_amid_what_init_does(opening: Begin) -> None:
    """It may interrupt an import, whose lock then stays locked, or what drops errors."""
    went_on: list[bool] = []

    def wait() -> None:
        sigterm()
        went_on.append(True)

    session = opening(wait)
    with pytest.raises(SystemExit):
        muster.init()
    assert went_on == [True]
    assert session.told == ["SIGTERM"]  # so what waits does not wait on


def test_sigterm_ends_a_pause_before_the_next_attempt() -> None:
    leaving = runtime.Leaving()
    leaving.ask()
    with pytest.raises(LeaveNow):
        leaving.sleep(1000.0)


def test_a_drain_while_waiting_for_a_place_is_a_good_end(opening: Begin) -> None:
    def drained() -> None:
        raise LeaveGranted("This worker leaves the job: maintenance.")

    session = opening(drained)
    with pytest.raises(SystemExit) as caught:
        muster.init()
    assert caught.value.code == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert len(session.ended) == 1


@pytest.mark.parametrize("ok", [True, False])
def test_a_job_that_ends_while_waiting_for_a_place_is_a_good_end_if_it_ends_well(
    opening: Begin, ok: bool
) -> None:
    def over() -> None:
        raise JobEndedError("All members have completed the training.", ok=ok)

    opening(over)
    with pytest.raises((SystemExit, JobEndedError)) as caught:
        muster.init()
    assert (isinstance(caught.value, SystemExit) and caught.value.code == 0) == ok


def test_sigterm_has_its_old_meaning_after_init(opening: Begin) -> None:
    session = opening(lambda: None)
    muster.init()
    assert session.handlers != [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_scripts_own_goes_before(opening: Begin) -> None:
    heard: list[int] = []

    def own(number: int, frame: object) -> None:
        heard.append(number)

    session = opening(sigterm)
    signal.signal(signal.SIGTERM, own)
    muster.init()
    assert (heard, session.ended) == ([signal.SIGTERM], [])
    assert signal.getsignal(signal.SIGTERM) is own


def test_in_another_thread_signals_are_left_alone(opening: Begin) -> None:
    session = opening(lambda: None)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(muster.init).result(60)
    assert session.handlers == [signal.SIG_DFL]


def test_a_check_that_is_ended_while_it_waits_does_not_say_that_all_agree(
    opening: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MS_COLLECTIVE_TIMEOUT", "60")  # the check would set it, for good
    opening(sigterm)
    with pytest.raises(WorkerError, match="before all workers had come"):
        check(argparse.Namespace(size_mib=1, partners=1))


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit(1)", "this process ends with exit code 1, as <string>, line 4, asks"),
        ("exit(1)", "this process ends with exit code 1, as <string>, line 4, asks"),
        ("sys.exit('because of this')", "because of this"),
        ("raise ValueError('because of that')", "ValueError: because of that"),
        ("raise muster.WorkerError('in words')", "muster: <string>, line 4: in words"),
        ("sys.exit(3)", ""),
        ("exec(compile('sys.exit(1)', muster.programs.agent.__file__, 'exec'))", None),
    ],
)
def test_every_exit_of_1_carries_its_cause(end: str, said: str | None) -> None:
    """An agent's is that of its script, which has said why."""
    watch = "from muster.worker.ending import watch_the_end\nwatch_the_end(lambda error: None, lambda: False)"
    script = f"import sys, muster, muster.programs.agent\n{watch}\n{end}\n"
    done = run(script)
    assert done.returncode == (3 if said == "" else 1)
    assert (said or "") in done.stderr
    assert ("exit code 1" in done.stderr) == (said or "").startswith("this process")


class WarmUp:
    """Notes what is asked of it."""

    def __init__(self, asked: list[object], ordinal: int) -> None:
        self._asked = asked
        asked.append(ordinal)

    def load(self) -> None:
        self._asked.append("load")


@pytest.mark.parametrize(("spare", "ordinal", "warmed"), [("0", 2, 2), ("0", -1, -1), ("1", 2, -1)])
def test_a_gpu_is_warmed_at_once_but_for_a_spares(
    monkeypatch: pytest.MonkeyPatch, spare: str, ordinal: int, warmed: int
) -> None:
    """And its library is loaded no sooner than the worker joins: it would hold up other imports."""
    asked: list[object] = []
    kind = type(BACKENDS["nccl"])
    warm_up: Any = partial(WarmUp, asked)
    monkeypatch.setitem(BACKENDS, "nccl", kind(lambda needs: StubBackend(), warm_up=warm_up))
    monkeypatch.setattr(host, "choose_device", lambda settings: DeviceChoice(Device("cuda", 7), ordinal, 4))
    env = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_PORT": "1", "MS_BACKEND": "nccl"}
    session = runtime.open_session(env | {"MS_WORKER_SPARE": spare}, SecurityContext())
    assert asked == [warmed]
    session.release()


# ---------------------------------------------------------------- behind an uplink


@pytest.mark.parametrize("jitter", [0.3, 0.999])
def test_who_found_neither_uplink_nor_scheduler_for_long_pauses_less_than_a_second(
    monkeypatch: pytest.MonkeyPatch, jitter: float
) -> None:
    """An uplink that was stopped has its workers back soon after it moves again."""
    made: dict[str, Any] = {}
    monkeypatch.setattr("muster.worker.session.session.Session", lambda *_, **parts: made.update(parts))
    inner, outer = make_door()
    env = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_PORT": "1", "MS_BACKEND": "tcp"}
    try:
        runtime.open_session(env | {OUTER: named(outer)}, SecurityContext())
    finally:
        inner.close()
        outer.close()
        made["backend"].close()
    worker = Machine(made["timing"], jitter=jitter).running()
    stopped_at = worker.now
    while worker.now < stopped_at + 25.0:
        lost_at = worker.now
        worker.feed(events.StreamLost(worker.stream, "no sign of life"))
        while not any(isinstance(each, events.Connect) for each in worker.last.notices):
            worker.tick_at_deadline()
        assert worker.now <= lost_at + 0.75
        worker.now += 1.0  # neither answers
