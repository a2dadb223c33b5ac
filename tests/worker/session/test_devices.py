"""Devices are counted by model, and a shared one once."""

from __future__ import annotations

from muster.wire.messages import Device
from muster.worker.session.devices import describe_devices


def test_devices_are_counted_by_model() -> None:
    gpus = [("a", Device("cuda", index, model="NVIDIA H200")) for index in range(3)]
    others = [("a", Device("cuda", 3, model="NVIDIA A100")), ("a", Device("cpu"))]
    assert describe_devices([*gpus, *others]) == "1 x NVIDIA A100 and 3 x NVIDIA H200 and CPU"
    assert describe_devices([("a", Device("cpu", 0)), ("a", Device("cpu", 1))]) == "CPU"


def test_a_gpu_that_workers_share_counts_once() -> None:
    def of(host: str, index: int) -> tuple[str, Device]:
        return host, Device("cuda", index, "0000:41:00.0", "NVIDIA H200")

    assert describe_devices([of("a", 0), of("a", 0)]) == "1 x NVIDIA H200"
    assert describe_devices([of("a", 0), of("a", 0), of("b", 0), of("b", 1)]) == "3 x NVIDIA H200"
    assert describe_devices([of("a", -1), of("a", -1)]) == "2 x NVIDIA H200"  # which ones is not known yet
