"""The data sets of ``train.py``: scikit-learn's digits, a random regression set, and CIFAR-10.

Samples are kept as they were read (bytes stay bytes), and are scaled when a batch is taken.
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from muster.errors import SettingsError, WorkerError
from muster.version import how_to_install
from muster.wire.settings import Environment
from muster.worker.ending import show_errors_in_words

CIFAR10_TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR10_TEST_FILE = "test_batch.bin"
CIFAR10_RECORD_BYTES = 1 + 3 * 32 * 32
# Mean and standard deviation of CIFAR-10's channels (red, green, blue), of values in 0..1.
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)

_DIGITS_SHAPE = (1797, 65)


class DatasetError(WorkerError):
    """A data set is missing, or its files are damaged."""


@dataclass(frozen=True, eq=False, slots=True)
class Dataset:
    """Samples with their targets, for training and test.

    Attributes:
        name: its name on the command line.
        train_x, test_x: one row per sample, unscaled.
        train_y, test_y: int64 class numbers, or one float row per sample if ``classes`` is 0.
        classes: number of classes; 0: regression.
        scale, shift: the model gets ``row * scale + shift``; one number, or one for each column.
    """

    name: str
    train_x: NDArray[Any]
    train_y: NDArray[Any]
    test_x: NDArray[Any]
    test_y: NDArray[Any]
    classes: int
    scale: NDArray[np.float64] | float = 1.0
    shift: NDArray[np.float64] | float = 0.0

    @property
    def inputs(self) -> int:
        """Number of input values per sample."""
        return int(self.train_x.shape[1])

    @property
    def outputs(self) -> int:
        """Number of values that a model returns per sample."""
        return self.classes or int(self.train_y.shape[1])

    def scaled(self, rows: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
        """Returns rows of ``train_x`` or ``test_x``, scaled for a model."""
        return (rows * self.scale + self.shift).astype(dtype)


def load_digits() -> Dataset:
    """Loads scikit-learn's 1,797 handwritten digits of 8x8 pixels.

    The file in scikit-learn's package is read directly if it is found, because importing the package takes
    longer than training on the data.

    A fifth of the samples is kept for the test. It is the same for all workers and does not depend on the
    training's seed.

    Raises:
        DatasetError: scikit-learn is not installed.
    """
    table = digits_table()
    order = np.random.Generator(np.random.Philox(0)).permutation(len(table))
    test, train = np.split(order, [round(len(table) / 5)])
    pixels, labels = table[:, :-1], table[:, -1].astype(np.int64)
    return Dataset("digits", pixels[train], labels[train], pixels[test], labels[test], 10, scale=1 / 16)


def load_quickstart() -> Dataset:
    """Creates the random regression set of the quick start, with uniform inputs and targets.

    All four global batches of 16 samples in an epoch are the same, so that the loss must decrease.
    """
    random = np.random.RandomState(1)
    x, y = random.rand(16, 32), random.rand(16, 16)
    return Dataset("quickstart", np.tile(x, (4, 1)), np.tile(y, (4, 1)), x, y, classes=0)


def load_cifar10(path: str | Path) -> Dataset:
    """Reads CIFAR-10's binary files: records of one label byte and 3,072 pixel bytes (planes R, G, B).

    Args:
        path: the folder with ``data_batch_1.bin`` ... ``test_batch.bin``, or its parent folder.

    Raises:
        DatasetError: a file is missing, or has an incomplete record or a label above 9.
    """
    folder = Path(path)
    if (folder / "cifar-10-batches-bin").is_dir():
        folder = folder / "cifar-10-batches-bin"
    missing = [name for name in (*CIFAR10_TRAIN_FILES, CIFAR10_TEST_FILE) if not (folder / name).is_file()]
    if missing:
        raise DatasetError(
            f"{folder} has no {', '.join(missing)}.",
            remedy="DATA_PATH must be CIFAR-10's binary version, unpacked: the folder cifar-10-batches-bin.",
        )
    train = np.concatenate([_cifar10_records(folder / name) for name in CIFAR10_TRAIN_FILES])
    test = _cifar10_records(folder / CIFAR10_TEST_FILE)
    std, mean = np.repeat(CIFAR10_STD, 1024), np.repeat(CIFAR10_MEAN, 1024)
    return Dataset(
        "cifar10",
        train[:, 1:],
        train[:, 0].astype(np.int64),
        test[:, 1:],
        test[:, 0].astype(np.int64),
        classes=10,
        scale=1 / (255 * std),
        shift=-mean / std,
    )


def path_given() -> str:
    """Returns DATA_PATH, the folder of CIFAR-10's files; empty if it is not set."""
    return Environment(os.environ, SettingsError).text("DATA_PATH")


def load(name: str) -> Dataset:
    """Loads a data set by its name on the command line: "digits", "quickstart" or "cifar10".

    Raises:
        DatasetError: the data set is missing or damaged.
    """
    show_errors_in_words()  # Scripts read their data before they join.
    if name == "cifar10":
        if not path_given():
            raise DatasetError("CIFAR-10 needs the folder of its files.", remedy="Set DATA_PATH to it.")
        return load_cifar10(path_given())
    return load_quickstart() if name == "quickstart" else load_digits()


def _cifar10_records(path: Path) -> NDArray[np.uint8]:
    raw = np.fromfile(path, dtype=np.uint8)
    count, rest = divmod(raw.size, CIFAR10_RECORD_BYTES)
    if rest or not count:
        records_of = f"{count} records of {CIFAR10_RECORD_BYTES} bytes and {rest} over"
        raise DatasetError(
            f"{path} has {raw.size} bytes, which is {records_of}.",
            remedy="The file is cut off or not CIFAR-10's binary version: fetch it again.",
        )
    records = raw.reshape(count, CIFAR10_RECORD_BYTES)
    wrong = np.flatnonzero(records[:, 0] > 9)
    if wrong.size:
        raise DatasetError(
            f"{path}, record {wrong[0]}: label {records[wrong[0], 0]}, labels are 0 to 9.",
            remedy="The file is damaged or not CIFAR-10's binary version: fetch it again.",
        )
    return records


def digits_table() -> NDArray[np.uint8]:
    """Returns one row for each sample: 64 pixels from 0 to 16, and the digit."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None:
        raise DatasetError(
            "The digits come with scikit-learn, which is not installed.",
            remedy=f"{how_to_install('train')}, or take --data quickstart, which needs none.",
        )
    for place in spec.submodule_search_locations or ():
        try:
            packed = (Path(place) / "datasets" / "data" / "digits.csv.gz").read_bytes()
            table = np.loadtxt(gzip.decompress(packed).decode().splitlines(), delimiter=",").astype(np.uint8)
        except (OSError, EOFError, zlib.error, ValueError):
            continue
        if table.shape == _DIGITS_SHAPE:
            return table
    return imported_digits()


def imported_digits() -> NDArray[np.uint8]:
    """Returns the same table by importing scikit-learn, in case its file is in another place."""
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    return np.column_stack([pixels, labels]).astype(np.uint8)
