"""The parallel quickstart: a hidden layer, cut as you say or as the search says.

    muster run -n 8 --scheduler -- python -m examples.quickstart_parallel
    muster run -n 8 --scheduler -- python -m examples.quickstart_parallel --mode auto

On eight ranks the first product gets the strategy ((2, 4), (4, 1)): the batch in two parts, the sum in four.
Each rank multiplies [8, 8] by [8, 16], and what belongs together is summed over four ranks.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import torch

import muster

INPUTS, HIDDEN, OUTPUTS = 32, 16, 16
SAMPLES, STEPS, EPOCHS = 2, 4, 5  # samples of each rank in a step


class Net(torch.nn.Module):  # type: ignore[misc]
    """Two products with ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(0.01 * torch.randn(INPUTS, HIDDEN))
        self.weight2 = torch.nn.Parameter(0.01 * torch.randn(HIDDEN, OUTPUTS))

    def forward(self, x: Any) -> Any:
        """[samples, INPUTS] to [samples, OUTPUTS]."""
        return torch.matmul(torch.relu(torch.matmul(x, self.weight)), self.weight2)


def main() -> int:
    """Trains and prints the plan, local shapes and losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mode", choices=["semi_auto", "auto", "data_parallel"], default="semi_auto")
    parser.add_argument("--save", default="", help="write the plan to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with muster.init() as session:
        rank, world = session.rank, session.world_size
        rows = 2 if world % 2 == 0 else 1
        columns = world // rows
        # MindSpore's way: a context. Parameters of parallelize() do the same without one.
        muster.set_auto_parallel_context(
            parallel_mode=f"{options.mode}_parallel" if options.mode != "data_parallel" else options.mode,
            search_mode="sharding_propagation" if options.mode == "semi_auto" else "dynamic_programming",
            dataset_strategy="data_parallel",
            gradients_mean=True,
            parameter_broadcast=True,
        )
        strategies = {"matmul": ((rows, columns), (columns, 1))} if options.mode == "semi_auto" else None
        random = np.random.RandomState(1)
        data = torch.from_numpy(random.rand(world * SAMPLES, INPUTS + OUTPUTS).astype(np.float32))
        device = torch.device("cpu")
        if session.communicator.on_device:
            device = torch.device("cuda", session.device_ordinal)
            torch.cuda.set_device(device)
        own = data[rank * SAMPLES : (rank + 1) * SAMPLES].to(device)
        x, y = own[:, :INPUTS].contiguous(), own[:, INPUTS:].contiguous()
        torch.manual_seed(1)
        model = muster.parallelize(Net().to(device), (x, y), loss=torch.nn.MSELoss(), strategies=strategies)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.1)
        if rank == 0:
            print(model.plan)
            for name, parameter in model.named_parameters():
                print(f"{name.removeprefix('module.net.')}: {list(parameter.shape)} on this rank")
            if options.save:
                model.plan.save(options.save)
        for epoch in range(1, EPOCHS + 1):
            for step in range(1, STEPS + 1):
                optimizer.zero_grad()
                loss = model(x, y)
                loss.backward()
                optimizer.step()
                session.report(loss=loss.item(), steps=EPOCHS * STEPS, epoch=epoch, epochs=EPOCHS)
                if rank == 0:
                    print(f"epoch: {epoch} step: {step}, loss is {loss.item()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
