"""Recovers Lightning's Trainer in place: when a rank is lost, processes stay and resume from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from muster.programs.keep_alive import living_program
from muster.torch.resumed_training import resumed


def fit(make: Callable[[], tuple[Any, Any]], *data: Any, checkpoints: str | Path) -> Any:
    """Runs ``trainer.fit(module, *data)``, and continues it in the same processes when ranks are lost.

    ::

        def make():
            keeps = ModelCheckpoint("kept", save_top_k=2, monitor="step", mode="max", every_n_epochs=1)
            return lightning.Trainer(strategy="ddp", callbacks=[keeps]), Module()

        muster.torch.keep_alive()
        trainer = muster.torch.lightning.fit(make, loader, checkpoints="kept")

    Lightning's loop cannot go back to an earlier step. So a new Trainer resumes from the last checkpoint, as
    with ``ckpt_path``; process groups stay. Without a checkpoint all processes are restarted. If Lightning
    resumes within an epoch, it begins that epoch's data again. So the results are the same as without a loss
    only if checkpoints are written at the end of an epoch.

    Args:
        make: creates the Trainer and the module, the same on all ranks.
        data: further arguments of ``trainer.fit``.
        checkpoints: the folder of the ModelCheckpoint, which all hosts share.

    Returns:
        The Trainer that finished.
    """

    if living_program() is not None and not dist.is_initialized():
        dist.init_process_group()  # lost ranks may be replaced before a new Trainer would do this

    def begin(checkpoint: str | None) -> Any:
        trainer, module = make()
        trainer.fit(module, *data, ckpt_path=checkpoint)
        return trainer

    return resumed(begin, lambda: whole_checkpoints(Path(checkpoints)))


def whole_checkpoints(directory: Path) -> Sequence[str]:
    """Returns a ModelCheckpoint's files, the latest last; a file gets its name once it is complete."""
    found = [(path.stat().st_mtime_ns, str(path)) for path in directory.glob("*.ckpt")]
    return [path for _, path in sorted(found)]
