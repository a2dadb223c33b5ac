from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from muster.communicators.base import Communicator
from muster.errors import ArrayError
from muster.training.carrier import Carrier, NumpyLibrary, array_module, module_for, on_host
from tests.fakes import fake_communicators, run_ranks


def session(on_device: bool, ordinal: int) -> Any:
    return SimpleNamespace(backend=SimpleNamespace(on_device=on_device), device_ordinal=ordinal)


def test_cpu_backends_compute_in_numpy_even_beside_a_gpu() -> None:
    assert module_for(session(False, 3)) is np
    assert on_host(np)


def test_nccl_computes_in_cupy_on_the_workers_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        Device=lambda ordinal: SimpleNamespace(use=lambda: used.append(ordinal))
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert module_for(session(True, 3)) is cupy
    assert used == [3]
    assert not on_host(cupy)


def test_without_cupy_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ArrayError, match=r"pip install '\.\["):
        module_for(session(True, 0))


def test_arrays_of_two_kinds_are_refused() -> None:
    assert array_module({"a": np.zeros(1), "b": np.float64(1)}) is np
    with pytest.raises(ArrayError, match="not builtins, numpy"):
        array_module({"a": np.zeros(1), "b": 1.0})


def carrier(communicator: Communicator) -> Carrier:
    return Carrier(communicator, NumpyLibrary(np))


def test_texts_of_any_length_reach_all_ranks() -> None:
    communicators = fake_communicators(3)
    texts = ["", "hällo", "x" * 50]
    results = run_ranks(
        3, lambda rank: Carrier(communicators[rank], NumpyLibrary(np)).gather_texts(texts[rank])
    )
    assert results == [texts] * 3


def test_ranks_without_a_word_have_none() -> None:
    communicators = fake_communicators(2)
    assert (
        run_ranks(2, lambda rank: Carrier(communicators[rank], NumpyLibrary(np)).gather_texts(""))
        == [["", ""]] * 2
    )


def test_arrays_are_broadcast_in_place() -> None:
    communicators = fake_communicators(2)

    def body(rank: int) -> list[float]:
        arrays = {"a": np.full((2, 2), float(rank)), "b": np.full(3, 10.0 + rank, "float32")}
        carrier(communicators[rank]).overwrite(arrays, 1)
        return [float(array.sum()) for array in arrays.values()]

    assert run_ranks(2, body) == [[4.0, 33.0]] * 2
