"""What torch, NCCL and the driver say; stand-ins answer for them here."""

from __future__ import annotations

import socket
import sys
import threading
from types import SimpleNamespace

import pytest

from muster.worker.stacks import libraries
from tests.worker.gpu_health.fake_nvml import FakeNvml, FakeNvmlError


def test_ras_is_asked_by_its_protocol_and_its_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "RAS_LIMIT_S", 60.0)
    heard = []

    def answer(listener: socket.socket) -> None:
        line, _ = listener.accept()
        with line:
            heard.append(line.recv(4096))
            line.sendall(b"NCCL version 2.28\n" + b"x" * 2 * libraries.MOST_BYTES)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        said = libraries.ras_answer(listener.getsockname())
        thread.join()
    assert said.startswith("NCCL version 2.28") and len(said) == libraries.MOST_BYTES
    assert heard == [b"TIMEOUT 2\nVERBOSE STATUS\n"]


def test_where_nobody_listens_that_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    assert libraries.ras_answer(address).startswith(f"none: 127.0.0.1:{address[1]}: ")


def test_a_listener_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "RAS_LIMIT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert libraries.ras_answer(listener.getsockname()) == "none: no answer within 0.05 s"


def test_a_process_without_nccl_is_not_asked() -> None:
    assert libraries.nccl_ras(1 << 22, {}) == "none: NCCL is not loaded"


def test_torch_s_recorder_is_read_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert libraries.torch_recorder() == "none: this process has not imported torch"
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace())
    assert libraries.torch_recorder() == "none: this torch is built without it"
    recorder = SimpleNamespace(_dump_nccl_trace_json=lambda: b'{"entries": []}')
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)
    assert libraries.torch_recorder() == '{"entries": []}'


def test_gpus_are_described_and_a_driver_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(used=10e9, total=80e9)
    nvml = SimpleNamespace(
        __spec__=SimpleNamespace(),
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=100),
        nvmlDeviceGetMemoryInfo=lambda handle: memory,
        nvmlDeviceGetClockInfo=lambda handle, which: 1980,
        nvmlDeviceGetTemperature=lambda handle, which: 61,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert libraries.gpus() == "GPU 0: 100 % busy, 10.0 of 80.0 GB, 1980 MHz, 61 C"

    def fails() -> None:
        raise RuntimeError("Driver Not Loaded")

    nvml.nvmlInit = fails
    assert libraries.gpus() == "none: Driver Not Loaded"


def test_a_gpu_that_is_not_well_is_named_and_one_that_does_not_answer_hides_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class TwoGpus(FakeNvml):
        __spec__ = SimpleNamespace()

        def nvmlInit(self) -> None: ...

        def nvmlShutdown(self) -> None: ...

        def nvmlDeviceGetCount(self) -> int:
            return 2

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            if index == 0:
                raise FakeNvmlError(4, "Insufficient Permissions")
            return index

    nvml = TwoGpus()
    nvml.uncorrected, nvml.celsius = 2, 93
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    first, second = libraries.gpus().splitlines()
    assert first == "GPU 0: none: Insufficient Permissions"
    assert second == (
        "GPU 1: 100 % busy, 10.0 of 80.0 GB, 1980 MHz, 93 C, ill: 2 uncorrected ECC errors; 93 C, over 90 C"
    )
    assert nvml.open_events == 0
