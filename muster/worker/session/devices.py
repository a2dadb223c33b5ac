"""Describes in words the devices of a job's workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from muster.wire import messages


def describe_devices(devices: Sequence[tuple[str, messages.Device]]) -> str:
    """Describes the kinds and models of the workers' devices: ``4 x NVIDIA H200``, or ``CPU``.

    Args:
        devices: for each worker, the id of its host and its device. A GPU that several workers share counts
            once; one whose index is not known counts once for each worker.
    """
    shared = {each for each in devices if each[1].index >= 0}
    alone = [each for each in devices if each[1].index < 0]
    kinds = [device for _, device in (*shared, *alone)]
    counts = Counter(device.model or device.kind for device in kinds if device.kind != "cpu")
    words = [f"{count} x {name}" for name, count in sorted(counts.items())]
    return " and ".join([*words, "CPU"] if any(device.kind == "cpu" for device in kinds) else words)
