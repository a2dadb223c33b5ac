"""What is removed from text that is kept: secret values, keys, unique ids in all their forms; paths stay."""

from __future__ import annotations

import base64

import pytest

from muster.wire.redaction import REMOVED, without_secrets

UNIQUE_ID = bytes(range(1, 129))
KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\n-----END PRIVATE KEY-----"


@pytest.mark.parametrize(
    "secret",
    [
        UNIQUE_ID.hex(),
        UNIQUE_ID.hex(":"),
        base64.b64encode(UNIQUE_ID).decode(),
        repr(b"\xff\x00\x01\x02" * 8),
        KEY,
        KEY.partition("-----END")[0],
        "hunter2!",
    ],
    ids=["hex", "colons", "base64", "repr", "pem", "pem cut off", "variable"],
)
def test_no_secret_is_left(secret: str) -> None:
    text = without_secrets(f"before {secret} after", {"MS_CLIENT_PASSWORD": "hunter2!"})
    assert secret not in text and REMOVED in text
    assert text.startswith("before ")


@pytest.mark.parametrize("said", ["password=abc", "my_token: abc", "API_KEY='abc'", "unique_ids=abc"])
def test_what_is_assigned_to_a_secret_name_is_removed(said: str) -> None:
    assert "abc" not in without_secrets(said, {})


def test_stacks_stay_as_they_are() -> None:
    stacks = """Thread 0x00007feb6ffff6c0, MainThread (most recent call first):
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/parallel/distributed.py", line 1234 in forward
    do_syscall_64+0x71/0x280
fingerprint-free text, 1234567890123456"""
    env = {
        "PWD": "/opt/venv",
        "OLDPWD": "/opt",
        "SSH_AUTH_SOCK": "/opt/venv/lib",
        "KEY": "ab",
        "PATH": "/opt",
    }
    assert without_secrets(stacks, env) == stacks
