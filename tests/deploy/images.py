"""An image built from deploy/docker/Dockerfile without a registry: the base is made of Debian's packages.

Buildah builds with the isolation of a chroot, and so needs root and nothing else: no daemon and no runtime.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.scheduler.processes import ROOT

NEEDED = ("buildah", "mmdebstrap", "unshare", "setpriv", "chroot")
BUILT_S = 600.0
# A root that cannot be written to, as Kubernetes' readOnlyRootFilesystem makes it, with mounts on top.
_ENTER = """
set -eu
root=$1; shift
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mount -t tmpfs -o mode=1777 journal "$root/var/lib/muster"
mount --bind "$1" "$root/mnt"; shift
touch "$root/etc/hosts"
mount --bind /etc/hosts "$root/etc/hosts"
mount -o remount,bind,ro "$root"
exec env -C / chroot --userspec=10001:10001 "$root" sh -c 'cd /opt/muster && exec "$@"' sh "$@"
"""


def can_build_images() -> bool:
    """Whether this process may build, and has the programs."""
    return os.geteuid() == 0 and all(shutil.which(name) for name in NEEDED)


class Image:
    """The image of one target, built in a storage of its own.

    Args:
        directory: where the storage is; nothing else is written to.
        target: the target of the Dockerfile.
    """

    def __init__(self, directory: Path, target: str) -> None:
        self._directory = directory
        self._buildah_words = [
            "buildah",
            *("--root", str(directory / "storage"), "--runroot", str(directory / "run")),
            *("--storage-driver", "vfs"),
        ]
        base = self._base()
        mounts = [word for path in self._pips_files() for word in ("--volume", path)]
        self.buildah(
            *("build", "--isolation", "chroot", "--format", "docker", "--network", "host", *mounts),
            *("--build-arg", f"BASE={base}", "--build-arg", f"CUDA_BASE={base}"),
            *("--target", target, "--tag", f"muster:{target}"),
            *("--ignorefile", str(ROOT / "deploy/docker/Dockerfile.dockerignore")),
            *("--file", str(ROOT / "deploy/docker/Dockerfile"), str(ROOT)),
        )
        self._container = self.buildah("from", f"muster:{target}").strip()
        self.root = Path(self.buildah("mount", self._container).strip())
        self.config = self.buildah("inspect", "--type", "image", f"muster:{target}")

    def buildah(self, *words: str) -> str:
        """Runs buildah on this storage, and returns what it printed."""
        done = subprocess.run(
            [*self._buildah_words, *words], capture_output=True, text=True, timeout=BUILT_S, check=False
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def run(self, *command: str) -> str:
        """Runs a command in the image as buildah does it: user and environment are the image's."""
        return self.buildah("run", "--isolation", "chroot", self._container, "--", *command)

    def start(self, *command: str, folder: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Starts a command as the image's user in a root that is read-only; ``folder`` is /mnt in there."""
        path = {"PATH": "/opt/venv/bin:/usr/sbin:/usr/bin:/bin", "PYTHONUNBUFFERED": "1", "HOME": "/tmp"}
        words = ["unshare", "-m", "sh", "-c", _ENTER, "enter", str(self.root), str(folder), *command]
        return subprocess.Popen(
            words, env=path | dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def _base(self) -> str:
        tar = self._directory / "base.tar"
        release = re.findall(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.M)[0]
        packages = "--include=python3,python3-venv,ca-certificates"
        made = ["mmdebstrap", "--quiet", "--variant=minbase", packages, release, str(tar)]
        subprocess.run(made, check=True, timeout=BUILT_S, capture_output=True)
        container = self.buildah("from", "scratch").strip()
        self.buildah("add", container, str(tar), "/")
        self.buildah("commit", container, "localhost/base")
        self.buildah("rm", container)
        tar.unlink()
        return "localhost/base"

    def _pips_files(self) -> Sequence[str]:
        """What pip reads on this machine, for the build alone: its configuration, and what that names."""
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
        )
        pairs = dict(re.findall(r"^[\w:]+\.([\w-]+)='(.*)'$", listed.stdout, re.M))
        conf = self._directory / "pip.conf"
        conf.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in pairs.items()))
        words = [word for value in pairs.values() for word in value.split()]
        named = {Path(word) for word in words}
        # An index in a folder leads to files beside that folder.
        named |= {Path(word.removeprefix("file://")).parent for word in words if word.startswith("file://")}
        named = {path for path in named if path.is_absolute() and path.exists()}
        return [f"{conf}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in sorted(named))]
