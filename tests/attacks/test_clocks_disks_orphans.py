"""Attacks without the network: clocks that jump, disks that fill, files that are none, orphans."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

from muster.bench.soak.clock import CLOCK_VARIABLE, shift
from muster.scheduler.config import load_settings as scheduler_settings
from muster.training import checkpoint
from muster.training.checkpoint import CheckpointError
from muster.training.sampler import ShardedSampler
from muster.training.state import TrainingState
from muster.wire.errors import RemediedError
from muster.wire.files import beside
from muster.worker.config import load_settings as worker_settings
from tests.attacks.field import environment_of, make_pki, start_victims
from tests.attacks.on_one_job.test_identity import join
from tests.disks import small_disk
from tests.ports import free_port
from tests.scheduler.processes import ROOT, Pki, Stream, channel, environment, scheduler
from tests.scheduler.serve.test_metrics import read
from tests.waiting import LIMIT_S, wait_for

DAY_S = 86_400.0
JUMPING = """
import os
from muster.bench.soak.clock import CLOCK_VARIABLE, follow
follow(os.environ[CLOCK_VARIABLE])
"""


# ---------------------------------------------------------------- clocks


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return make_pki(tmp_path_factory.mktemp("keys") / "pki")


def steps(port: int) -> float:
    """The step that all have finished, from the metrics, which show it without a certificate's dates."""
    while True:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as answer,
        ):
            [found] = re.findall(r"^muster_step\S* (\S+)$", answer.read().decode(), re.MULTILINE)
            return float(found)


@pytest.mark.system
def test_a_clock_that_jumps_ends_no_membership(pki: Pki, tmp_path: Path) -> None:
    """Asset: the membership; position: sets the time of day, by NTP or as root.

    Ten years back and thirty ahead, in all processes. Streams stand through it; new connections are judged by
    the dates of certificates, and refused in words. Two defences, of which one suffices: silence is counted
    by the monotonic clock, and not while the scheduler itself seems to stand still.
    """
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    port = free_port()
    env = {**environment_of(tmp_path, pki), CLOCK_VARIABLE: str(tmp_path / "clock"), "MS_NODE_TIMEOUT": "4"}
    env |= {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))), "MS_SPARES": "1"}
    env |= {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(tmp_path / "journal")}
    with scheduler(**env, MS_METRICS_PORT=str(port)) as running:
        victims = start_victims(tmp_path, env, running.port, 1_000_000, 0.02)
        try:
            running.await_log("Generation 1 stands with 3 members")
            for seconds in (-3653 * DAY_S, 10_958 * DAY_S):
                shift(tmp_path / "clock", seconds)
                wanted, until = steps(port) + 20, time.monotonic() + 5.0  # longer than MS_NODE_TIMEOUT
                while steps(port) < wanted or time.monotonic() < until:
                    time.sleep(0.05)
                with channel(running.target, pki.credentials("client")) as over:
                    assert not asked_to_join(over)
            shift(tmp_path / "clock", 0.0)
            (tmp_path / "stop").touch()
            assert [victim.wait(LIMIT_S) for victim in victims] == [0] * len(victims)
            assert running.wait() == 0
        finally:
            for victim in victims:
                victim.kill()
                victim.wait()
    assert "Generation 1 is over" not in running.log and "Traceback" not in running.log
    for words in ("is not valid before", "expired at"):
        assert re.search(f"denied .*{words}", running.log), words


def asked_to_join(over: grpc.Channel) -> bool:
    """Whether one more worker is let in."""
    stream = Stream(over)
    stream.put(join("spare-0", spare=True))
    try:
        return stream.next("welcome").welcome.spare
    except (grpc.RpcError, AssertionError):
        return False
    finally:
        stream.call.cancel()
        stream.half_close()


# ---------------------------------------------------------------- disks


@pytest.mark.system
@pytest.mark.parametrize("serve", [(), ("--serve",)], ids=["one job", "--serve"])
def test_a_disk_that_fills_under_the_journal_ends_no_training(
    pki: Pki, tmp_path: Path, serve: tuple[str, ...]
) -> None:
    """Asset: the membership; position: fills the disk, during a record.

    What is not durable is promised to nobody: the scheduler says so, to workers, health and metrics, and
    waits for space; the members train on, and the newcomer is let in when there is some. Taken away: the
    journal. The newcomer is let in at once, and would be forgotten.
    """
    full, room = (1000, resource.RLIM_INFINITY), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    metrics = free_port()
    env = {**environment_of(tmp_path, pki), "MS_SPARES": "1", "MS_NODE_TIMEOUT": "20"}
    journal = {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(tmp_path / "journal")}
    victims: list[subprocess.Popen[bytes]] = []
    try:
        with scheduler(*serve, **env, **journal, MS_METRICS_PORT=str(metrics)) as running:
            victims += start_victims(tmp_path, env, running.port, 1_000_000, 0.02)
            running.await_log("Generation 1 stands with 3 members")
            assert running.command("health").stdout == "SERVING\n"
            resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, full)
            with channel(running.target, pki.credentials("client")) as over:
                newcomer = Stream(over)
                newcomer.put(join("spare-0", spare=True))
                told = newcomer.next("waiting").waiting
                assert told.undecided and "cannot be written" in told.sentence
                assert read(metrics)["muster_journal_unwritable"] == 1.0
                wait_for(lambda: running.command("health").stdout == "NOT_SERVING\n")
                reached = steps(metrics)
                assert "cannot be written" in running.command("status").stdout
                resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, room)
                assert newcomer.next("welcome").welcome.spare
                newcomer.call.cancel()
                newcomer.half_close()
            wait_for(lambda: running.command("health").stdout == "SERVING\n")
            assert read(metrics)["muster_journal_unwritable"] == 0.0
            wait_for(lambda: steps(metrics) > reached)
            (tmp_path / "stop").touch()
            assert [victim.wait(LIMIT_S) for victim in victims] == [0] * len(victims)
            assert "Generation 1 is over" not in running.log and "Traceback" not in running.log
    finally:
        for victim in victims:
            victim.kill()
            victim.wait()
    with scheduler(**env) as unsafe, channel(unsafe.target, pki.credentials("client")) as over:
        resource.prlimit(unsafe.process.pid, resource.RLIMIT_FSIZE, full)
        assert asked_to_join(over)
        resource.prlimit(unsafe.process.pid, resource.RLIMIT_FSIZE, room)


def state(value: float, step: int = 0) -> TrainingState:
    made = TrainingState({"w": np.full(20_000, value)}, ShardedSampler(8, 8))
    made.step = step
    return made


def test_half_a_checkpoint_takes_no_whole_ones_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asset: the parameters; position: fills the disk. Taken away: that it is written beside its place."""

    def is_lost(folder: Path) -> bool:
        checkpoint.save(folder, state(1.0, 1))
        with small_disk(50_000), pytest.raises(CheckpointError, match="could not be written"):
            checkpoint.save(folder, state(2.0, 1))
        assert len([each for each in folder.iterdir() if each.name != ".attempts"]) <= 1
        found = state(0.0)
        with contextlib.suppress(CheckpointError):
            checkpoint.load_latest(folder, found)
        return bool((found.arrays["w"] != 1.0).any())

    assert not is_lost(tmp_path / "with")
    in_place = ".safetensors"  # attempts' files go on as they do
    monkeypatch.setattr(checkpoint, "beside", lambda path: path if path.suffix == in_place else beside(path))
    assert is_lost(tmp_path / "without")


def test_a_folder_that_may_not_be_written_is_named_and_what_is_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asset: the parameters; position: mounts the disk read-only. Root's writes fail in no other way."""
    good = checkpoint.save(tmp_path, state(1.0, 1))

    def read_only(path: object, flags: int, *arguments: object, **more: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.numpy.save_file", lambda *_: read_only(tmp_path, 0))
        with pytest.raises(CheckpointError, match="Read-only file system"):
            checkpoint.save(tmp_path, state(2.0, 2))
    found = state(0.0)
    assert checkpoint.load_latest(tmp_path, found) == good
    assert (found.arrays["w"] == 1.0).all()


def damaged(folder: Path, name: str) -> None:
    """Puts what is no checkpoint among them, under the name of one."""
    path = folder / "step_000000009.safetensors"
    sound = folder / "step_000000001.safetensors"
    header = {"format": "1", "step": "9", "saved_at": "9e9", "digest": "0"}

    def with_metadata(**changes: str) -> None:
        text = json.dumps({"__metadata__": {**header, **changes}}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)

    if name == "a FIFO":
        os.mkfifo(path)
    elif name == "a directory":
        path.mkdir()
    elif name == "a link to a device":
        path.symlink_to("/dev/zero")
    elif name == "nothing":
        path.touch()
    elif name == "a header of 2**63 bytes":
        path.write_bytes((1 << 63).to_bytes(8, "little") + b"{}")
    elif name == "the first half":
        path.write_bytes(sound.read_bytes()[: sound.stat().st_size // 2])
    elif name == "a state that is no JSON":
        with_metadata(state="\x1b[2J{")
    elif name == "a state of lists":
        with_metadata(state="[[[]]]")
    elif name == "a state of endless depth":
        with_metadata(state="[" * 100_000)
    elif name == "a state without arrays":
        with_metadata(state='{"step": 9}')
    elif name == "a step beyond all":
        with_metadata(state='{"step": 1e999, "arrays": {}}')
    elif name == "no time":
        with_metadata(state='{"step": 9, "arrays": {}}', saved_at="yesterday")
    else:
        raise AssertionError(name)


@pytest.mark.parametrize(
    "name",
    [
        "a FIFO",
        "a directory",
        "a link to a device",
        "nothing",
        "a header of 2**63 bytes",
        "the first half",
        "a state that is no JSON",
        "a state of lists",
        "a state of endless depth",
        "a state without arrays",
        "a step beyond all",
        "no time",
    ],
)
def test_what_is_no_checkpoint_keeps_no_training_from_its_last_one(tmp_path: Path, name: str) -> None:
    """Asset: the training; position: may write the folder. Taken away: that files are looked at first."""
    good = checkpoint.save(tmp_path, state(1.0, 1))
    damaged(tmp_path, name)
    said: list[str] = []
    found = state(0.0)
    assert checkpoint.load_latest(tmp_path, found, say=said.append) == good
    assert (found.arrays["w"] == 1.0).all()
    assert all(sentence.isprintable() for sentence in said)
    checkpoint.save(tmp_path, state(3.0, 3))
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(tmp_path / "step_000000009.safetensors", state(0.0))
    assert str(error.value).isprintable()


# ---------------------------------------------------------------- variables and tables


VARIABLES = sorted(
    set(re.findall(r"`([A-Z][A-Z0-9]*_[A-Z0-9_]+)`", (ROOT / "docs" / "settings.md").read_text()))
)
EVIL = (
    "\x1b[2J\n2026 ERROR forged",
    "9" * 5000,
    "-1",
    "nan",
    "1e999",
    "0x10",
    "²",
    "\udcff\udcfe",
    "%s{0.__class__}",
    "../../../etc/shadow",
    "/dev/zero",
    "/proc/self/mem",
    "x" * 100_000,
    "\u202etxt.exe",
    ",".join(["127.0.0.1"] * 20_000),
)
GOOD = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "6667"}


@pytest.mark.parametrize("load", [worker_settings, scheduler_settings], ids=["worker", "scheduler"])
def test_no_variable_ends_in_anything_but_a_sentence(load: Callable[[dict[str, str]], object]) -> None:
    """Asset: log and terminal, availability; position: sets the environment. See ``Environment.text``."""
    assert len(VARIABLES) >= 40
    for name in VARIABLES:
        for value in EVIL:
            try:
                load({**GOOD, name: value})
            except RemediedError as error:
                assert str(error).isprintable(), (name, value[:20])
                assert len(str(error)) < 2000, (name, value[:20])


def test_a_rank_table_that_is_none_is_told_in_a_sentence_and_soon(tmp_path: Path) -> None:
    """Asset: availability; position: writes the file that ``RANK_TABLE_FILE`` names."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    device = {"device_id": "0", "rank_id": "0"}

    def table(**server: object) -> str:
        server = {"server_id": "127.0.0.1", "device": [device], **server}
        return json.dumps({"status": "completed", "server_count": "1", "server_list": [server]})

    texts = {
        "deep": "[" * 200_000,
        "no-utf8": "",
        "escape": table(server_id="\x1b[2J\n2026 ERROR forged"),
        "surrogate": table(server_id="\ud800"),
        "negative": table(device=[{**device, "rank_id": "-1"}]),
        "far": table(device=[{**device, "rank_id": "9" * 4000}]),
        "number": table(device=[{**device, "device_id": 1e308}]),
        "device": table(device=[{**device, "device_id": 10**4000}]),
        "name": table(server_id="x" * 1_000_000),
        "twice": table(device=[device, device]),
        "list": "[]",
        "other": table(device="0"),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "no-utf8").write_bytes(b"\xff\xfe{")
    paths = [*map(str, tmp_path.iterdir()), "/dev/zero", "/proc/self/mem", "/nonexistent", "x\0y"]
    for path in paths:
        with pytest.raises(RemediedError) as error:
            scheduler_settings({**GOOD, "MS_WORKER_NUM": "1", "RANK_TABLE_FILE": path})
        assert str(error.value).isprintable() and len(str(error.value)) < 2000, path


# ---------------------------------------------------------------- orphans


TRAIN = """
import sys, time, numpy, muster
with muster.init() as session:
    print("in", session.rank, flush=True)
    for step in range(100_000):
        muster.all_reduce(numpy.ones(4, "float32"))
        time.sleep(0.02)
"""


def marked(mark: str) -> dict[int, str]:
    """The processes whose environment has a mark, and what they run."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_of_a_launch_whose_launcher_and_guardian_are_killed_nothing_is_left(
    tmp_path: Path, start: str
) -> None:
    """Asset: the host's memory and GPUs; position: kills processes of the user, as an OOM killer does.

    Scheduler, workers and uplink end by themselves, also where both that would end them are gone. Taken away:
    that the kernel ends them with their launcher (then they train on).
    """
    (tmp_path / "script.py").write_text(TRAIN)
    mark = f"TEST_MARK={os.urandom(8).hex()}"
    options = ("-n", "2", "--scheduler", "--uplink", "on", "--start", start)
    launch = subprocess.Popen(
        [sys.executable, "-m", "muster", "run", *options, "--", sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment(**dict([mark.split("=")]), MS_NODE_TIMEOUT="3", MS_SCHED_PORT=""),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        logs = [tmp_path / "muster-runs" / "latest" / f"worker_{each}.log" for each in range(2)]
        wait_for(lambda: all(each.exists() and "\nin " in each.read_text() for each in logs))
        everybody = marked(mark)
        assert sum("muster.worker.uplink" in command for command in everybody.values()) == 1
        assert sum("scheduler" in command for command in everybody.values()) >= 1
        [guardian] = [pid for pid, c in everybody.items() if pid != launch.pid and c == everybody[launch.pid]]
        for pid in (guardian, launch.pid):
            os.kill(pid, signal.SIGKILL)
        launch.wait(LIMIT_S)
        wait_for(lambda: not marked(mark), lambda: f"still there: {marked(mark)}")
    finally:
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launch.wait(LIMIT_S)
