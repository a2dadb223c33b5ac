"""Tensors copied for a checkpoint that another process writes; on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from muster.torch.checkpoint_copier import CheckpointCopier
from muster.torch.data_parallel import DataParallel
from muster.torch.state import TorchTrainingState
from muster.training import checkpoint
from muster.training.checkpoint_copy import arrays_in
from muster.training.sampler import ShardedSampler
from muster.training.shared_room import SharedRoom
from muster.training.state import share_state
from tests.gpu.threads import ThreadCommunicator, run_ranks
from tests.torch.test_state import Place


def test_each_tensor_is_copied_row_by_row_in_a_kind_that_files_have() -> None:
    room, copier = SharedRoom(), CheckpointCopier(torch.device("cpu"))
    tensors = {
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "turned": torch.arange(6).reshape(2, 3).t(),
        "low": torch.randn(5).bfloat16(),
        "number": torch.tensor(3.0),
        "none": torch.zeros(0, 2),
    }
    more = {"text": np.frombuffer(b"abc", np.uint8)}
    for _ in range(2):  # the room is used again
        copy = copier.copy("words", tensors, more, room)
        copy.ready()
        assert copy.description == "words"
        found = arrays_in(room.take(copy.size), copy.places)
        for name, tensor in tensors.items():
            want = tensor.float() if name == "low" else tensor
            np.testing.assert_array_equal(found[name], want.numpy())
            assert found[name].dtype == want.numpy().dtype
        assert found["text"].tobytes() == b"abc"
        tensors["low"] = torch.randn(500).bfloat16()
    del found
    room.close()


@pytest.mark.parametrize("room_on_gpu", [True, False])
def test_a_torch_state_written_beside_the_training_is_that_of_a_synchronous_save(
    room_on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a GPU has no room for one more copy: the training then waits for the host's."""

    def without_room(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    if not room_on_gpu:
        monkeypatch.setattr(CheckpointCopier, "copy", without_room)

    def run(communicator: ThreadCommunicator) -> None:
        model = DataParallel(torch.nn.Linear(5, 3), communicator=communicator, elastic=True)
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        state = TorchTrainingState(model, optimizer, ShardedSampler(40, 4), also={"schedule": schedule})
        folder = checkpoint.Folder(str(tmp_path / "beside"), state)
        share_state(Place(communicator), state)
        for _ in range(2):
            state.begin()
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            schedule.step()
            state.commit()
            state.step += 1
        want = checkpoint.save(tmp_path / "sync", state)
        folder.save_beside()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        folder.wait()
        assert digest_of(tmp_path / "beside" / want.name) == digest_of(want)

    run_ranks(1, run)
    assert ("no room on the GPU" in caplog.text) is not room_on_gpu


def digest_of(path: Path) -> Any:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return {**file.metadata(), "saved_at": "", "state": json.loads(file.metadata()["state"])}
