"""Small training programs of the frameworks, none of which knows Muster; ``python programs.py NAME FOLDER``.

Each trains some steps on data of its own making and prints a line for what must be the same under torchrun.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

warnings.simplefilter("ignore")
torch.set_num_threads(1)
FOLDER = sys.argv[2] if len(sys.argv) > 2 else ""


def say(what: str, value: Any) -> None:
    # One write for the line: processes that share a pipe would mix the pieces.
    sys.stdout.write(f"said {os.environ['RANK']} {what} {value}\n")
    sys.stdout.flush()


def say_world(processes: int) -> None:
    """How many processes the framework counts, and what carries their collectives."""
    say("processes", processes)
    say("group", type(dist.distributed_c10d._get_default_group()).__name__)


class Numbers(Dataset):  # type: ignore[misc]
    """64 samples, each of which is known by its first number."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(7)
        self.x = torch.randn(64, 8, generator=made)
        self.y = self.x @ torch.randn(8, 1, generator=made)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    say_world(accelerator.num_processes)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(Numbers(), batch_size=8))
    seen = 0
    for x, y in loader:
        loss = mse(net(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen += len(x)
        say("loss", loss.item().hex())
    say("seen", seen)
    say("gathered", accelerator.gather(torch.tensor([seen])).tolist())
    accelerator.end_training()


def trainer() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    words = torch.randint(0, 32, (32, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in words]

    class Losses(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            if "loss" in logs:
                say("loss", float(logs["loss"]).hex())

    arguments = TrainingArguments(
        output_dir=FOLDER,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
    )
    training = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Losses()])
    say_world(training.args.world_size)
    done = training.train()
    say("steps", done.global_step)
    say("train loss", done.training_loss.hex())


def lightning(strategy: str) -> None:
    import lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def on_train_start(self) -> None:
            say_world(self.trainer.world_size)

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            loss = mse(self.net(batch[0]), batch[1])
            say("loss", loss.item().hex())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    pl.seed_everything(5, verbose=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    fit = pl.Trainer(
        accelerator="cpu", strategy=strategy, devices=int(os.environ["LOCAL_WORLD_SIZE"]), max_epochs=1,
        enable_model_summary=False, **quiet,
    )  # fmt: skip
    fit.fit(Module(), DataLoader(Numbers(), batch_size=8))
    say("steps", fit.global_step)


def lightning_ddp() -> None:
    lightning("ddp")


def lightning_fsdp() -> None:
    """The wrapper that the strategy "fsdp" stands for, on CPUs: ModelParallel with FSDP2."""
    import lightning as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def configure_model(self) -> None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def on_train_start(self) -> None:
            say_world(self.trainer.world_size)

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            loss = mse(self.net(batch[0]), batch[1])
            say("loss", loss.item().hex())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    pl.seed_everything(5, verbose=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    strategy = ModelParallelStrategy(data_parallel_size=local, tensor_parallel_size=1)
    fit = pl.Trainer(
        accelerator="cpu", strategy=strategy, devices=local, max_epochs=1, enable_model_summary=False, **quiet
    )
    fit.fit(Module(), DataLoader(Numbers(), batch_size=8))
    say("steps", fit.global_step)


def deepspeed() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as ds

    # For inference alone; a compiler takes minutes for it when it is first used.
    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    ds.init_distributed(dist_backend="gloo")
    net = network()
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    del settings["optimizer"]
    engine, _, loader, _ = ds.initialize(
        model=net, optimizer=optimizer, config=settings, training_data=Numbers()
    )
    say_world(dist.get_world_size())
    for x, y in loader:
        loss = mse(engine(x), y)
        engine.backward(loss)
        engine.step()
        say("loss", loss.item().hex())
    dist.destroy_process_group()


def by_hand() -> None:
    """FSDP2 over a mesh, a DTensor, a checkpoint saved and loaded."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group()
    say_world(dist.get_world_size())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = network()
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    data = Numbers()
    sampler: Any = DistributedSampler(data, shuffle=True, seed=2)
    say("share", len(sampler))
    for x, y in DataLoader(data, batch_size=8, sampler=sampler):
        loss = mse(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say("loss", loss.item().hex())
    before = {name: value.full_tensor().clone() for name, value in net.state_dict().items()}
    dcp.save({"net": net.state_dict()}, checkpoint_id=str(Path(FOLDER, "checkpoint")))
    for parameter in net.parameters():
        parameter.data.zero_()
    state = net.state_dict()
    dcp.load({"net": state}, checkpoint_id=str(Path(FOLDER, "checkpoint")))
    net.load_state_dict(state)
    same = all(torch.equal(net.state_dict()[name].full_tensor(), value) for name, value in before.items())
    say("checkpoint", same)
    torch.manual_seed(1)
    matrix = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
    say("dtensor", (matrix @ matrix).redistribute(mesh, [Replicate()]).to_local().sum().item().hex())
    dist.destroy_process_group()


PROGRAMS = {
    each.__name__: each for each in (accelerate, trainer, lightning_ddp, lightning_fsdp, deepspeed, by_hand)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
