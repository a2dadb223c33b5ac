"""Compares settings and generators of all ranks after each step, without blocking the host."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from muster.communicators.base import Communicator
from muster.communicators.work import Work
from muster.errors import RanksDifferError, WorkerError
from muster.torch.optimizer_state import is_number, number_of
from muster.torch.transfer import array_of, gather_rows

_STEP, _SETTINGS, _HEAD = 0, 1, 2
_MOST_RANKS_WITH_GENERATORS = 256
"""Largest world size at which ranks exchange the states of their generators, 5 KB per rank."""
_MOST_NAMED = 256


class RankComparison:
    """Exchanges an int64 row per rank and step: a checksum of its settings, and its generators' states.

    The rows are gathered while the next step runs. On a GPU this uses a stream of its own, and the rows have
    arrived once the host has waited for a mark of the communicator that was set within :meth:`beside`. On a
    CPU the communicator's thread does it.

    Args:
        optimizer: the optimizer; its settings and step counts must be the same on all ranks.
        device: the model's device.
    """

    def __init__(self, optimizer: Any, device: Any) -> None:
        self._optimizer = optimizer
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._communicator: Communicator | None = None
        self._work: Work | None = None
        self._sent: Any = None
        self._table: Any = None
        self._arrived: Any = None
        self._compared = True
        self._weights: dict[tuple[str, ...], Any] = {}
        self._last: list[tuple[str, Any]] = []

    def enter(self, communicator: Communicator) -> None:
        """Starts over with a new generation's communicator; drops an exchange in progress."""
        self._communicator = communicator
        self._work = self._sent = self._table = self._arrived = None
        self._compared = True

    def send(self, step: int, generators: Any) -> None:
        """Starts to exchange the ranks' rows; every rank calls it.

        Args:
            step: number of finished steps.
            generators: states of this rank's generators: uint8, 1-dim, the length a multiple of 8.
        """
        communicator = self._communicator
        if communicator is None or communicator.world_size == 1:
            return
        few = communicator.world_size <= _MOST_RANKS_WITH_GENERATORS
        words = generators.view(torch.int64) if few else torch.empty(0, dtype=torch.int64)
        on_gpu = self._stream is not None
        row = torch.empty(_HEAD + words.numel(), dtype=torch.int64, pin_memory=on_gpu)
        row[_STEP] = step
        row[_HEAD:] = words
        settings = self._settings()
        with self.beside():
            mine = self._with_settings(row, *settings)
            table = torch.empty(communicator.world_size * len(row), dtype=torch.int64, device=self._device)
            send, recv = array_of(communicator, mine), array_of(communicator, table)
            self._work = communicator.all_gather(send, recv, async_op=not on_gpu)
            if on_gpu:
                host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
                table = host.copy_(table, non_blocking=True)
        self._sent = row, mine, settings  # kept alive, because their memory is read until the row is sent
        self._table = table.view(communicator.world_size, -1)

    @property
    def under_way(self) -> bool:
        """Whether generator states are being exchanged on the CPU; those of a rank lost now may be lost."""
        on_host = self._work is not None and self._stream is None
        return on_host and self._table.shape[1] > _HEAD

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Context that runs GPU work on a side stream, after the work already on the current stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def receive(self) -> None:
        """Compares the rows that were sent last; on a GPU, once the host has waited for the current stream.

        Raises:
            RanksDifferError: a setting, or the number of finished steps, differs; raised on all ranks.
            MembershipChanged: the members changed before the rows were exchanged.
        """
        self.arrive()
        if not self._compared:
            self._compared = True
            heads = self._arrived[:, :_HEAD].tolist()
            if any(head != heads[0] for head in heads):
                raise self._difference([head[_STEP] for head in heads])

    def generators(self, step: int) -> Any:
        """Returns all ranks' generator states after ``step``, uint8 [world size, bytes]; None: not known."""
        if self._device.type == "cpu":  # on a GPU they arrive only once the host has waited for the step
            with contextlib.suppress(WorkerError):
                self.arrive()
        table = self._arrived
        if table is None or table.shape[1] == _HEAD or int(table[0, _STEP]) != step:
            return None
        return table[:, _HEAD:].contiguous().view(torch.uint8)

    def arrive(self) -> None:
        """Receives the rows that were sent last, like :meth:`receive`, but does not compare them."""
        table, self._table = self._table, None
        work, self._work = self._work, None
        if table is not None and work is not None:
            work.wait()
            self._arrived, self._compared = table, False

    # ------------------------------------------------------------ settings

    def _settings(self) -> tuple[dict[str, float], tuple[Any, list[str]] | None]:
        """Returns the numbers that must be the same on all ranks: on the host, and on a GPU with names.

        Numbers on a GPU are copied, because the next step may change them before they are sent.
        """
        self._last = [(label, _aside(value)) for label, value in self._numbers()]
        host = {label: value for label, value in self._last if not isinstance(value, torch.Tensor)}
        device = {label: value for label, value in self._last if isinstance(value, torch.Tensor)}
        if not device:
            return host, None
        values = [value.detach().reshape(()).float() for value in device.values()]
        return host, (torch.stack(values), list(device))

    def _with_settings(self, row: Any, host: dict[str, float], device: tuple[Any, list[str]] | None) -> Any:
        """Returns the row on the model's device, with the checksum added. Numbers on a GPU are read there."""
        row[_SETTINGS] = self._checksum(torch.tensor(list(host.values())), list(host))
        mine = row.to(self._device, non_blocking=True)
        if device is not None:
            values, labels = device
            mine[_SETTINGS] += self._checksum(values, labels)
        return mine

    def _checksum(self, values: Any, labels: list[str]) -> Any:
        """Returns a checksum of the values, independent of their order, computed on their device."""
        key = values.device.type, *labels
        if key not in self._weights:
            weights = [zlib.crc32(label.encode()) | 1 for label in labels]
            self._weights[key] = torch.tensor(weights, dtype=torch.int64, device=values.device)
        bits = values.float().view(torch.int32).long()
        return (bits * self._weights[key]).sum()

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        """The values that must be the same on all ranks, by name."""
        for index, group in enumerate(self._optimizer.param_groups):
            for key in sorted(group):
                value = group[key]
                if is_number(value):
                    yield f"{_NAMES.get(key, key)} of parameter group {index}", value
                elif key != "params" and isinstance(value, tuple | list):
                    for place, part in enumerate(value):
                        if is_number(part):
                            yield f"{key}[{place}] of parameter group {index}", part
            for parameter in group["params"]:
                count = self._optimizer.state.get(parameter, {}).get("step")
                if count is not None and is_number(count):
                    yield f"the step count of parameter group {index}", count
                    break  # the group's first parameter already shows a missed step

    def _difference(self, steps: list[int]) -> RanksDifferError:
        """Gathers all ranks' numbers, and makes an error that names the first difference."""
        assert self._communicator is not None
        if len(set(steps)) > 1:
            what, values = "finished steps", [float(step) for step in steps]
        else:
            mine = [(label, float(number_of(value))) for label, value in self._last][:_MOST_NAMED]
            padded = [float(len(mine)), *(value for _, value in mine), *[0.0] * (_MOST_NAMED - len(mine))]
            bits = np.array(padded).view(np.int64).tolist()
            rows = np.array(gather_rows(self._communicator, self._device, bits))
            labels = ["the number of the optimizer's settings", *(label for label, _ in mine)]
            differing = [place for place in range(len(labels)) if len(set(rows[:, place].tolist())) > 1]
            if not differing:
                return RanksDifferError("The optimizer's settings are not the same on all ranks.")
            what, values = labels[differing[0]], rows.view(np.float64)[:, differing[0]].tolist()
        other = next(rank for rank, value in enumerate(values) if value != values[0])
        return RanksDifferError(
            f"The ranks train apart after step {steps[0]}: {what} is {values[0]:g} on rank 0 and"
            f" {values[other]:g} on rank {other}.",
            remedy="Make a scheduler part of the state with TorchTrainingState(...,"
            ' also={"scheduler": scheduler}), or set what differs as a function of state.step, on all ranks.',
        )


def _aside(value: Any) -> Any:
    """Returns the value as a float; returns a tensor on a GPU unchanged, so that the host does not wait."""
    return (
        value if isinstance(value, torch.Tensor) and value.device.type != "cpu" else float(number_of(value))
    )


_NAMES = {"lr": "the learning rate"}
