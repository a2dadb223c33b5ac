"""Measures a machine: matrix products, memory, and collectives by size and group."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from muster.communicators.base import Communicator
from muster.communicators.reduce_ops import ReduceOp
from muster.errors import SettingsError
from muster.parallel.planning.costs import Hardware, group_text
from muster.parallel.saved import read_json
from muster.torch.transfer import array_of

SIZES = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)
_REPEATS = 5
_CALLS = 50
"""Calls of a kernel that are timed together, as waiting for each would take longer than the kernel."""


def measure(
    communicator: Communicator | None = None, *, sizes: Sequence[int] = SIZES, side: int = 0
) -> Hardware:
    """Measures this machine; with a communicator also its collectives, and the slowest rank counts.

    Args:
        communicator: a communicator; all its ranks must call this.
        sizes: sizes of the larger buffer of a collective, in bytes.
        side: rows of the square matrices that are multiplied; 0: 8192 on a GPU, 1024 on a CPU.
    """
    cuda = torch.cuda.is_available() and (communicator is None or communicator.on_device)
    device = torch.device("cuda" if cuda else "cpu")
    side = side or (8192 if cuda else 1024)
    dtype = torch.bfloat16 if cuda else torch.float32
    a = torch.randn(side, side, device=device).to(dtype)  # random like a network's: zeros take less power
    product = _seconds(lambda: a @ a, device)
    big = torch.rand((256 if cuda else 16) * 2**20 // 4, device=device)
    other = torch.empty_like(big)
    copied = _seconds(lambda: other.copy_(big), device)
    memory = _memory(device)
    rows = a[:, : side // 8].contiguous()
    summed = _seconds(lambda: [rows.sum(0) for _ in range(_CALLS)], device) / _CALLS
    facts = [
        2 * side**3 / product,
        2 * big.numel() * 4 / copied,
        memory,
        -_launch(device),
        rows.numel() * rows.element_size() / summed,
    ]
    measured: dict[str, dict[str, list[list[float]]]] = {}
    if communicator is not None and communicator.world_size > 1:
        facts = [-x for x in _slowest(communicator, [-x for x in facts], device)]
        measured = _collectives(communicator, sizes, device)
    name = torch.cuda.get_device_name(device) if cuda else "CPU"
    ranks = communicator.world_size if communicator is not None else 1
    host_ranks = min(neighbours(communicator)) if communicator is not None else Hardware.host_ranks
    sums = measured.get("all_reduce", {})
    inner = _speed(sums, min(ranks, host_ranks), 1)
    outer = _speed(sums, ranks // host_ranks, ranks // host_ranks) if ranks > host_ranks else None
    bus, latency = inner or outer or (Hardware.bus_bytes_per_s, Hardware.latency_s)
    network, network_s = outer or (Hardware.network_bytes_per_s, 2 * Hardware.network_latency_s)
    return Hardware(
        f"{name}, measured on {ranks} rank{'s' if ranks > 1 else ''}",
        flops_per_s=facts[0],
        memory_bytes_per_s=facts[1],
        column_bytes_per_s=facts[4],
        bus_bytes_per_s=bus,
        latency_s=latency,
        host_ranks=host_ranks,
        network_bytes_per_s=network,
        network_latency_s=network_s / 2,
        launch_s=-facts[3],
        memory_bytes=facts[2],
        measured=measured,
    )


def _speed(sums: Mapping[str, list[list[float]]], ranks: int, hosts: int) -> tuple[float, float] | None:
    """Returns a group's bus bandwidth in bytes a second, and its smallest all_reduce in seconds.

    Returns:
        None if that group was not measured.
    """
    rows = sums.get(group_text(ranks, hosts))
    if not rows:
        return None
    return 2 * (ranks - 1) / ranks * rows[-1][0] / max(1e-9, rows[-1][1]), rows[0][1]


def neighbours(communicator: Communicator) -> list[int]:
    """Returns the lengths of the runs of consecutive ranks on the same host."""
    hosts = (peer.host_id for peer in communicator.membership.peers)
    return [len(list(ranks)) for _, ranks in itertools.groupby(hosts)]


def _seconds(function: Callable[[], Any], device: Any) -> float:
    """Returns the median time of a call in seconds, including the wait for the device."""
    times = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[_REPEATS // 2]


def _launch(device: Any) -> float:
    """Returns the seconds of a kernel with almost no work; on a GPU within a CUDA graph."""
    number = torch.zeros(1, device=device)

    def calls() -> None:
        for _ in range(_CALLS):
            number.add_(1)

    if device.type != "cuda":
        return _seconds(calls, device) / _CALLS
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        calls()
        graph.capture_begin(capture_error_mode="thread_local")
        calls()
        graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    once = _seconds(graph.replay, device) - _seconds(lambda: None, device)
    return max(1e-9, once / _CALLS)


def _memory(device: Any) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    import os

    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _slowest(communicator: Communicator, numbers: Sequence[float], device: Any) -> list[float]:
    tensor = torch.tensor(list(numbers), dtype=torch.float64, device=device)
    array = array_of(communicator, tensor)
    communicator.all_reduce(array, array, ReduceOp.MAX)
    found: list[float] = tensor.tolist()
    return found


def _collectives(
    communicator: Communicator, sizes: Sequence[int], device: Any
) -> dict[str, dict[str, list[list[float]]]]:
    """Measures collectives in groups of all sizes that divide the world size; rank 0 is in each group.

    Of each size there is a group of consecutive ranks, and one of ranks as far apart as possible, which uses
    more hosts if there are several.

    Returns:
        By kind of collective and by group: pairs of the size in bytes and the time in seconds.
    """
    world, host_ranks = communicator.world_size, min(neighbours(communicator))
    found: dict[str, dict[str, list[list[float]]]] = {}
    done: set[str] = set()
    for ranks in [n for n in range(2, world + 1) if world % n == 0]:
        for stride in (1, world // ranks):
            members = tuple(range(0, ranks * stride, stride))
            text = group_text(ranks, len({rank // host_ranks for rank in members}))
            if text in done:
                continue
            done.add(text)
            group: Communicator | None = communicator
            if ranks < world:
                group = communicator.split(f"measure.{ranks}.{stride}", members)
            for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
                for nbytes in sizes:
                    seconds = _one(group, kind, nbytes, ranks, device) if group is not None else 0.0
                    seconds = _slowest(communicator, [seconds], device)[0]
                    found.setdefault(kind, {}).setdefault(text, []).append([float(nbytes), seconds])
            if group is not None and group is not communicator:
                group.close()
    return found


def _one(group: Communicator, kind: str, nbytes: int, ranks: int, device: Any) -> float:
    count = max(ranks, nbytes // 4 // ranks * ranks)
    whole = array_of(group, torch.ones(count, device=device))
    part = array_of(group, torch.ones(count // ranks, device=device))
    out = array_of(group, torch.empty(count, device=device))
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.all_reduce(whole, whole, ReduceOp.MAX),
        "all_gather": lambda: group.all_gather(part, whole),
        "reduce_scatter": lambda: group.reduce_scatter(whole, part, ReduceOp.MAX),
        "all_to_all": lambda: group.all_to_all(whole, out),
    }
    return _seconds(calls[kind], device)


def load_machine(path: str | Path) -> Hardware:
    """Loads a machine from a file that ``--measure`` wrote.

    Raises:
        SettingsError: the file cannot be read, or does not hold a machine.
    """
    saved = read_json(path, "the measured machine")
    try:
        return _machine(saved)
    except (ValueError, TypeError, AttributeError) as error:
        raise SettingsError(f"{path} is no machine that muster plan --measure wrote: {error}") from error


_SPEEDS = ("flops_per_s", "memory_bytes_per_s", "bus_bytes_per_s", "memory_bytes")


def _machine(saved: Any) -> Hardware:
    """Makes a machine of JSON values.

    Raises:
        ValueError: they are not those of a machine; the message says why.
    """
    if not isinstance(saved, dict):
        raise ValueError(f"it must be a JSON object, not {type(saved).__name__}")
    known = {each.name for each in fields(Hardware)}
    unknown = sorted(saved.keys() - known)
    if unknown:
        raise ValueError(f"it has the unknown key {unknown[0]!r}")
    machine = Hardware(**saved)
    for each in known - {"name", "measured"}:
        value = getattr(machine, each)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        least_is_zero = each in ("latency_s", "network_latency_s", "launch_s", "exposed")
        if not number or value < 0 or (value == 0 and not least_is_zero) or (each == "exposed" and value > 1):
            raise ValueError(f"{each} is {value!r}")
    missing = [each for each in _SPEEDS if each not in saved]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    if not isinstance(machine.host_ranks, int):
        raise ValueError(f"host_ranks is {machine.host_ranks!r}")
    if not isinstance(machine.name, str):
        raise ValueError(f"name is {machine.name!r}")
    for kind, groups in machine.measured.items():
        for ranks, rows in groups.items():
            if not rows or any(size <= 0 or seconds <= 0 for size, seconds in rows):
                raise ValueError(f"{kind} of {ranks} ranks was measured as {rows!r}")
    return machine
