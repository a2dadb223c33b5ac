"""Which elements of a state a rank copies, and which it needs: of DTensors, and of what is refused."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist

from muster.errors import SettingsError
from muster.torch.snapshot_tensors import ObjectParts


def test_of_a_dtensor_each_rank_copies_its_shard() -> None:
    """As FSDP2 divides parameters, unevenly too; what is replicated each rank has whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    whole, found = torch.arange(20.0).view(10, 2), []
    for rank, rows in enumerate((slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10))):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (4,))
            objects = {
                "divided": DTensor.from_local(whole[rows], mesh, [Shard(0)], shape=(10, 2), stride=(2, 1)),
                "replicated": DTensor.from_local(whole, mesh, [Replicate()]),
            }
            divided, replicated = ObjectParts(objects).snapshot_tensors(rank, 4)
        finally:
            dist.destroy_process_group()
        assert divided.shape == (10, 2)
        assert divided.wanted == divided.own
        assert divided.own.offsets == (rows.start, 0)
        assert torch.equal(replicated.own_flat(), whole.view(-1))
        found.append(divided.own_flat())
    assert torch.equal(torch.cat(found), whole.view(-1))


def test_a_tensor_that_is_the_same_everywhere_is_copied_in_pieces() -> None:
    tensor = torch.arange(24.0).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    parts = [ObjectParts({"a": tensor}).snapshot_tensors(rank, 5)[0] for rank in range(5)]
    memory = torch.cat([part.own_flat() for part in parts])
    assert torch.equal(memory, tensor.as_strided((24,), (1,)))
    before = tensor.clone()
    tensor.zero_()
    parts[0].put(memory)
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("wrong", [3, object(), "text"])
def test_what_no_snapshot_could_hold_is_refused(wrong: Any) -> None:
    with pytest.raises(SettingsError, match="Snapshots: a is"):
        ObjectParts({"a": wrong})
