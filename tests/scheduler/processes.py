"""Real scheduler processes and a plain gRPC client, over mutual TLS or loopback plaintext."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from muster.certs.pki.authority import Authority, create_authority
from muster.certs.pki.identity import Identity
from muster.certs.runtime.store import Credentials, load_credentials
from muster.wire.log_lines import MORE
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import rendezvous_pb2_grpc as pb_grpc
from tests.waiting import LIMIT_S

PASSWORD = b"not a secret here"
ROOT = Path(__file__).parents[2]


@dataclass
class Pki:
    """An authority with certificates for a job named ``default``, and a config.json."""

    directory: Path
    authority: Authority

    @classmethod
    def make(cls, directory: Path, **config: object) -> Pki:
        pki = cls(directory, create_authority(directory, PASSWORD))
        pki.issue("server", Identity("default", "scheduler"), ("127.0.0.1", "127.0.0.2", "localhost", "::1"))
        pki.issue("client", Identity("default", "worker"))
        pki.issue("operator", Identity("default", "operator"))
        pki.write_config(**config)
        return pki

    @property
    def config(self) -> Path:
        return self.directory / "config.json"

    def issue(self, name: str, identity: Identity, hosts: tuple[str, ...] = ()) -> Path:
        path = self.directory / f"{name}.p12"
        path.write_bytes(self.authority.issue(identity, hosts).p12(PASSWORD))
        path.chmod(0o600)
        return path

    def write_config(self, **changes: object) -> None:
        values: dict[str, object] = {
            "server_cert_path": "server.p12",
            "client_cert_path": "client.p12",
            "ca_cert_path": "ca.crt",
        }
        self.config.write_text(json.dumps(values | changes))

    def credentials(self, name: str, **options: bool) -> Credentials:
        return load_credentials(
            self.directory / f"{name}.p12",
            PASSWORD,
            self.directory / "ca.crt",
            **options,  # type: ignore[arg-type]
        )

    def env(self) -> dict[str, str]:
        return {
            "MS_CONFIG_FILE": str(self.config),
            "MS_SERVER_PASSWORD": PASSWORD.decode(),
            "MS_CLIENT_PASSWORD": PASSWORD.decode(),
        }


def environment(**changes: str) -> dict[str, str]:
    """The environment of a test's process: nothing of Muster's but what the test says.

    Nor gRPC's log level, which a scheduler's ``main`` has set if another test has called it in this process.
    """
    dropped = ("MS_", "GRPC_VERBOSITY", "GRPC_TRACE")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return kept | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | changes


@dataclass
class Scheduler:
    """A running scheduler process."""

    process: subprocess.Popen[str]
    port: int
    ready_line: str
    env: Mapping[str, str]
    _lines: list[str] = field(default_factory=list)
    _grown: threading.Condition = field(default_factory=threading.Condition)

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        with self._grown:
            return "".join(self._lines)

    def follow(self) -> None:
        """Reads the log to its end; a line that goes on in the next one is put together again."""
        assert self.process.stderr is not None
        rest = b""
        while chunk := os.read(self.process.stderr.fileno(), 1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            with self._grown:
                for line in lines:
                    head, more, text = f"{line.decode()}\n".partition(f" {MORE}")
                    if more and self._lines and len(head.split()) == 2:  # time and level
                        self._lines[-1] = f"{self._lines[-1].removesuffix(chr(10))} {text}"
                    else:
                        self._lines.append(f"{line.decode()}\n")
                self._grown.notify_all()
        if rest:
            with self._grown:
                self._lines.append(rest.decode())
                self._grown.notify_all()

    def await_log(self, words: str) -> str:
        """Waits until the log has a line with these words; returns the line."""
        with self._grown:
            found = self._grown.wait_for(
                lambda: next((line for line in self._lines if words in line), None), LIMIT_S
            )
        assert found is not None, f"no {words!r} in:\n{self.log}"
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(LIMIT_S)

    def command(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs ``python -m scheduler ARGUMENTS`` against this scheduler."""
        return run_scheduler(*arguments, env={**self.env, "MS_SCHED_PORT": str(self.port), **env})


def run_scheduler(*arguments: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m scheduler`` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "scheduler", *arguments],
        env=dict(env),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@contextlib.contextmanager
def scheduler(*arguments: str, port: str = "0", **env: str) -> Iterator[Scheduler]:
    """Starts a scheduler and waits until it is ready; kills it at the end."""
    full = environment(**{"MS_WORKER_NUM": "2", "MS_ROLE": "MS_SCHED", **env})
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "scheduler", "--port", port, *arguments],
        env=full,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    ready = process.stdout.readline()
    found = re.match(r"scheduler ready on (\S+):(\d+) ", ready)
    running = Scheduler(process, int(found[2]) if found else 0, ready, full)
    follower = threading.Thread(target=running.follow)
    follower.start()
    try:
        assert found is not None, f"not ready: {ready!r} {process.wait(LIMIT_S)} {running.log}"
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(LIMIT_S)
        follower.join(LIMIT_S)
        process.stdout.close()
        process.stderr.close()


def channel(target: str, credentials: Credentials | None = None) -> grpc.Channel:
    """A channel that does not ask who the server is beyond its authority."""
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        return grpc.insecure_channel(target, options)
    tls = grpc.ssl_channel_credentials(credentials.ca_pem, credentials.key_pem, credentials.cert_chain_pem)
    return grpc.secure_channel(target, tls, options)


def join(node_id: str = "node-0", **changes: object) -> pb.WorkerMessage:
    """A Join as a worker sends it."""
    index = int(node_id.rpartition("-")[2]) if node_id.rpartition("-")[2].isdigit() else 0
    fields: dict[str, object] = {
        "protocol_version": 1,
        "job_id": "default",
        "node_id": node_id,
        "incarnation": 1000 + index,
        "worker_num": 2,
        "backend": "tcp",
        "host": pb.Host(id="host-id", name="host", address="127.0.0.1"),
        "device": pb.Device(kind="cpu", index=index),
        "local_index": index,
        "held_rank": -1,
    }
    return pb.WorkerMessage(join=pb.Join(**(fields | changes)))  # type: ignore[arg-type]


class Stream:
    """One session: what is put goes out, what comes in is read one by one."""

    def __init__(self, over: grpc.Channel) -> None:
        self._out: queue.SimpleQueue[pb.WorkerMessage | None] = queue.SimpleQueue()
        self.call = pb_grpc.RendezvousStub(over).Session(iter(self._out.get, None), timeout=LIMIT_S)

    def put(self, message: pb.WorkerMessage) -> None:
        self._out.put(message)

    def half_close(self) -> None:
        self._out.put(None)

    def next(self, body: str = "") -> pb.SchedulerMessage:
        """The next message; with a name, the next of that kind."""
        for message in self.call:
            if not body or message.WhichOneof("body") == body:
                assert isinstance(message, pb.SchedulerMessage)
                return message
        raise AssertionError(f"the stream ended well without {body!r}")

    def end(self) -> grpc.RpcError | None:
        """Reads to the end; returns the error that it ended with."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as error:
            return error
        finally:
            self.half_close()
        return None


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """The gRPC code and sentence that a call fails with."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    raise AssertionError("the call succeeded")


def form(over: grpc.Channel, count: int = 2, **changes: object) -> list[Stream]:
    """Takes ``count`` workers through formation until their group is built; in order of rank."""
    streams = [Stream(over) for _ in range(count)]
    for index, stream in enumerate(streams):
        stream.put(join(f"node-{index}", worker_num=count, **changes))
    generation = 0
    for index, stream in enumerate(streams):
        assignment = stream.next("assignment").assignment
        assert assignment.rank == index
        generation = assignment.generation
        if index == 0:
            ids = pb.PublishUniqueIds(generation=generation, unique_ids=[b"UNIQUE-ID-" * 12])
            stream.put(pb.WorkerMessage(publish_unique_ids=ids))
    for stream in streams:
        stream.next("unique_ids")
        stream.put(pb.WorkerMessage(built=pb.Built(generation=generation)))
    for stream in streams:
        stream.next("group_built")
    return streams


def leave(generation: int = 1, *, finished: bool = True) -> pb.WorkerMessage:
    """A goodbye."""
    return pb.WorkerMessage(leave=pb.Leave(generation=generation, finished=finished))
