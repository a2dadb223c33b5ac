"""What a launch shows, on terminals and into files."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections.abc import Iterator
from typing import Any

import pytest

from muster.launch.report import describe_group, describe_progress, duration
from muster.launch.screen import Screen

GROUP = {"generation": 1, "workers": 2, "hosts": 1, "devices": "CPU", "backend": "tcp", "tls": True}


class Terminal:
    """A terminal of so many columns."""

    def __init__(self, columns: int) -> None:
        self._ours, self.end = os.openpty()
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def shown(self) -> str:
        """All that was written since the last time."""
        os.write(self.end, b"\0")
        read = b""
        while not read.endswith(b"\0"):
            read += os.read(self._ours, 1 << 16)
        return read[:-1].decode().replace("\r\n", "\n")

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.end)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal(50)
    yield made
    made.close()


def screen(terminal: Terminal, **options: Any) -> Screen:
    env = options.pop("env", {"TERM": "xterm", "NO_COLOR": "1"})
    return Screen(env, out=terminal.end, err=terminal.end, **options)


INFO = b"2026-11-22 11:14:44,358 muster.worker INFO rank 0 of 2 in generation 1 of job default: formed"
MORE = b"2026-11-22 11:14:44,358 muster.worker WARNING + and so on"
WARNING = b"2026-11-22 11:14:44,358 muster.worker WARNING the certificate ends in 5 days, on a Sunday"


def test_of_what_muster_logs_only_warnings_are_shown_and_a_scripts_own_lines_stay(terminal: Terminal) -> None:
    own = b"2026-11-22 11:14:44,358 mine INFO " + b"x" * 80
    screen(terminal).show(b"[0] ", [INFO, WARNING, MORE, own, b"loss 0.5"])
    assert terminal.shown().splitlines() == [
        "[0] warning: the certificate ends in 5 days, ...",
        f"[0] {own.decode()}",
        "[0] loss 0.5",
    ]
    screen(terminal, whole=True).show(b"[0] ", [INFO, MORE])
    assert terminal.shown().splitlines() == [f"[0] {INFO.decode()}", f"[0] {MORE.decode()}"]


def test_sentences_are_wrapped_to_the_terminal_and_whole_in_a_file(terminal: Terminal) -> None:
    sentence = "worker 1 (pid 7 on host) exited with code 7; the end of muster-runs/latest/worker_1.log:"
    screen(terminal).say(sentence)
    lines = terminal.shown().splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= 50
    assert " ".join(line.strip() for line in lines) == f"muster: {sentence}"
    screen(terminal, env={"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "200"}).say(sentence)
    assert terminal.shown() == f"muster: {sentence}\n"
    read_end, write_end = os.pipe()
    Screen({}, out=write_end, err=write_end).say(sentence, "error")
    assert os.read(read_end, 1000).decode() == f"muster: {sentence}\n"
    os.close(read_end)
    os.close(write_end)


def test_the_last_lines_of_a_log_are_cut_to_the_terminal(terminal: Terminal) -> None:
    screen(terminal).show_end([b"x" * 300, b"short"])
    assert [len(line) for line in terminal.shown().splitlines()] == [50, 9]


@pytest.mark.parametrize(
    ("env", "coloured"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "dumb"}, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    terminal: Terminal, env: dict[str, str], coloured: bool
) -> None:
    screen(terminal, env=env).say("NOT encrypted", "warning")
    assert ("\x1b[33m" in terminal.shown()) == coloured


def test_the_line_that_lives_makes_room_for_those_that_stay(terminal: Terminal) -> None:
    made = screen(terminal)
    made.follow(5, 20, "1,000 samples/s each  loss 0.25 and more that does not fit")
    shown = terminal.shown()
    assert shown.startswith("\r\x1b[K[#####...............] 5/20  1,000")
    assert len(shown) == len("\r\x1b[K") + 49
    made.follow(5, 20, "1,000 samples/s each  loss 0.25 and more that does not fit")
    assert terminal.shown() == ""
    made.show(b"[0] ", [b"epoch 1"])
    assert terminal.shown() == f"\r\x1b[K[0] epoch 1\n{shown.removeprefix(chr(13) + chr(27) + '[K')}"
    made.close()
    assert terminal.shown() == "\r\x1b[K"
    made.follow(5, 0, "")
    assert terminal.shown() == "\r\x1b[Kstep 5"


def test_a_file_gets_no_line_that_lives() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    made = Screen({}, out=write_end, err=write_end)
    made.follow(5, 20, "")
    made.close()
    with pytest.raises(BlockingIOError):
        os.read(read_end, 1)
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize(
    ("changes", "text", "encrypted"),
    [
        ({}, "2 workers on 1 host, CPU, tcp, encrypted", True),
        ({"tls": False}, "2 workers on 1 host, CPU, tcp, NOT encrypted: no certificates (--config)", False),
        (
            {"workers": 1, "hosts": 2, "backend": "nccl", "devices": "4 x NVIDIA H200"},
            "1 worker on 2 hosts, 4 x NVIDIA H200, nccl, scheduler encrypted, nccl's own traffic NOT",
            False,
        ),
        (
            {"hosts": 2, "backend": "nccl", "devices": "4 x NVIDIA H200", "nccl_sealed": True},
            "2 workers on 2 hosts, 4 x NVIDIA H200, nccl, scheduler and nccl between hosts encrypted",
            True,
        ),
        (
            {"backend": "nccl", "nccl_sealed": True, "nccl_plain_ways": "NVLink between hosts"},
            "2 workers on 1 host, CPU, nccl, scheduler and nccl between hosts encrypted,"
            " NVLink between hosts NOT",
            False,
        ),
        (
            {"backend": "nccl", "nccl_sealed": True, "tls": False},
            "2 workers on 1 host, CPU, nccl, NOT encrypted: no certificates (--config)",
            False,
        ),
        (
            {"generation": 2, "reason": "node 1 left"},
            "generation 2: 2 workers on 1 host, CPU, tcp, encrypted (node 1 left)",
            True,
        ),
    ],
)
def test_a_group_that_stands_is_described_in_a_line(
    changes: dict[str, Any], text: str, encrypted: bool
) -> None:
    assert describe_group({**GROUP, **changes}) == (text, encrypted)


@pytest.mark.parametrize(
    ("changes", "encrypts_gloo", "words", "encrypted"),
    [
        ({}, False, "CPU, torch, scheduler encrypted, torch's own traffic NOT", False),
        ({}, True, "CPU, torch, scheduler and gloo encrypted", True),
        (
            {"devices": "2 x NVIDIA H200"},
            True,
            "2 x NVIDIA H200, torch, scheduler and gloo encrypted, nccl's own traffic NOT",
            False,
        ),
        (
            {"nccl_sealed": True},
            False,
            "CPU, torch, scheduler and nccl between hosts encrypted, gloo's own traffic NOT",
            False,
        ),
        (
            {"nccl_sealed": True, "devices": "2 x NVIDIA H200"},
            True,
            "2 x NVIDIA H200, torch, scheduler, gloo and nccl between hosts encrypted",
            True,
        ),
        ({"tls": False}, True, "CPU, torch, NOT encrypted: no certificates (--config)", False),
        ({"backend": "nccl"}, True, "CPU, nccl, scheduler encrypted, nccl's own traffic NOT", False),
    ],
)
def test_what_of_a_torch_program_is_encrypted(
    changes: dict[str, Any], encrypts_gloo: bool, words: str, encrypted: bool
) -> None:
    group = {**GROUP, "backend": "torch", **changes}
    described = describe_group(group, encrypts_gloo=encrypts_gloo)
    assert described == (f"2 workers on 1 host, {words}", encrypted)


@pytest.mark.parametrize(
    ("noted", "progress"),
    [
        (
            b'{"step": 3, "steps": 9, "samples_per_s": 1234.5, "loss": 0.123456}',
            (3, 9, "1,234 samples/s each  loss 0.1235"),
        ),
        (b'{"step": 3, "loss": null}', (3, 0, "")),
        (b'{"step": 3, "loss": NaN}', (3, 0, "loss nan")),
        (b"", None),
        (b'{"step": 3, "lo', None),
        (b"[]", None),
    ],
)
def test_progress_is_read_as_a_worker_notes_it(noted: bytes, progress: tuple[int, int, str] | None) -> None:
    assert describe_progress(noted) == progress


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.4, 67, 3723)] == ["0:00", "1:07", "1:02:03"]
