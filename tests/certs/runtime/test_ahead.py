from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import pkcs12

from muster.certs.errors import PasswordError
from muster.certs.pki.identity import Identity
from muster.certs.runtime.ahead import close_again, open_ahead
from muster.certs.runtime.store import Credentials, load_credentials
from muster.certs.runtime.tls import client_ssl_context, server_ssl_context
from tests.certs.making import PASSWORD, Pki

ENV = {"MS_CLIENT_PASSWORD": PASSWORD.decode()}


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is opened is closed again, and this process may leave a core file as before."""
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    yield
    close_again()
    resource.setrlimit(resource.RLIMIT_CORE, limits)


def configured(pki: Pki) -> Path:
    path = pki.ca.parent / "config.json"
    names = {"server_cert_path": "server.p12", "client_cert_path": "client.p12", "ca_cert_path": pki.ca.name}
    path.write_text(json.dumps({name: str(pki.ca.parent / each) for name, each in names.items()}))
    return path


def load(pki: Pki, password: bytes = PASSWORD) -> Credentials:
    return load_credentials(pki.path("client.p12"), password, pki.ca)


def never(*_: object) -> None:
    raise AssertionError("the file is opened")


def test_what_was_opened_ahead_is_found_open_once(own_pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load(own_pki)
    open_ahead(configured(own_pki), "worker", ENV)
    monkeypatch.setattr(pkcs12, "load_key_and_certificates", never)
    assert load(own_pki) == before
    with pytest.raises(AssertionError, match="the file is opened"):
        load(own_pki)


def test_closed_again_it_is_opened_again(own_pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ahead(configured(own_pki), "worker", ENV)
    close_again()
    monkeypatch.setattr(pkcs12, "load_key_and_certificates", never)
    with pytest.raises(AssertionError, match="the file is opened"):
        load(own_pki)


def test_contexts_are_found_made_for_this_certificate_alone(
    own_pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ahead(configured(own_pki), "worker", ENV)
    mine = load(own_pki)
    other = load_credentials(own_pki.path("node7.p12"), PASSWORD, own_pki.ca)
    monkeypatch.setattr(os, "memfd_create", never)  # of which the library reads a key
    with pytest.raises(AssertionError, match="the file is opened"):
        server_ssl_context(other)
    made = [client_ssl_context(mine), client_ssl_context(mine), server_ssl_context(mine)]
    assert len({id(each) for each in made}) == 3
    for make in (client_ssl_context, server_ssl_context):
        with pytest.raises(AssertionError, match="the file is opened"):
            make(mine)


def test_closed_again_a_context_is_made_again(own_pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ahead(configured(own_pki), "worker", ENV)
    close_again()
    mine = load(own_pki)
    monkeypatch.setattr(os, "memfd_create", never)
    with pytest.raises(AssertionError, match="the file is opened"):
        client_ssl_context(mine)


def test_a_wrong_password_does_not_open_what_is_open(own_pki: Pki) -> None:
    open_ahead(configured(own_pki), "worker", ENV)
    with pytest.raises(PasswordError):
        load(own_pki, b"another")


def test_a_file_that_was_renewed_meanwhile_is_the_one_that_counts(own_pki: Pki) -> None:
    open_ahead(configured(own_pki), "worker", ENV)
    renewed = own_pki.authority.issue(Identity("job", "worker", "other"), ()).p12(PASSWORD)
    own_pki.path("client.p12").write_bytes(renewed)
    assert load(own_pki).identity == Identity("job", "worker", "other")


@pytest.mark.parametrize("env", [{}, {"MS_CLIENT_PASSWORD": "another"}])
def test_what_is_wrong_is_said_by_who_looks_for_it(own_pki: Pki, env: Mapping[str, str]) -> None:
    open_ahead(configured(own_pki), "worker", env)
    with pytest.raises(PasswordError):
        load(own_pki, b"another")
    open_ahead(own_pki.path("nowhere.json"), "worker", ENV)


def test_a_warning_is_left_to_who_uses_the_key(own_pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    own_pki.path("client.p12").chmod(0o644)
    open_ahead(configured(own_pki), "worker", ENV)
    assert not caplog.records
    load(own_pki)
    assert "may be read by every user" in caplog.text


def test_no_core_file_holds_the_key(own_pki: Pki) -> None:
    code = (
        "import os, resource, sys\n"
        "from muster.certs.runtime.ahead import open_ahead\n"
        "hard = resource.getrlimit(resource.RLIMIT_CORE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))\n"
        "open_ahead(sys.argv[1], 'worker', os.environ)\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE)[0])"
    )
    command = [sys.executable, "-c", code, str(configured(own_pki))]
    done = subprocess.run(command, env={**os.environ, **ENV}, capture_output=True, text=True, check=False)
    assert done.stdout == "0\n", done.stderr
