"""Recovers Hugging Face's Trainer in place: when a rank is lost, processes stay and load a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.torch.resumed_training import resumed

_WRITTEN_LAST = "trainer_state.json"


def train(trainer: Any, **options: Any) -> Any:
    """Runs ``trainer.train()``, and continues it in the same processes when ranks are lost.

    ::

        muster.torch.keep_alive()  # before TrainingArguments(...)
        ...
        muster.torch.huggingface.train(trainer)

    The Trainer's loop cannot go back to an earlier step. So it resumes from its last checkpoint
    (``save_steps``), as with ``resume_from_checkpoint``. Without a checkpoint all processes are restarted.

    Args:
        trainer: a Trainer that has not trained yet; its ``output_dir`` is on a file system that all hosts
            share.
        options: further arguments of ``trainer.train()``.

    Returns:
        What ``trainer.train()`` returns.
    """

    def begin(checkpoint: str | None) -> Any:
        trainer.model_wrapped = trainer.model  # or it keeps its earlier wrapper, which a new process lacks
        trainer.model.zero_grad()
        return trainer.train(resume_from_checkpoint=checkpoint, **options)

    return resumed(begin, lambda: whole_checkpoints(Path(trainer.args.output_dir)))


def whole_checkpoints(directory: Path) -> Sequence[str]:
    """Returns the folders of a Trainer's complete checkpoints, the latest last."""
    found = [
        (int(number), path)
        for path in directory.glob("checkpoint-*")
        if (number := path.name.rpartition("-")[2]).isdigit() and (path / _WRITTEN_LAST).exists()
    ]
    return [str(path) for _, path in sorted(found)]
