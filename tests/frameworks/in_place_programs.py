"""Programs of frameworks that live on; ``python in_place_programs.py NAME FOLDER DIES_IN``."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import muster.torch
import muster.torch.huggingface
import muster.torch.lightning

warnings.simplefilter("ignore")
torch.set_num_threads(1)
FOLDER, DIES_IN = sys.argv[2], int(sys.argv[3])
FIRST = os.environ["MUSTER_GENERATION"] == "1"


def die_in(step: int) -> None:
    """Rank 1 is killed before this step, once the checkpoint of the one before has come to its end."""
    if step == DIES_IN and FIRST and os.environ["RANK"] == "1":
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)


def say_end(net: Any) -> None:
    whole = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
    line = f"ended {os.environ['RANK']} {FIRST} {hashlib.sha256(whole).hexdigest()}\n"
    sys.stdout.write(line)
    sys.stdout.flush()


def trainer() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    words = torch.randint(0, 32, (64, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in words]

    class Kills(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            die_in(state.global_step)

    arguments = TrainingArguments(
        output_dir=FOLDER,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        save_steps=2,
        disable_tqdm=True,
        seed=3,
    )
    made = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Kills()])
    muster.torch.huggingface.train(made)
    say_end(model)


def lightning() -> None:
    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(7))

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            die_in(self.global_step)
            return (self.net(batch[0]) - batch[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    def make() -> tuple[Any, Any]:
        keeps = ModelCheckpoint(FOLDER, save_top_k=2, monitor="step", mode="max", every_n_epochs=1)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        made = pl.Trainer(
            accelerator="cpu", strategy="ddp", devices=devices, max_epochs=4, callbacks=[keeps], **quiet
        )
        return made, Module()

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
    done = muster.torch.lightning.fit(make, loader, checkpoints=Path(FOLDER))
    say_end(done.lightning_module)


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    rows = torch.utils.data.TensorDataset(torch.randn(64, 8))
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    net, optimizer, loader = accelerator.prepare(
        module, torch.optim.AdamW(module.parameters(), 0.05), torch.utils.data.DataLoader(rows, batch_size=4)
    )
    state = {"net": net, "optimizer": optimizer.optimizer}
    for step, (batch,) in muster.torch.steps(state, loader, epochs=2, every=2):
        with step:
            die_in(int(step))
            optimizer.zero_grad()
            accelerator.backward((net(batch) - batch).pow(2).mean())
            optimizer.step()
    say_end(module)


if __name__ == "__main__":
    {"trainer": trainer, "lightning": lightning, "accelerate": accelerate}[sys.argv[1]]()
