"""Frameworks around a model that ``muster.DataParallel`` has wrapped; ``python wrapped.py NAME``."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import muster

torch.set_num_threads(1)


def say(what: str, value: Any) -> None:
    # One write for the line: processes that share a pipe would mix the pieces.
    sys.stdout.write(f"said {muster.get_rank()} {what} {value}\n")
    sys.stdout.flush()


def network() -> torch.nn.Module:
    return muster.DataParallel(torch.nn.Linear(8, 1))


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(32 * 8.0).view(32, 8)), batch_size=4)


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net, loader = network(), accelerator.prepare(data())
    for (x,) in loader:
        accelerator.backward(net(x).mean())
    say("batches", len(loader))


def lightning() -> None:
    import lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch[0]).mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=1e-6)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    fit = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, enable_model_summary=False, **quiet)
    fit.fit(Module(), data())
    say("batches", fit.global_step)


if __name__ == "__main__":
    with muster.init(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        {"accelerate": accelerate, "lightning": lightning}[sys.argv[1]]()
        for each in caught:
            if issubclass(each.category, muster.errors.DataNotDividedWarning):
                say("warned", each.message)
