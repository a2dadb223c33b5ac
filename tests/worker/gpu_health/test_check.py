"""The check of a GPU in a process of its own, whatever becomes of that, and on a thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from muster.worker.gpu_health.check import CheckProcess, GpuCheck, check_here, opened_here
from muster.worker.gpu_health.trial import FAILED, PASSED, UNKNOWN, GpuVerdict
from tests.worker.gpu_health.fake_gpu import FakeGpu, hanging

BEGUN = "print('begun', flush=True);"


def process(script: str, open_s: float = 30.0, limit_s: float = 30.0) -> CheckProcess:
    command = [sys.executable, "-S", "-c", f"import os, signal, time; {script}"]
    return CheckProcess(command, open_s=open_s, limit_s=limit_s)


@pytest.mark.parametrize(
    ("script", "word", "reason"),
    [
        (BEGUN + """print('{"word": "passed", "reason": "", "seconds": 0.5}')""", PASSED, ""),
        (BEGUN + """print('{"word": "failed", "reason": "7 words", "seconds": 1}')""", FAILED, "7 words"),
        (BEGUN + "os._exit(3)", FAILED, "its test did not come to an end: exit code 3"),
        (
            BEGUN + "os.kill(os.getpid(), signal.SIGSEGV)",
            FAILED,
            "its test did not come to an end: its process was ended by SIGSEGV",
        ),
        ("os._exit(1)", UNKNOWN, "it was not opened: exit code 1"),
        ("print('something else')", UNKNOWN, "it was not opened: exit code 0"),
    ],
)
def test_what_a_process_says_or_does_is_understood(script: str, word: str, reason: str) -> None:
    verdict = process(script).verdict()
    assert (verdict.word, verdict.reason) == (word, reason)


def test_one_that_hangs_is_ended_and_has_failed_only_once_it_has_begun() -> None:
    verdict = process("time.sleep(60)", open_s=0.01).verdict()
    assert (verdict.word, verdict.reason) == (UNKNOWN, "it was not opened: its process hangs")
    verdict = process(BEGUN + "time.sleep(60)", limit_s=-0.5).verdict()
    assert (verdict.word, verdict.reason) == (FAILED, "its test did not come to an end: its process hangs")


def test_before_a_join_it_is_begun_once_and_after_a_loss_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.worker.gpu_health.check.find_spec", lambda name: object())
    begun: list[int] = []

    def begin(ordinal: int) -> CheckProcess:
        begun.append(ordinal)
        return process(BEGUN + """print('{"word": "passed"}')""")

    check = GpuCheck(3, begin=begin, opened=lambda ordinal: None)
    check.begin()
    check.begin()
    assert check.before_join().word == PASSED and begun == [3]
    assert check.after_loss().word == PASSED and begun == [3, 3]
    check.begin()
    check.close()


def test_where_torch_has_the_gpu_open_no_process_is_begun() -> None:
    def begin(ordinal: int) -> CheckProcess:
        raise AssertionError

    gpu = FakeGpu()
    gpu.wrong["wrong_sums"] = 2
    check = GpuCheck(0, begin=begin, opened=lambda ordinal: lambda: gpu)
    assert check.after_loss().reason == "2 sums of a product are wrong"
    assert opened_here(0) is None, "no test has opened one"


def test_without_torch_or_a_process_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.worker.gpu_health.check.find_spec", lambda name: None)
    assert GpuCheck(0).before_join() == GpuVerdict(UNKNOWN, "torch is not installed here")
    monkeypatch.setattr("muster.worker.gpu_health.check.find_spec", lambda name: object())

    def begin(ordinal: int) -> CheckProcess:
        raise OSError(12, "Cannot allocate memory")

    verdict = GpuCheck(0, begin=begin).before_join()
    assert verdict == GpuVerdict(UNKNOWN, "its process was not started: Cannot allocate memory")


def test_a_gpu_that_hangs_is_waited_for_no_longer_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.worker.gpu_health.check.OVER_S", 0.05)
    released = threading.Event()
    verdict = check_here(lambda: hanging(lambda: released.wait(20.0)), limit_s=0.05)
    released.set()
    assert (verdict.word, verdict.reason) == (FAILED, "its test hangs")


def test_one_that_hangs_as_it_is_opened_has_not_failed() -> None:
    released = threading.Event()
    verdict = check_here(lambda: released.wait(20.0), open_s=0.05)
    released.set()
    assert (verdict.word, verdict.reason) == (UNKNOWN, "it was not opened: that hangs")


@pytest.mark.parametrize(
    ("error", "word"), [("CUDA error: uncorrectable ECC error encountered", FAILED), ("no GPU", UNKNOWN)]
)
def test_a_gpu_that_cannot_be_opened(error: str, word: str) -> None:
    def opened() -> Callable[[], FakeGpu]:
        raise RuntimeError(error)

    verdict = check_here(opened)
    assert (verdict.word, verdict.reason) == (word, error)
