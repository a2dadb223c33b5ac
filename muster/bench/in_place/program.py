"""A torch program that goes on after losses, in several kinds; it records each step and its state's digest.

Started by ``muster bench in-place`` through the agent of ``muster run``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import muster.torch
from muster.bench.recovery.loop import RECORD_VARIABLE, EventFile
from muster.bench.snapshots.job import digest
from muster.wire.process_stat import stat_fields

WIDTH, ROWS, BATCH = 32, 40, 8

Pause = Callable[[int], None]


class Program:
    """A net of four layers that is trained with AdamW under DDP.

    Attributes:
        state: the state for :func:`muster.torch.steps`.
        net: the module with the parameters.
        optimizer: the optimizer with this rank's state.
    """

    def __init__(self) -> None:
        self.net: Any = self.make()
        self.optimizer: Any = torch.optim.AdamW(self.net.parameters(), 1e-2)
        self.state: dict[str, Any] = {"net": self.net, "optimizer": self.optimizer}

    def layers(self) -> Any:
        """Makes the net, the same on all ranks; its dropout draws from each rank's generator."""
        torch.manual_seed(7)
        hidden = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1)]
        net = nn.Sequential(*hidden, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        return net.to(_device_type())

    def make(self) -> Any:
        """Makes the net, wrapped or sharded as this kind does it."""
        return DistributedDataParallel(self.layers(), bucket_cap_mb=0.004)

    def train(self, rows: Any, pause: Pause) -> float:
        """Trains one step; returns this rank's loss."""
        self.optimizer_of_all.zero_grad()
        loss = (self.net(rows) - rows).square().mean()
        pause(1)
        loss.backward()
        pause(2)
        self.optimizer_of_all.step()
        return float(loss.item())

    @property
    def optimizer_of_all(self) -> Any:
        """The optimizer that a step calls."""
        return self.optimizer

    def digest(self) -> str:
        """Returns a digest of this rank's parameters and optimizer state."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.net.parameters(), *(each for each in states if isinstance(each, torch.Tensor))]
        return digest((each.to_local() if hasattr(each, "to_local") else each).cpu() for each in tensors)


class Fsdp2(Program):
    """FSDP2 over all ranks."""

    def mesh(self) -> Any:
        """Returns the mesh of the ranks over which parameters are sharded."""
        return init_device_mesh(_device_type(), (dist.get_world_size(),))

    def make(self) -> Any:
        """See :class:`Program`."""
        from torch.distributed.fsdp import fully_shard

        net, mesh = self.layers(), self.mesh()
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)


class Hsdp(Fsdp2):
    """FSDP2 within each half of the ranks; the halves are replicas."""

    def mesh(self) -> Any:
        """See :class:`Fsdp2`."""
        return init_device_mesh(
            _device_type(), (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
        )


class Fsdp2AndTensorParallel(Fsdp2):
    """Tensor parallelism of two linear layers over two ranks, by columns and rows, and FSDP2 over two."""

    def mesh(self) -> Any:
        """See :class:`Fsdp2`."""
        return self._whole_mesh["data"]

    def layers(self) -> Any:
        """See :class:`Program`."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        names = ("data", "tensor")
        self._whole_mesh: Any = init_device_mesh(
            _device_type(), (dist.get_world_size() // 2, 2), mesh_dim_names=names
        )
        plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
        return parallelize_module(super().layers(), self._whole_mesh["tensor"], plan)


class Pipeline(Program):
    """Two pipelines of two stages; each stage is on half of the ranks."""

    def make(self) -> Any:
        """See :class:`Program`."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        mesh = init_device_mesh(
            _device_type(), (2, dist.get_world_size() // 2), mesh_dim_names=("stage", "data")
        )
        stage = mesh.get_local_rank("stage")
        self._is_last, self._data = stage == 1, mesh.get_group("data")
        net = self.layers()[3:] if self._is_last else self.layers()[:3]
        piece = torch.zeros(
            BATCH // 2, WIDTH, device=_device_type()
        )  # without shapes the stages exchange them, and a newcomer is alone
        given, gives = piece.clone().requires_grad_(self._is_last), piece.clone().requires_grad_()
        device, group = torch.device(_device_type()), mesh.get_group("stage")
        made = PipelineStage(net, stage, 2, device, given, gives, group=group)
        self._schedule = Schedule1F1B(made, 2, loss_fn=nn.MSELoss())
        return net

    def train(self, rows: Any, pause: Pause) -> float:
        """See :class:`Program`."""
        self.optimizer.zero_grad()
        losses: list[Any] = []
        if self._is_last:
            self._schedule.step(target=rows, losses=losses)
        else:
            self._schedule.step(rows)
        pause(2)
        for parameter in self.net.parameters():
            dist.all_reduce(parameter.grad, group=self._data)
        self.optimizer.step()
        return float(sum(each.item() for each in losses))


class ZeroRedundancy(Program):
    """DDP with torch's ZeroRedundancyOptimizer, which shards the optimizer state."""

    def __init__(self) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.net = self.make()
        self._zero: Any = ZeroRedundancyOptimizer(self.net.parameters(), torch.optim.AdamW, lr=1e-2)
        self.optimizer = self._zero.optim
        self.state = {"net": self.net, "optimizer": self._zero}

    @property
    def optimizer_of_all(self) -> Any:
        """See :class:`Program`."""
        return self._zero


KINDS: dict[str, type[Program]] = {
    "ddp": Program,
    "fsdp2": Fsdp2,
    "hsdp": Hsdp,
    "fsdp2-tp": Fsdp2AndTensorParallel,
    "pipeline": Pipeline,
    "zero": ZeroRedundancy,
}


def _device_type() -> str:
    """Returns the type of the default device, which main() has set to the first GPU or left at the CPU."""
    return str(torch.get_default_device().type)


def _begun() -> float:
    """Returns the time on the monotonic clock at which this process began, in seconds."""
    ticks = int(stat_fields()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s


def main() -> int:
    """Trains, and records each step that counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, default="ddp")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--pace-ms", type=float, default=0)
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = EventFile(os.environ[RECORD_VARIABLE])
    record.note("begun", at=_begun(), pid=os.getpid())
    if not muster.torch.keep_alive():
        raise SystemExit("this torch cannot keep programs alive")
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.gpu else "gloo")
    rank = dist.get_rank()
    if options.gpu:
        torch.use_deterministic_algorithms(True)
        torch.set_default_device("cuda")
    program = KINDS[options.kind]()
    device = _device_type()
    torch.set_default_device(None)
    torch.manual_seed(100 + rank)
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank % 2))
    dataset = torch.utils.data.TensorDataset(rows)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True)
    copying = {"every": options.every, "copies": options.copies}
    for step, (batch,) in muster.torch.steps(program.state, loader, epochs=10**9, **copying):

        def pause(place: int, number: int = int(step)) -> None:
            """Pauses at one place of each step, and at another place in the next."""
            if options.pace_ms and number * 7919 % 4 == place:
                time.sleep(options.pace_ms / 1000)

        pause(0)
        with step:
            loss = program.train(batch.to(device), pause)
        pause(3)
        if step.rehearses:
            record.note("rehearsed", pid=os.getpid())
        elif not step.is_broken:
            record.note(
                "step",
                step=int(step),
                rank=rank,
                generation=int(os.environ["MUSTER_GENERATION"]),
                pid=os.getpid(),
                loss=loss.hex(),
                digest=program.digest(),
            )
            if int(step) == options.steps > 0:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
