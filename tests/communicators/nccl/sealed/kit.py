"""The plug-in of NCCL built for tests, and processes that call it as NCCL does (`driver.c`)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import muster.communicators.nccl

SOURCES = Path(muster.communicators.nccl.__file__).parent / "sealed"
DRIVER = Path(__file__).with_name("driver.c")
WARNINGS = (
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wconversion",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-Wmissing-prototypes",
    "-Wpointer-arith",
    "-Wcast-align",
    "-Wvla",
    "-Wundef",
    "-Wformat=2",
)
LIBRARY = ("-std=c11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-fstack-protector-strong")
LINKED = ("-Wl,-z,nodelete", "-Wl,-z,relro", "-Wl,-z,now", "-lcrypto", "-lpthread")
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREAD = ("-fsanitize=thread",)
SECRET = "a7" * 32
OTHER_SECRET = "a8" * 32
MAX_THREADS = 16 + 1  # the pool's, and the driver's own


def compilers() -> list[str]:
    """Those that are here."""
    return [name for name in ("gcc", "clang") if shutil.which(name)]


def compile_c(output: Path, *arguments: str, compiler: str = "cc") -> None:
    """Compiles, with the sources' folder for headers; fails with the compiler's words."""
    command = [compiler, f"-I{SOURCES}", "-o", str(output), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def sources() -> list[str]:
    """The plug-in's files."""
    return sorted(str(path) for path in SOURCES.glob("*.c"))


def built_driver(folder: Path, name: str, *flags: str) -> Path:
    """The driver with the plug-in in it, built with these flags; once, also for several processes."""
    path = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            arguments = ("-std=c11", "-O1", "-g", "-DMUSTER_NCCL_TESTING", *flags)
            compile_c(path.with_suffix(".new"), *arguments, *sources(), str(DRIVER), "-lcrypto", "-lpthread")
            path.with_suffix(".new").rename(path)
    return path


def _open_descriptors(text: str) -> list[int]:
    return [int(text)] if text.isdigit() and Path(f"/proc/self/fd/{text}").exists() else []


class Rank:
    """A process that holds one side of communicators; each question gets one line for an answer."""

    def __init__(self, program: Path, *, secret: str = SECRET, generation: int = 1, **env: str) -> None:
        base = {key: value for key, value in os.environ.items() if not key.startswith(("MS_", "NCCL_"))}
        settings = {
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_FAMILY": "AF_INET",
            "MS_NCCL_ACCEPT_TIMEOUT": "200",
        }
        self.process = subprocess.Popen(
            [str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=base | settings | {"TSAN_OPTIONS": "halt_on_error=1"} | env,
            pass_fds=_open_descriptors(env.get("MS_NCCL_SECRET_FD", "")),
            bufsize=0,
        )
        self._left = b""
        if secret:
            assert self.ask(f"secret {generation} {secret}") == "0"

    def tell(self, line: str) -> None:
        """Gives a command whose answer is heard later."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    def hear(self, patience_s: float = 90.0) -> str:
        """The answer to the oldest command that has none yet."""
        assert self.process.stdout is not None
        until = time.monotonic() + patience_s
        while b"\n" not in self._left:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the driver does not answer"
            more = os.read(self.process.stdout.fileno(), 65536)
            assert more, f"the driver has ended: {self.log()}"
            self._left += more
        line, _, self._left = self._left.partition(b"\n")
        return line.decode().strip()

    def ask(self, line: str) -> str:
        """Gives a command and returns its answer."""
        self.tell(line)
        return self.hear()

    def log(self) -> str:
        """What it has written to its standard error; after its end."""
        assert self.process.stderr is not None
        self.process.wait(30)
        return self.process.stderr.read().decode()

    def listen(self) -> str:
        """The handle of a new listener, in hex; the listener's number is that of calls before."""
        answer = self.ask("listen 0")
        assert answer.startswith("listener "), answer
        return answer.split()[2]

    def reason(self) -> str:
        """The reason for which a communicator ended, once there is one."""
        until = time.monotonic() + 60
        while not (text := self.ask("reason")):
            assert time.monotonic() < until, "no reason"
            time.sleep(0.02)
        return text

    def threads(self) -> int:
        """How many it has."""
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def descriptors(self) -> int:
        """How many it has open."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def end(self) -> str:
        """Closes everything in order; returns its log, where a sanitizer has found nothing."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        log = self.log()
        assert self.process.returncode == 0, log
        return log

    def kill(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def ranks(program: Path, *settings: dict[str, str], init: bool = True) -> Iterator[list[Rank]]:
    """Starts as many ranks as there are settings; at the end, those that live end well, sanitizers too."""
    started: list[Rank] = []
    try:
        for one in settings:
            started.append(Rank(program, **one))  # type: ignore[arg-type]  # a generation is a number
            if init:
                assert started[-1].ask("init") == "ok"
        yield started
        for rank in started:
            if rank.process.poll() is None:
                rank.end()
    finally:
        for rank in started:
            rank.kill()
            for pipe in (rank.process.stdin, rank.process.stdout, rank.process.stderr):
                if pipe is not None:
                    pipe.close()


def meet(receiver: Rank, sender: Rank, handle: str | None = None, listener: int = 0) -> None:
    """Makes a communicator from one to the other, by way of another handle's address where one is given."""
    by = handle or receiver.listen()
    receiver.tell(f"accept {listener} 40")
    answer = sender.ask(f"connect {by} 40")
    assert answer.startswith("communicator"), answer
    assert (heard := receiver.hear()).startswith("communicator"), heard


def move(
    receiver: Rank,
    sender: Rank,
    size: int,
    *,
    step: int = 0,
    count: int = 1,
    flight: int = 32,
    room: int = 0,
    number: int = 0,
) -> Sequence[str]:
    """Messages of size, size + step, ... bytes; the answers of receiver, which compares them, and sender."""
    command = f"move {number} {size} {step} {count} {min(flight, count)} {room} {size + 7}"
    receiver.tell(command)
    sender.tell(command)
    return receiver.hear(), sender.hear()


BOTH_OK = ("ok", "ok")
