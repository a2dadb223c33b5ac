"""A machine of its own for the documented commands: this one's programs, but other files where they write."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.scheduler.processes import ROOT

README = (ROOT / "deploy" / "README.md").read_text()
WAIT_S = 200.0

# Everything of this machine, each mount in its place, and then the command in there. The mounts are in a
# name space of their own, and so end with the command.
_ENTER = """
set -eu
new=$1; shift
mount -t tmpfs none "$new"
for one in /*; do
  if [ -L "$one" ]; then cp -P "$one" "$new$one"
  elif [ -d "$one" ]; then mkdir "$new$one"; mount --rbind "$one" "$new$one"
  fi
done
while [ "$1" != -- ]; do
  mkdir -p "$new$2"; mount --bind "$1" "$new$2"; shift 2
done
shift
exec chroot "$new" "$@"
"""


def can_make_machines() -> bool:
    """Whether this process may mount."""
    if os.geteuid() != 0 or any(shutil.which(name) is None for name in ("unshare", "setpriv", "chroot")):
        return False
    tried = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


def section(title: str) -> str:
    """A chapter of deploy/README.md."""
    text = README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert text, f"no chapter {title!r}"
    return text


def block(title: str, words: str) -> str:
    """The one shell block of a chapter that has these words."""
    found = re.findall(r"^```sh\n(.*?)^```", section(title), re.M | re.S)
    [one] = [each for each in found if words in each]
    return str(one)


class Machine:
    """A file system of its own: /etc, /opt, /var and /srv are its own, the checkout is /opt/muster.

    Args:
        directory: where its files are kept.
        names: host names that mean this machine.
    """

    def __init__(self, directory: Path, *names: str) -> None:
        self.directory = directory
        self._started: list[subprocess.Popen[str]] = []
        for name in ("etc", "opt/muster", "var/lib", "var/log", "srv", "bin", "new"):
            (directory / name).mkdir(parents=True)
        shutil.copytree("/etc", directory / "etc", symlinks=True, dirs_exist_ok=True)
        with (directory / "etc" / "hosts").open("a") as hosts:
            hosts.writelines(f"127.0.0.1 {name}\n" for name in names)
        self._mounts = {f"/{name}": directory / name for name in ("etc", "opt", "var", "srv")}
        self._mounts |= {"/machine-bin": directory / "bin", "/opt/muster": ROOT}
        # An interpreter in root's home directory is opened to all users of the machine.
        for prefix in {sys.base_prefix, sys.prefix}:
            home = Path(*Path(prefix).parts[:2])
            if home.stat().st_mode & 0o005 != 0o005:
                (directory / "homes" / home.name).mkdir(parents=True, exist_ok=True)
                self._mounts = (
                    {str(home): directory / "homes" / home.name} | self._mounts | {prefix: Path(prefix)}
                )
        self.program("python", f'exec {sys.executable} "$@"')

    def program(self, name: str, text: str) -> None:
        """Puts a shell script before the programs of that name."""
        path = self.directory / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def start(
        self,
        *command: str,
        user: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        mounts: Mapping[str, Path] | None = None,
        cwd: str = "/opt/muster",
        within: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        """Starts a command.

        Args:
            command: the program with its arguments.
            user: setpriv's arguments; empty for root.
            env: the environment, besides the least.
            mounts: further directories of the machine, and what they are.
            cwd: the working directory.
            within: a command that starts the rest in name spaces of its own: nsenter, say.
        """
        every = self._mounts | dict(mounts or {})
        for prefix in (Path(sys.base_prefix), Path(sys.prefix)):
            if any(prefix.is_relative_to(target) for target in mounts or {}):  # a checkout in /tmp, say
                every[str(prefix)] = prefix
        where = [str(word) for target, source in every.items() for word in (source, target)]
        path = f"/machine-bin:{os.environ['PATH']}"
        least = {"PATH": path, "HOME": "/srv", "PYTHONPATH": "/opt/muster", "PYTHONUNBUFFERED": "1"}
        inside = ["env", "-C", cwd, *(["setpriv", *user] if user else []), *command]
        process = subprocess.Popen(
            [
                *within,
                "unshare",
                "-m",
                "sh",
                "-c",
                _ENTER,
                "enter",
                str(self.directory / "new"),
                *where,
                "--",
                *inside,
            ],
            env=least | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        """Ends what still runs, with whatever it has started."""
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def shell(self, text: str, cwd: str, **env: str) -> str:
        """Types a block as root; the first command that fails ends it. Returns what it said."""
        process = self.start("bash", "-euo", "pipefail", "-c", text, env=env, cwd=cwd)
        told = process.communicate(timeout=WAIT_S)[0]
        assert process.returncode == 0, told
        return told


def as_user(user: str, *kept: str) -> tuple[str, ...]:
    """Setpriv's arguments by which a command runs as a user, with no capability but some for root."""
    group = "nogroup" if user == "nobody" else user
    bounds = ",".join(["-all", *[f"+{each}" for each in kept]])
    return (
        *("--reuid", user, "--regid", group, "--clear-groups"),
        *("--inh-caps=-all", f"--bounding-set={bounds}", "--no-new-privs"),
    )


def end(*processes: subprocess.Popen[str]) -> list[str]:
    """Ends what still runs, and returns what each has said."""
    for process in processes:
        process.terminate()
    return [process.communicate(timeout=WAIT_S)[0] for process in processes]
