"""Finds the passwords of PKCS#12 files: environment, file, systemd credential or prompt."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from muster.certs.errors import ConfigError, FileError
from muster.certs.files import read_secret

_VARIABLES = {
    "scheduler": "MS_SERVER_PASSWORD",
    "server": "MS_SERVER_PASSWORD",
    "worker": "MS_CLIENT_PASSWORD",
    "client": "MS_CLIENT_PASSWORD",
    "operator": "MS_CLIENT_PASSWORD",
}
MAX_PASSWORD_BYTES = 1024


def prompt_on_terminal(question: str) -> str | None:
    """Asks without echo; returns None if there is no terminal."""
    if not sys.stdin or not sys.stdin.isatty():
        return None
    import getpass

    try:
        return getpass.getpass(question)
    except EOFError:
        return None


def password_for(
    role: str, env: Mapping[str, str], prompt: Callable[[str], str | None] | None = prompt_on_terminal
) -> bytes:
    """Returns the password of a role's PKCS#12 file.

    It is looked up in this order: ``MS_SERVER_PASSWORD`` (``MS_CLIENT_PASSWORD`` for workers and operators),
    the file named by the same variable with ``_FILE``, a systemd credential of that name, a prompt.

    Args:
        role: ``scheduler`` or ``server``; ``worker``, ``operator`` or ``client``.
        env: the environment.
        prompt: asks on a terminal and returns None if it cannot; None never asks.

    Raises:
        ConfigError: there is no password, it is given twice, or its file cannot be read.
    """
    return password_from(_VARIABLES[role], env, prompt, f"Password of the {role}'s PKCS#12 file: ")


def prompted_password(role: str, env: Mapping[str, str]) -> bytes | None:
    """Returns the password if a user must type it, else None: a file is read again at each rotation.

    Raises:
        ConfigError: see :func:`password_for`.
    """
    asked = False

    def ask(question: str) -> str | None:
        nonlocal asked
        asked = True
        return prompt_on_terminal(question)

    password = password_for(role, env, ask)
    return password if asked else None


def password_from(
    variable: str, env: Mapping[str, str], prompt: Callable[[str], str | None] | None, question: str
) -> bytes:
    """Does the same as :func:`password_for`, for any variable."""
    from_file = f"{variable}_FILE"
    if env.get(variable) and env.get(from_file):
        raise ConfigError(f"{variable} and {from_file} are both set; legal is one of them.")
    if env.get(variable):
        return _checked(env[variable].encode("utf-8", "surrogateescape"), variable)
    if env.get(from_file):
        return read_password(env[from_file], from_file)
    if env.get("CREDENTIALS_DIRECTORY"):
        credential = Path(env["CREDENTIALS_DIRECTORY"]) / variable.lower()
        if credential.exists():
            return read_password(credential, "The systemd credential")
    answer = prompt(question) if prompt is not None else None
    if answer is None:
        raise ConfigError(
            f"A password is needed, and {variable} is not set.",
            remedy=f"Set {from_file} to a file that holds it, or give that by --password-file,"
            f" or set {variable} itself; on a terminal you are asked for it.",
        )
    return _checked(answer.encode(), "The password")


def read_password(path: str | Path, what: str) -> bytes:
    """Reads a password file; a line break at its end is not part of the password.

    Raises:
        ConfigError: the file cannot be read, is empty or too long.
    """
    try:
        data = read_secret(path, f"{what}: the password file", limit=MAX_PASSWORD_BYTES + 2)
    except FileError as error:
        raise ConfigError(error.message, remedy="It needs one line with the password.") from None
    data = data[:-1] if data.endswith(b"\n") else data
    return _checked(data[:-1] if data.endswith(b"\r") else data, f"{what} {str(path)!r}")


def _checked(password: bytes, what: str) -> bytes:
    if not 1 <= len(password) <= MAX_PASSWORD_BYTES or b"\0" in password:
        raise ConfigError(
            f"{what} holds no usable password; legal are 1 to {MAX_PASSWORD_BYTES} bytes, no NUL."
        )
    return password


def forbid_core_files() -> None:
    """Prevents core files of this process, which would contain its private key.

    The hard limit stays, so that the soft one can be raised again where a core file is needed.
    """
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
