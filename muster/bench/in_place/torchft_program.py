"""One rank of a torch program with torchft, for comparison. Needs torch and torchft only.

    python torchft_program.py --lighthouse               # prints its address, and runs until it is ended
    python torchft_program.py --kind hsdp --replica 1 --rank 0 --size 2 --port P --at ADDRESS --record FILE

It trains the net of :mod:`muster.bench.in_place.program` with AdamW, and records which steps all ranks have
committed, and which they have dropped.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

WIDTH, ROWS, BATCH = 32, 40, 8

HEARTBEAT_TIMEOUT_MS, JOIN_TIMEOUT_MS, TICK_MS = 1000, 60_000, 20
"""Milliseconds: the silence after which a group is lost (torchft's default: 5000), the time for which a
quorum waits for groups that are alive, and the interval of the lighthouse's checks."""

COLLECTIVE_TIMEOUT_S, TIMEOUT_S = 30.0, 30.0


def serve() -> None:
    """Runs the lighthouse, from which replica groups learn the quorum of each step."""
    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        quorum_tick_ms=TICK_MS,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    )
    print(server.address(), flush=True)
    signal.sigwait([signal.SIGTERM])


def layers() -> Any:
    """Makes the net, the same on all ranks."""
    torch.manual_seed(7)
    hidden = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def sharded(manager: Any, size: int) -> Any:
    """Makes the net with FSDP2 within the replica group; torchft averages gradients over the groups."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    net, mesh = layers(), init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda output: manager.allreduce(output).wait())
    return net


class TorchftRank:
    """One rank: its manager, net and optimizer.

    Args:
        options: the command line's options.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        rank, size = options.rank, options.size
        self._number = options.replica * size + rank
        self._pace_s = options.pace_ms / 1000
        self._record = Path(options.record).open("a", buffering=1)  # noqa: SIM115 until the process ends
        store = dist.TCPStore("localhost", options.port, size, is_master=rank == 0, wait_for_workers=False)
        self._store = store  # keeps the store's server alive
        if size > 1:
            group = dist.PrefixStore("group", store)
            dist.init_process_group("gloo", store=group, rank=rank, world_size=size)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)),
            load_state_dict=self._load,
            state_dict=lambda: {"tensors": [each.clone() for each in self._tensors()]},
            min_replica_size=1,
            timeout=timedelta(seconds=TIMEOUT_S),
            rank=rank,
            world_size=size,
            store_addr="localhost",
            store_port=options.port,
            lighthouse_addr=options.at,
            replica_id=f"replica_{options.replica}",
            hostname="localhost",
        )
        if options.kind == "ddp":
            self._net: Any = DistributedDataParallel(self._manager, layers())
        else:
            self._net = sharded(self._manager, size)
        # Within a step, when others may ask for the state, FSDP2's modules hold their whole parameters.
        self._parameters = list(self._net.parameters())
        self._adam = torch.optim.AdamW(self._net.parameters(), 1e-2)
        for parameter in self._net.parameters():  # creates the optimizer state, which is then overwritten
            parameter.grad = torch.zeros_like(parameter)
        self._adam.step()
        self._optimizer = Optimizer(self._manager, self._adam)
        self._rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(self._number % 2))
        torch.manual_seed(100 + self._number)
        self._note("built")

    def _note(self, what: str, **facts: Any) -> None:
        said = {"what": what, "t": time.monotonic(), "pid": os.getpid(), "rank": self._number, **facts}
        self._record.write(json.dumps(said) + "\n")

    def _tensors(self) -> list[Any]:
        """Returns this rank's tensors of the state."""
        states = [value for state in self._adam.state.values() for value in state.values()]
        found = [*self._parameters, *(each for each in states if isinstance(each, torch.Tensor))]
        return [(each.to_local() if hasattr(each, "to_local") else each).detach() for each in found]

    def _load(self, state: dict[str, Any]) -> None:
        for mine, theirs in zip(self._tensors(), state["tensors"], strict=True):
            mine.copy_(theirs)

    def _step(self) -> None:
        step = self._manager.current_step()

        def pause(place: int) -> None:
            if step * 7919 % 4 == place:
                time.sleep(self._pace_s)

        pause(0)
        self._optimizer.zero_grad()
        batch = self._rows[torch.randperm(ROWS)[:BATCH]]
        loss = (self._net(batch) - batch).square().mean()
        pause(1)
        loss.backward()
        pause(2)
        self._optimizer.step()
        pause(3)
        done = self._manager.current_step()
        if done > step:
            whole = b"".join(each.numpy().tobytes() for each in self._tensors())
            digest = hashlib.sha256(whole).hexdigest()[:16]
            self._note("step", step=done, replicas=self._manager.num_participants(), digest=digest)
        else:
            self._note("dropped", step=step + 1)

    def train(self) -> None:
        """Trains until the process is killed."""
        while True:
            self._step()


def main() -> int:
    """Serves, or trains until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", action="store_true")
    parser.add_argument("--kind", choices=("ddp", "hsdp"), default="ddp")
    for name in ("replica", "rank", "size", "port"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--at", default="")
    parser.add_argument("--record", default="")
    parser.add_argument("--pace-ms", type=float, default=0)
    options = parser.parse_args()
    if options.lighthouse:
        serve()
        return 0
    torch.set_num_threads(1)
    TorchftRank(options).train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
