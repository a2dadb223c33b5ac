"""A loader's batches by number; keeps the batches of steps that may be redone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from muster.torch.random import RandomState


class NoMoreBatchesError(Exception):
    """All epochs are over."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A batch, its place in the loader, and torch's generators after it if it began an epoch."""

    batch: Any
    place: dict[str, Any]
    generators: list[Any] | None


class StepBatches:
    """The batches of some epochs, counted from 0.

    Args:
        loader: yields an epoch's batches each time that it is iterated, the same for the same generators.
            Before, ``set_epoch`` of its sampler, or of the loader itself, is called if it exists.
        epochs: number of epochs.
        random: torch's generators; a loader that shuffles draws from them when an epoch begins.
    """

    def __init__(self, loader: Any, epochs: int, random: RandomState) -> None:
        self._loader, self._epochs, self._random = loader, epochs, random
        self._kept: list[_Kept] = []
        self._first = 0
        self._epoch = self._index = 0
        self._begun_with: list[Any] | None = None
        self._iterator: Iterator[Any] | None = None

    def at(self, number: int) -> Any:
        """Returns the batch of a step: one that is kept, or the loader's next one.

        Raises:
            NoMoreBatchesError: all epochs are over.
        """
        if number - self._first < len(self._kept):
            kept = self._kept[number - self._first]
            if kept.generators is not None:
                self._random.put_back(kept.generators)
            return kept.batch
        return self._fetch()

    def place(self, number: int) -> dict[str, Any]:
        """Returns the place of a step's batch in the loader, as JSON values, for :meth:`go_to`."""
        if number - self._first < len(self._kept):
            return self._kept[number - self._first].place
        return self._place()

    def forget_before(self, number: int) -> None:
        """Drops the batches of earlier steps."""
        del self._kept[: max(0, number - self._first)]
        self._first = max(self._first, number)

    def go_to(self, number: int, place: dict[str, Any]) -> None:
        """Goes on with the batch of a step, from another process's :meth:`place`; skips earlier batches.

        The caller must restore the generators afterwards.
        """
        self._kept, self._first = [], number
        self._epoch, self._iterator = place["epoch"], None
        begun_with: Sequence[str] | None = place["generators"]
        if begun_with is not None:
            self._random.put_back([_tensor(each) for each in begun_with])
            self._begin_epoch()
            for _ in range(place["index"]):
                next(self._iterator or iter(()))
        self._index = place["index"]

    def _place(self) -> dict[str, Any]:
        begun_with = self._begun_with if self._iterator is not None else None
        return {
            "epoch": self._epoch,
            "index": self._index,
            "generators": None if begun_with is None else [_text(each) for each in begun_with],
        }

    def _begin_epoch(self) -> None:
        for each in (getattr(self._loader, "sampler", None), self._loader):
            set_epoch = getattr(each, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)
        self._begun_with = self._random.keep()
        self._iterator, self._index = iter(self._loader), 0

    def _fetch(self) -> Any:
        while True:
            begins = self._iterator is None
            if begins:
                if self._epoch >= self._epochs:
                    raise NoMoreBatchesError
                place = self._place()
                self._begin_epoch()
            else:
                place = self._place()
            assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._epoch, self._index, self._iterator = self._epoch + 1, 0, None
                continue
            self._index += 1
            self._kept.append(_Kept(batch, place, self._random.keep() if begins else None))
            return batch


def _text(generator: Any) -> str:
    return bytes(generator.numpy()).hex()


def _tensor(text: str) -> Any:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
