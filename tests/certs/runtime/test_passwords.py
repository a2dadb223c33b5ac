from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from muster.certs.errors import ConfigError
from muster.certs.runtime.passwords import password_for, prompt_on_terminal


@pytest.mark.parametrize(
    ("role", "variable"),
    [
        ("scheduler", "MS_SERVER_PASSWORD"),
        ("worker", "MS_CLIENT_PASSWORD"),
        ("operator", "MS_CLIENT_PASSWORD"),
    ],
)
def test_each_role_has_its_variable(role: str, variable: str) -> None:
    assert password_for(role, {variable: "pä ss"}, None) == "pä ss".encode()
    said = f"{variable} is not set.*{variable}_FILE.*--password-file"
    with pytest.raises(ConfigError, match=said) as caught:
        password_for(role, {}, None)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_file_gives_its_line(tmp_path: Path, end: str) -> None:
    (tmp_path / "secret").write_bytes(b" spaces count " + end.encode())
    assert (
        password_for("worker", {"MS_CLIENT_PASSWORD_FILE": str(tmp_path / "secret")}, None)
        == b" spaces count "
    )


def test_a_systemd_credential_is_found(tmp_path: Path) -> None:
    (tmp_path / "ms_server_password").write_text("from systemd\n")
    env = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert password_for("scheduler", env, None) == b"from systemd"
    assert password_for("scheduler", env | {"MS_SERVER_PASSWORD": "first"}, None) == b"first"
    with pytest.raises(ConfigError):
        password_for("worker", env, None)


def test_the_prompt_is_the_last_resort() -> None:
    asked: list[str] = []

    def prompt(question: str) -> str:
        asked.append(question)
        return "typed"

    assert password_for("worker", {"MS_CLIENT_PASSWORD": "set"}, prompt) == b"set"
    assert asked == []
    assert password_for("worker", {}, prompt) == b"typed"
    assert "worker" in asked[0]


def test_nobody_is_asked_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped"))
    assert prompt_on_terminal("?") is None


def test_two_sources_are_refused() -> None:
    with pytest.raises(ConfigError, match="both set"):
        password_for("worker", {"MS_CLIENT_PASSWORD": "a", "MS_CLIENT_PASSWORD_FILE": "b"}, None)


@pytest.mark.parametrize("content", [b"", b"\n", b"a\0b", b"x" * 1025])
def test_unusable_passwords_are_refused_without_being_shown(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        password_for("worker", {"MS_CLIENT_PASSWORD_FILE": str(tmp_path / "secret")}, None)
    assert "xxx" not in str(caught.value)


def test_a_missing_password_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"MS_CLIENT_PASSWORD_FILE.*none.*No such file"):
        password_for("worker", {"MS_CLIENT_PASSWORD_FILE": str(tmp_path / "none")}, None)
