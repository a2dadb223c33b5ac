from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from muster.example import datasets
from muster.example.datasets import CIFAR10_RECORD_BYTES, DatasetError

CIFAR_FILES = [*datasets.CIFAR10_TRAIN_FILES, datasets.CIFAR10_TEST_FILE]


def write_cifar10(folder: Path, records: int = 4) -> None:
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(CIFAR_FILES):
        rows = np.full((records, CIFAR10_RECORD_BYTES), number, dtype=np.uint8)
        rows[:, 0] = np.arange(records) % 10
        rows.tofile(folder / name)


def test_digits_are_real_and_split_the_same_way_every_time() -> None:
    data = datasets.load_digits()
    again = datasets.load_digits()
    assert (len(data.train_x), len(data.test_x), data.inputs, data.outputs) == (1438, 359, 64, 10)
    np.testing.assert_array_equal(data.test_x, again.test_x)
    assert set(data.train_y.tolist()) == set(data.test_y.tolist()) == set(range(10))
    everything = np.concatenate([data.train_x, data.test_x]).sum(axis=0)
    np.testing.assert_array_equal(everything, datasets.imported_digits()[:, :-1].sum(axis=0))
    assert data.scaled(data.train_x, "float32").max() == 1.0
    assert data.scaled(data.train_x[:3], "float32").dtype == np.float32


def test_digits_are_read_without_importing_scikit_learn() -> None:
    code = (
        "import sys; from muster.example import datasets\n"
        "datasets.load_digits(); print('sklearn' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("content", [None, b"not gzip"])
def test_without_a_readable_file_the_digits_come_through_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    if content:
        (tmp_path / "datasets" / "data").mkdir(parents=True)
        (tmp_path / "datasets" / "data" / "digits.csv.gz").write_bytes(content)
    elsewhere = importlib.machinery.ModuleSpec("sklearn", None, is_package=True)
    elsewhere.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: elsewhere)
    marker = np.zeros((1797, 65), np.uint8)
    monkeypatch.setattr(datasets, "imported_digits", lambda: marker)
    assert datasets.digits_table() is marker


def test_without_scikit_learn_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DatasetError, match=r"pip install '\.\["):
        datasets.load("digits")


def test_quickstart_repeats_one_random_batch() -> None:
    data = datasets.load("quickstart")
    assert (data.inputs, data.outputs, data.classes) == (32, 16, 0)
    assert data.train_x.shape == (64, 32)
    np.testing.assert_array_equal(data.train_x[:16], data.train_x[16:32])
    assert 0 <= data.train_y.min() < data.train_y.max() < 1
    assert data.train_x[0, 0] == pytest.approx(0.417022004702574)  # the first uniform number of seed 1


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-bin"])
def test_cifar10_files_are_read_record_by_record(
    tmp_path: Path, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar10(tmp_path / inside)
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    data = datasets.load("cifar10")
    assert (data.train_x.shape, data.test_x.shape, data.outputs) == ((20, 3072), (4, 3072), 10)
    assert data.train_y.tolist() == [0, 1, 2, 3] * 5
    assert data.train_x[:, 0].tolist() == [n for n in range(5) for _ in range(4)]
    assert data.test_x[0, 0] == 5
    scaled = data.scaled(data.test_x[:1], "float64").reshape(3, 1024)
    np.testing.assert_allclose(
        scaled[:, 7],
        [(5 / 255 - m) / s for m, s in zip(datasets.CIFAR10_MEAN, datasets.CIFAR10_STD, strict=True)],
    )


def test_cifar10_without_a_path_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA_PATH", raising=False)
    with pytest.raises(DatasetError, match="Set DATA_PATH"):
        datasets.load("cifar10")


def test_cifar10_names_missing_files(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(DatasetError, match=r"has no data_batch_3\.bin\."):
        datasets.load_cifar10(tmp_path)


@pytest.mark.parametrize(
    ("size", "words"), [(0, "has 0 bytes"), (3072, "0 records of 3073 bytes and 3072 over")]
)
def test_cifar10_refuses_part_of_a_record(tmp_path: Path, size: int, words: str) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(bytes(size))
    with pytest.raises(DatasetError, match=words):
        datasets.load_cifar10(tmp_path)


def test_cifar10_refuses_labels_that_do_not_exist(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    raw = bytearray((tmp_path / "data_batch_2.bin").read_bytes())
    raw[2 * CIFAR10_RECORD_BYTES] = 77
    (tmp_path / "data_batch_2.bin").write_bytes(raw)
    with pytest.raises(DatasetError, match=r"data_batch_2\.bin, record 2: label 77"):
        datasets.load_cifar10(tmp_path)
