"""Hugging Face's Trainer in place: processes stay when a rank is lost, and it resumes from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.torch.resumed_training import resumed

_WRITTEN_LAST = "trainer_state.json"


def train(trainer: Any, **options: Any) -> Any:
    """``trainer.train()`` that goes on in the same processes when ranks are lost.

    ::

        muster.torch.keep_alive()  # before TrainingArguments(...)
        ...
        muster.torch.huggingface.train(trainer)

    The Trainer's loop cannot be wound back: it goes on from its last checkpoint (``save_steps``), as with
    ``resume_from_checkpoint``, and without one all processes start again.

    Args:
        trainer: made, and not trained yet; ``output_dir`` is on a file system that all hosts share.
        options: further ones of its ``train()``.

    Returns:
        What that returns.
    """

    def begin(checkpoint: str | None) -> Any:
        trainer.model_wrapped = (
            trainer.model
        )  # else it keeps the wrapper of before, which a new process lacks
        trainer.model.zero_grad()
        return trainer.train(resume_from_checkpoint=checkpoint, **options)

    return resumed(begin, lambda: whole_checkpoints(Path(trainer.args.output_dir)))


def whole_checkpoints(directory: Path) -> Sequence[str]:
    """The folders of a Trainer's checkpoints that are written to their end, the latest last."""
    found = [
        (int(number), path)
        for path in directory.glob("checkpoint-*")
        if (number := path.name.rpartition("-")[2]).isdigit() and (path / _WRITTEN_LAST).exists()
    ]
    return [str(path) for _, path in sorted(found)]
