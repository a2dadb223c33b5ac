"""``muster train``: the example job, in any directory, with nothing but the package."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from muster.worker.errors import SettingsError, WorkerError
from muster.worker.launch.screen import say

KEYS = Path(".muster")
EPILOG = """\
All other options go to the script: muster train --epochs 3 --model deep. The first run makes certificates in
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
    parser.add_argument("-n", dest="workers", default="2", metavar="N", help="workers (2)")
    options, rest = parser.parse_known_args(list(argv))
    try:
        if "--data" not in " ".join(rest) and not os.environ.get("DATA_PATH"):
            from muster.worker.training.datasets import load_digits

            load_digits()  # once here, rather than in each worker, it says what is missing
        certificates = _certificates()
    except WorkerError as error:
        say(str(error))
        return error.exit_code
    from muster.worker.launch.command import main as run
    from muster.worker.launch.fork import own_flags

    command = [sys.executable, *own_flags(), "-m", "muster.train", *rest]
    return run(["-n", options.workers, "--scheduler", *certificates, "--", *command])


def _certificates() -> list[str]:
    """The options that name this machine's certificates, which are made if need be."""
    if os.environ.get("MS_CONFIG_FILE"):
        return []
    config, password = KEYS / "config.json", KEYS / "password"
    if not config.exists():
        say(f"making certificates for this machine in {KEYS}/")
        # Passwords of other jobs that the environment names must not become those of these files.
        env = {name: value for name, value in os.environ.items() if "_PASSWORD" not in name}
        from muster.worker.launch.fork import own_flags

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
