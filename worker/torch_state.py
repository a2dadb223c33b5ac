"""A torch model in an :class:`~worker.training.ElasticLoop`: its state outlives members, captured or not.

On a GPU the host runs ahead, and what an aborted AllReduce leaves behind still flows into the optimizer's
update, which may be part of the same CUDA graph. So each finished step is waited for and copied aside (a
tenth of a millisecond for ResNet-50), and a step that broke is undone from that copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakMethod

import numpy as np
import torch
from numpy.typing import NDArray

from worker.communicators.base import Array, Communicator
from worker.sharding import ShardedSampler
from worker.state import TrainingState
from worker.torch_data_parallel import DataParallel
from worker.torch_optimizer_state import check_trains, is_number, make_optimizer_state, number_of
from worker.torch_random import RandomState
from worker.torch_transfer import array_of, bytes_of, copy_tensors, gather_rows, pieces


class TorchTrainingState(TrainingState):
    """Parameters, buffers, the optimizer's state, and the position in the data.

    ::

        model = worker.DataParallel(net, session, elastic=True)
        state = TorchTrainingState(model, optimizer, sampler)
        for step in ElasticLoop(session, state, epochs=90):
            with step:
                loss = train_step(images[step.batch.indices], labels[step.batch.indices])

    Of torch's default generators, the CPU's and this GPU's, each rank keeps its own: a step that is redone
    draws what it drew before (what is drawn after a step counts towards the next). Whoever takes up a run,
    as a newcomer or from a checkpoint, seeds them anew from its initial seed, its rank and the step.
    What ``optimizer.load_state_dict`` brings becomes part of the state, and so do parameters that it is given
    later, on all ranks. Generators of your own are not part of the state: seed them from (seed, step, rank).
    Nor is what a learning rate scheduler or a GradScaler counts, and newcomers would begin anew with it: set
    rates as a function of :attr:`step`, and train in bfloat16.

    Args:
        model: made with ``elastic=True``.
        optimizer: of torch; its state is made now, as its first step would make it.
        sampler: deals out the samples.
        samples_per_rank: keep this number per rank whatever the number of ranks, so that shapes, and with
            them captured graphs and tuned kernels, stay the same; None: keep the global batch.

    Raises:
        SettingsError: the optimizer is of another model, or its state cannot be made before a first step or
            is not all tensors.
    """

    def __init__(
        self,
        model: DataParallel,
        optimizer: Any,
        sampler: ShardedSampler,
        *,
        samples_per_rank: int | None = None,
    ) -> None:
        check_trains(optimizer, model)
        make_optimizer_state(optimizer)
        super().__init__(dict(_tensors(model, optimizer)), sampler)
        self._model = model
        self._optimizer = optimizer
        self._samples_per_rank = samples_per_rank
        self._kept: list[Any] = []
        self._parameter_count = _parameter_count(optimizer)
        self._random = RandomState(model.device)
        self._takes_up = False
        follow = WeakMethod(self._follow_optimizer)  # the optimizer may live longer
        optimizer.register_load_state_dict_post_hook(lambda _: (call := follow()) and call())

    # ------------------------------------------------------------ what the loop calls

    def carrier(self, communicator: Communicator) -> TensorCarrier:
        """See :class:`TrainingState`."""
        return TensorCarrier(communicator, self.arrays, self._model.device)

    def begin(self) -> None:
        """Keeps the state aside; see :class:`TrainingState`."""
        super().begin()
        if _parameter_count(self._optimizer) != self._parameter_count:
            self._follow_optimizer()
        self._random.keep()
        tensors = list(self.arrays.values())
        if self._kept:
            copy_tensors(self._kept, tensors)
        else:
            self._kept = [tensor.clone() for tensor in tensors]

    def commit(self) -> None:
        """Waits for the GPU; see :class:`TrainingState`."""
        synchronize = getattr(self._model.communicator, "synchronize", None)
        if synchronize is not None:
            synchronize()
        super().commit()

    def roll_back(self) -> None:
        """Puts back what was kept, once nothing of the broken step runs any more."""
        if self.in_step:
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)
            copy_tensors(list(self.arrays.values()), self._kept)
            self._random.put_back()
        super().roll_back()

    def enter(self, communicator: Communicator, source: int) -> None:
        """See :class:`TrainingState`."""
        super().enter(communicator, source)
        if self._samples_per_rank is not None:
            self.sampler.batch_size = self._samples_per_rank * communicator.world_size
        self._model.join(communicator, source)
        if self._takes_up:
            self._takes_up = False
            self._random.begin(communicator.rank, self.step)

    def _follow_optimizer(self) -> None:
        """The optimizer's tensors are others now: it has loaded a state, or got more parameters."""
        make_optimizer_state(self._optimizer)
        self.arrays.clear()
        self.arrays.update(_tensors(self._model, self._optimizer))
        self._parameter_count = _parameter_count(self._optimizer)
        if self.in_step:  # what a broken step goes back to
            self._kept = [tensor.clone() for tensor in self.arrays.values()]
        else:
            self._kept = []

    # ------------------------------------------------------------ what travels beside the tensors

    def describe(self) -> str:
        """See :class:`TrainingState`; with the optimizer's numbers (learning rates, say)."""
        groups = [
            {key: number_of(value) for key, value in group.items() if is_number(value)}
            for group in self._optimizer.param_groups
        ]
        return json.dumps(json.loads(super().describe()) | {"groups": groups})

    def restore(self, description: str) -> None:
        """See :class:`TrainingState`; the arrays have been put in place before."""
        steps_before = self.step
        super().restore(description)
        self._takes_up |= steps_before == 0 < self.step
        for group, values in zip(
            self._optimizer.param_groups, json.loads(description)["groups"], strict=True
        ):
            for key, value in values.items():
                if isinstance(group[key], torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value

    # ------------------------------------------------------------ what a checkpoint holds

    def for_checkpoint(self) -> tuple[str, dict[str, NDArray[Any]]]:
        """See :class:`TrainingState`; what NumPy has no dtype for stands there in float32, which is exact."""
        derived = self.derived()
        return self.describe(), {
            name: _to_host(tensor) for name, tensor in self.arrays.items() if name not in derived
        }

    def from_checkpoint(self, description: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """See :class:`TrainingState`."""
        derived = self.derived()
        for name, tensor in self.arrays.items():
            if name not in derived:
                tensor.copy_(torch.from_numpy(arrays[name]).view(tensor.shape))
        self._model.refresh_weights()
        self.restore(description)

    def layout(self) -> dict[str, str]:
        """See :class:`TrainingState`."""
        return {name: text.removeprefix("torch.") for name, text in super().layout().items()}

    def derived(self) -> set[str]:
        """The weights that are computed with, where the optimizer trains masters of them."""
        low = self._model.weights_dtype
        return {name for name, _ in self._model.module.named_parameters() if self.arrays[name].dtype == low}


class TensorCarrier:
    """Takes torch tensors from rank to rank; see :class:`worker.state_transfer.Carrier`."""

    def __init__(self, communicator: Communicator, tensors: dict[str, Any], device: Any) -> None:
        self._communicator = communicator
        self._tensors = tensors
        self._device = device

    def gather(self, row: list[int]) -> list[list[int]]:
        """Every rank's numbers, by rank."""
        return gather_rows(self._communicator, self._device, row)

    def broadcast_text(self, mine: bytes, length: int, source: int) -> str:
        """The text of ``source``, ``length`` bytes long."""
        buffer = torch.zeros(length, dtype=torch.uint8, device=self._device)
        if self._communicator.rank == source:
            buffer.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        self._communicator.broadcast(array_of(self._communicator, buffer), source)
        self._wait()
        return bytes(buffer.tolist()).decode()

    def broadcast_arrays(self, source: int) -> dict[str, Array]:
        """The tensors of ``source`` by name; own ones stay untouched."""
        received: dict[str, Array] = {}
        gives = self._communicator.rank == source
        for names in pieces(self._tensors):
            mine = [self._tensors[name] for name in names]
            if gives:
                flat = torch.cat([tensor.reshape(-1) for tensor in mine])
            else:
                flat = torch.empty(
                    sum(tensor.numel() for tensor in mine), dtype=mine[0].dtype, device=self._device
                )
            self._communicator.broadcast(array_of(self._communicator, bytes_of(flat)), source)
            parts = flat.split([tensor.numel() for tensor in mine])
            received |= {
                name: part.view(tensor.shape) for name, part, tensor in zip(names, parts, mine, strict=True)
            }
        self._wait()
        return received

    def _wait(self) -> None:
        """On a GPU a broken broadcast shows only here; nothing of it may be used."""
        synchronize = getattr(self._communicator, "synchronize", None)
        if synchronize is not None:
            synchronize()


def _tensors(model: DataParallel, optimizer: Any) -> Iterator[tuple[str, Any]]:
    seen = set()
    for name, tensor in (*model.module.named_parameters(), *model.module.named_buffers()):
        seen.add(id(tensor))
        yield name, tensor.detach()
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in seen:  # master weights
                yield f"optimizer.{number}.{index}", parameter.detach()
            for key, value in sorted(optimizer.state[parameter].items()):
                if isinstance(value, torch.Tensor):
                    yield f"optimizer.{number}.{index}.{key}", value


def _parameter_count(optimizer: Any) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _to_host(tensor: Any) -> NDArray[Any]:
    host = tensor.detach().to("cpu", copy=True).contiguous()
    if str(host.dtype).removeprefix("torch.") not in np.sctypeDict:
        host = host.float()
    array: NDArray[Any] = host.numpy()
    return array
