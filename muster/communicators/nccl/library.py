"""The plug-in that encrypts NCCL's traffic, as a library on this host: finds, builds, loads and asks it.

The plug-in is written in C, and Muster's wheel is the same for all systems. So it is built once on each host
that needs it, by `muster nccl-plugin build` or when a job first asks for encryption. The name of its folder
contains a digest of sources and compiler options, so that another version never uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.communicators.nccl.encryption import SealingPlugin
from muster.errors import CommunicatorError, SettingsError
from muster.version import __version__

SOURCES = Path(__file__).parent / "sealed"
LIBRARY_NAME = "libmuster-nccl.so"
COMPILERS = ("cc", "gcc", "clang")
COMPILE_FLAGS = (
    "-std=c11",
    "-O2",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fstack-protector-strong",
    "-D_FORTIFY_SOURCE=2",
)
LIBRARIES = ("-Wl,-z,nodelete", "-Wl,-z,relro", "-Wl,-z,now", "-lcrypto", "-lpthread")
BUILD_TIMEOUT_S = 300.0
_REASON_BYTES = 1024
_INSTALL_COMPILER = "Install a C compiler (apt install gcc libc6-dev, dnf install gcc) or set CC."
_MOST_SHOWN = 300


class PluginLibrary:
    """The plug-in as a library that is loaded into this process; NCCL calls it.

    Args:
        path: the file.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: the file is another library.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        loaded: Any = ctypes.CDLL(self.path)
        self._use_secret = loaded.muster_nccl_use_secret
        self._use_secret.argtypes = (ctypes.c_uint64, ctypes.c_char_p)
        self._reason, self._self_test = loaded.muster_nccl_reason, loaded.muster_nccl_self_test
        for asked in (self._reason, self._self_test):
            asked.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
        self._forget_reason, self._version = loaded.muster_nccl_forget_reason, loaded.muster_nccl_version
        self._forget_reason.restype, self._version.restype = None, ctypes.c_char_p

    def use_secret(self, generation: int, secret: bytes) -> None:
        """Makes connections from now on prove this generation's secret; earlier secrets are forgotten.

        Raises:
            CommunicatorError: the plug-in does not accept the secret.
        """
        if self._use_secret(generation, secret) != 0:
            raise CommunicatorError(
                f"the plug-in that encrypts NCCL's traffic took no secret for generation {generation}",
                remedy="Build it again: muster nccl-plugin build --force.",
            )

    def forget_reason(self) -> None:
        """Forgets why earlier connections ended."""
        self._forget_reason()

    def version(self) -> str:
        """The plug-in's version, and that of the OpenSSL that it uses."""
        return _printable(self._version())

    def reason(self) -> str:
        """Returns a sentence on why the last failed connection ended; empty: none has failed."""
        buffer = ctypes.create_string_buffer(_REASON_BYTES)
        self._reason(buffer, _REASON_BYTES)
        return _printable(buffer.value)

    def self_test(self) -> str:
        """Returns what prevents it from encrypting on this host, as a sentence; empty: nothing does."""
        buffer = ctypes.create_string_buffer(_REASON_BYTES)
        if self._self_test(buffer, _REASON_BYTES) == 0:
            return ""
        return _printable(buffer.value) or "it does not say why"


def _printable(text: bytes) -> str:
    return "".join(each if each.isprintable() else " " for each in text.decode(errors="replace")).strip()


# ---------------------------------------------------------------- where it is


def sources() -> list[Path]:
    """Returns the source files, in a fixed order."""
    return sorted(each for pattern in ("*.c", "*.h") for each in SOURCES.glob(pattern))


@functools.cache
def digest() -> str:
    """Returns a digest of the sources, compiler and options of a build."""
    hashed = hashlib.sha256(" ".join((*COMPILE_FLAGS, *LIBRARIES, platform.machine())).encode())
    for path in sources():
        hashed.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()[:16]


def places(env: Mapping[str, str]) -> list[Path]:
    """Returns the paths at which the library may be: next to Muster, then in this user's cache."""
    found = [SOURCES / "build" / digest() / LIBRARY_NAME]
    cache = env.get("XDG_CACHE_HOME", "")
    home = env.get("HOME", "")
    folder = Path(cache) if cache.startswith("/") else Path(home) / ".cache" if home.startswith("/") else None
    if folder is not None:
        found.append(folder / "muster" / "nccl" / f"{__version__}-{digest()}" / LIBRARY_NAME)
    return found


def find(env: Mapping[str, str]) -> Path | None:
    """Returns the path of the built library; None: it is not built, or others could have written it."""
    return next((path for path in places(env) if _is_ours(path)), None)


def _is_ours(path: Path) -> bool:
    """Whether only this user, root, or the user who installed Muster can have written the file."""
    try:
        found = path.lstat()
        folder = path.parent.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and all(
        each.st_uid in (0, os.geteuid(), Path(__file__).stat().st_uid) and not each.st_mode & 0o022
        for each in (found, folder)
    )


# ---------------------------------------------------------------- building


def compiler(env: Mapping[str, str]) -> list[str]:
    """Returns the command of the C compiler: CC, or the first one that exists.

    Raises:
        SettingsError: there is no C compiler.
    """
    chosen = shlex.split(env.get("CC", ""))
    search = env.get("PATH")
    if chosen:
        if shutil.which(chosen[0], path=search) is None:
            raise SettingsError(
                f"CC is {chosen[0][:80]!r}, and there is no such compiler on this host.",
                remedy="Set CC to one, or unset it.",
            )
        return chosen
    found = next((name for name in COMPILERS if shutil.which(name, path=search)), None)
    if found is None:
        raise SettingsError(
            f"There is no C compiler on this host (looked for {', '.join(COMPILERS)}), and the plug-in that"
            " encrypts NCCL's traffic is built here.",
            remedy=f"{_INSTALL_COMPILER} Or build it on a host of the same kind and copy the folder that"
            " muster nccl-plugin show names.",
        )
    return [found]


def build(env: Mapping[str, str], *, force: bool = False) -> Path:
    """Builds the library unless it exists; other processes wait for the one that builds.

    Args:
        env: the environment; CC, PATH, HOME and XDG_CACHE_HOME are read from it.
        force: whether to build it even if it exists.

    Raises:
        SettingsError: the library cannot be built; the message says why and what to do.
    """
    if not force and (found := find(env)) is not None:
        return found
    if not any(path.suffix == ".c" for path in sources()):
        raise SettingsError(
            "This installation of Muster lacks the sources of the plug-in that encrypts NCCL's traffic.",
            remedy="Install Muster from its wheel or a checkout.",
        )
    command = compiler(env)
    refused: list[str] = []
    for target in places(env):
        try:
            with _alone(target.parent):
                if not force and _is_ours(target):
                    return target
                _compile(command, target)
                return target
        except OSError as error:
            refused.append(f"{target.parent} ({error.strerror or error})")
    raise SettingsError(
        f"No folder for the plug-in that encrypts NCCL's traffic can be written to: {'; '.join(refused)}.",
        remedy="Set XDG_CACHE_HOME to a folder that this user may write to.",
    )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Context that makes the folder, and locks it against other processes that would build in it."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _compile(command: Sequence[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as folder:
        made = Path(folder) / LIBRARY_NAME
        files = [str(path) for path in sources() if path.suffix == ".c"]
        line = [*command, *COMPILE_FLAGS, f"-I{SOURCES}", "-o", str(made), *files, *LIBRARIES]
        try:
            done = subprocess.run(
                line, capture_output=True, timeout=BUILD_TIMEOUT_S, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise SettingsError(
                f"{command[0]} did not build the plug-in that encrypts NCCL's traffic within"
                f" {BUILD_TIMEOUT_S:g} s.",
                remedy="Try muster nccl-plugin build again, or with another compiler (CC).",
            ) from None
        if done.returncode:
            raise _failed(command[0], done.stderr.decode(errors="replace"))
        made.chmod(0o755)
        made.replace(target)


def _failed(name: str, said: str) -> SettingsError:
    """Explains a compiler's failure in a sentence."""
    lines = [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines()
    first = _printable((lines[0] if lines else "it said nothing").encode())[:_MOST_SHOWN]
    remedy = "muster nccl-plugin build shows it again; CC chooses another compiler."
    if "openssl/" in first or "-lcrypto" in said:
        remedy = "Install OpenSSL's headers (apt install libssl-dev, dnf install openssl-devel)."
    elif "No such file" in first and ".h" in first:
        remedy = "Install the C library's headers (apt install libc6-dev, dnf install glibc-devel)."
    return SettingsError(
        f"{name} could not build the plug-in that encrypts NCCL's traffic: {first}", remedy=remedy
    )


# ---------------------------------------------------------------- what this host has


def load(path: Path | str) -> PluginLibrary:
    """Loads the library.

    Raises:
        SettingsError: the library cannot be loaded.
    """
    try:
        return PluginLibrary(path)
    except (OSError, AttributeError) as error:
        raise SettingsError(
            f"The plug-in that encrypts NCCL's traffic cannot be loaded: {str(error)[:_MOST_SHOWN]}",
            remedy="Build it again: muster nccl-plugin build --force.",
        ) from error


def plugin_of_this_host(env: Mapping[str, str]) -> SealingPlugin:
    """Finds or builds the library, and runs its self test; the result says what is wrong."""
    try:
        path = build(env)
        wrong = load(path).self_test()
    except SettingsError as error:
        return SealingPlugin(obstacle=error.message, remedy=error.remedy)
    if wrong:
        return SealingPlugin(
            str(path),
            f"The plug-in that encrypts NCCL's traffic cannot encrypt on this host: {wrong}",
            "Install OpenSSL 3 (apt install libssl3, dnf install openssl-libs).",
        )
    return SealingPlugin(str(path))


def has_infiniband(root: Path = Path("/")) -> bool:
    """Whether this host has network devices that NCCL uses through InfiniBand verbs."""
    return any((root / "sys/class/infiniband").glob("*"))


def has_nvlink_between_hosts(root: Path = Path("/")) -> bool:
    """Whether this host exports GPU memory to others of its NVLink domain (IMEX channels)."""
    return any((root / "dev/nvidia-caps-imex-channels").glob("channel*"))
