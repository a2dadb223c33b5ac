"""``muster train``: the example job, in any directory, with nothing but the package."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from muster.errors import SettingsError, WorkerError
from muster.launch.command import count_gpus, offered_devices
from muster.launch.command import main as run
from muster.launch.fork import own_flags
from muster.launch.options import count
from muster.launch.screen import say
from muster.version import how_to_install

KEYS = Path(".muster")
EPILOG = """\
Each worker has a GPU of its own where there are enough; else all compute on CPUs. All other options go to the
script: muster train --epochs 3 --model deep. The first run makes certificates in
.muster, for its owner only; logs are in muster-runs, checkpoints in checkpoints. Your own script starts as

  muster run -n 2 --scheduler --config .muster/config.json \\
    --password-file .muster/password -- python train.py"""


def main(argv: Sequence[str]) -> int:
    """Launches the example and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="muster train",
        description="Trains a small network on handwritten digits: a scheduler and workers on this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-n", dest="workers", type=count, default=2, metavar="N", help="workers (2)")
    options, rest = parser.parse_known_args(list(argv))
    try:
        if "--data" not in " ".join(rest) and not os.environ.get("DATA_PATH"):
            from muster.example.datasets import load_digits

            load_digits()  # Reports missing data once here, rather than in each worker.
        certificates = _certificates()
        gpus = len(offered_devices(os.environ, "all", count_gpus()))
    except WorkerError as error:
        say(str(error))
        return error.exit_code
    devices, why = choose_devices(
        options.workers, gpus, has_cupy=importlib.util.find_spec("cupy") is not None
    )
    if why:
        say(why)
    command = [sys.executable, *own_flags(), "-m", "muster.train", *rest]
    return run(
        ["-n", str(options.workers), "--devices", devices, "--scheduler", *certificates, "--", *command]
    )


def choose_devices(workers: int, gpus: int, *, has_cupy: bool) -> tuple[str, str]:
    """Decides which devices the workers compute on, so that the example runs on every host.

    Args:
        workers: the number of workers.
        gpus: the number of GPUs of this host.
        has_cupy: whether CuPy is installed, without which the example cannot use GPUs.

    Returns:
        The value of ``--devices`` for ``muster run``, and a line that says why GPUs are not used; empty if
            they are.
    """
    if not gpus:
        return "all", ""
    if not has_cupy:
        return "none", f"training on CPUs, as GPUs need CuPy. {how_to_install('cuda13')} (or cuda12)"
    if workers > gpus:
        which, them = ("1 GPU", "it") if gpus == 1 else (f"{gpus} GPUs", "them")
        return "none", (
            f"{workers} workers for {which}: training on CPUs; -n {gpus} (make: WORKERS={gpus}) takes {them}"
        )
    return "all", ""


def _certificates() -> list[str]:
    """Returns the options that name this machine's certificates, which are created if necessary."""
    if os.environ.get("MS_CONFIG_FILE"):
        return []
    config, password = KEYS / "config.json", KEYS / "password"
    if not config.exists():
        say(f"making certificates for this machine in {KEYS}/")
        # The environment may contain passwords of other jobs, which must not be used for these files.
        env = {name: value for name, value in os.environ.items() if "_PASSWORD" not in name}
        from muster.launch.fork import own_flags

        init = (
            *own_flags(),
            "-m",
            "muster",
            "certs",
            "init",
            "--dir",
            str(KEYS),
            "--password-file",
            str(password),
        )
        done = subprocess.run(
            [sys.executable, *init], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if done.returncode:
            raise SettingsError(done.stderr.strip() or "The certificates could not be made.")
    return ["--config", str(config), "--password-file", str(password)]
