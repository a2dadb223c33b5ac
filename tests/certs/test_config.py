from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.certs.config import CIPHERS, KEYS, SecurityConfig, apply_cipher_list, config_warnings, load_config
from muster.certs.errors import ConfigError

GOOD: dict[str, Any] = {
    "server_cert_path": "server.p12",
    "client_cert_path": "client.p12",
    "ca_cert_path": "ca.crt",
}

MINDSPORE = (
    "ECDHE-R SA-AES128-GCM-SHA256:ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES256-GCM-SHA384:"
    "ECDHE-ECDSA-AES256-GCM-SHA384:DHE-RSA-AES128-GCM-SHA256:DHE-DSS-AES128-GCM-SHA256:"
    "DHE-RSA-AES256-GCM-SHA384:DHE-DSS-AES256-GCM-SHA384:DHE-PSK-AES128-GCM-SHA256:DHE-PSK-AES256-GCM-SHA384:"
    "DHE-PSK-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305:ECDHE-PSK-CHACHA20-POLY1305:DHE-RSA-AES128-CCM:"
    "DHE-RSA-AES256-CCM:DHE-RSA-CHACHA20-POLY1305:DHE-PSK-AES128-CCM:DHE-PSK-AES256-CCM:ECDHE-ECDSA-AES128-CCM:"
    "ECDHE-ECDSA-AES256-CCM:ECDHE-ECDSA-CHACHA20-POLY1305"
)


def write(directory: Path, **changes: Any) -> Path:
    file = directory / "config.json"
    file.write_text(json.dumps(GOOD | changes))
    return file


def test_the_defaults_are_filled_in_and_paths_are_relative_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    config = load_config(f"{tmp_path.name}/config.json")
    assert config == SecurityConfig(
        path=tmp_path / "config.json",
        server_cert_path=tmp_path / "server.p12",
        client_cert_path=tmp_path / "client.p12",
        ca_cert_path=tmp_path / "ca.crt",
        crl_path=None,
        cipher_list=CIPHERS,
        ignored_ciphers=(),
        cert_expire_warning_time_in_day=90,
        require_identity=True,
    )


def test_all_keys_are_read(tmp_path: Path) -> None:
    config = load_config(
        write(
            tmp_path,
            server_cert_path="/abs/server.p12",
            crl_path="../crl.pem",
            cipher_list="ECDHE-ECDSA-AES128-GCM-SHA256",
            cert_expire_warning_time_in_day=7,
            require_identity=False,
        )
    )
    assert config.server_cert_path == Path("/abs/server.p12")
    assert config.crl_path == tmp_path.parent / "crl.pem"
    assert config.cipher_list == ("ECDHE-ECDSA-AES128-GCM-SHA256",)
    assert config.cert_expire_warning_time_in_day == 7
    assert config.require_identity is False
    assert config.cert_path("scheduler") == config.server_cert_path
    assert config.cert_path("worker") == config.cert_path("operator") == config.client_cert_path


def test_mindspores_documented_cipher_list_loads_with_its_stray_space(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, cipher_list=MINDSPORE, crl_path=""))
    assert set(config.cipher_list) == set(CIPHERS)
    assert config.cipher_list[0] == "ECDHE-RSA-AES128-GCM-SHA256"
    assert len(config.ignored_ciphers) == 15
    warning = config_warnings(config)[0]
    assert "'DHE-RSA-AES128-GCM-SHA256'" in warning and "ECDHE-RSA" not in warning


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unknown": 1}, "'unknown' is unknown. Keys: server_cert_path"),
        ({"server_cert_path": None}, "server_cert_path is missing"),
        ({"client_cert_path": ""}, "client_cert_path is missing"),
        ({"ca_cert_path": 5}, "ca_cert_path is 5"),
        ({"ca_cert_path": "a\0b"}, "ca_cert_path"),
        ({"crl_path": None}, "crl_path"),
        ({"crl_path": ["a"]}, "crl_path"),
        ({"cert_expire_warning_time_in_day": 6}, "is 6; legal are integers 7 to 180"),
        ({"cert_expire_warning_time_in_day": 181}, "is 181; legal are integers 7 to 180"),
        ({"cert_expire_warning_time_in_day": 90.0}, "legal are integers 7 to 180"),
        ({"cert_expire_warning_time_in_day": True}, "is True; legal are integers 7 to 180"),
        ({"cert_expire_warning_time_in_day": "90"}, "is '90'; legal are integers 7 to 180"),
        ({"require_identity": "false"}, "legal are true and false"),
        ({"require_identity": 0}, "legal are true and false"),
        ({"cipher_list": ""}, "leaves no cipher"),
        ({"cipher_list": "AES128-SHA:NULL"}, "leaves no cipher"),
        ({"cipher_list": "TLS_AES_128_GCM_SHA256"}, "TLS 1.3 chooses its own"),
        ({"cipher_list": ["x"]}, "cipher_list"),
    ],
)
def test_wrong_values_are_refused_with_key_value_and_range(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    file = write(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"ca_cert_path": "a", "ca_cert_path": "b"}', "'ca_cert_path' stands there twice"),
        (b" " * (1 << 20) + b"{}", "has more than"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert words in str(caught.value)


def test_a_missing_file_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*certs init"):
        load_config(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="directory"):
        load_config(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(changes=st.dictionaries(st.sampled_from(tuple(KEYS)), json_values))
def test_any_json_is_a_configuration_or_a_typed_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    try:
        config = load_config(write(tmp_path, **changes))
    except ConfigError:
        return
    assert config.cipher_list and 7 <= config.cert_expire_warning_time_in_day <= 180


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_SSL_CIPHER_SUITES"} | env
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_list_reaches_the_environment_before_grpc(tmp_path: Path) -> None:
    file = write(tmp_path, cipher_list="ECDHE-ECDSA-AES256-GCM-SHA384:X")
    code = (
        "import os, sys\n"
        "from muster.certs.config import *\n"
        f"apply_cipher_list(load_config({str(file)!r}))\n"
        "assert 'grpc' not in sys.modules and 'cryptography' not in sys.modules\n"
        "print(os.environ['GRPC_SSL_CIPHER_SUITES'])\n"
    )
    ended = run_python(code)
    assert ended.stdout == "ECDHE-ECDSA-AES256-GCM-SHA384\n", ended.stderr
    assert run_python(code, GRPC_SSL_CIPHER_SUITES="OTHER").stdout == ended.stdout


def test_a_list_that_comes_too_late_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", sys)
    monkeypatch.delenv("GRPC_SSL_CIPHER_SUITES", raising=False)
    narrow = load_config(write(tmp_path, cipher_list="ECDHE-ECDSA-AES256-GCM-SHA384"))
    with pytest.raises(ConfigError, match="imported before"):
        apply_cipher_list(narrow)
    monkeypatch.setenv("GRPC_SSL_CIPHER_SUITES", "ECDHE-ECDSA-AES256-GCM-SHA384")
    apply_cipher_list(narrow)
    with pytest.raises(ConfigError, match="imported before"):
        apply_cipher_list(load_config(write(tmp_path)))
    monkeypatch.delenv("GRPC_SSL_CIPHER_SUITES")
    apply_cipher_list(load_config(write(tmp_path)))  # neither side asked for anything


def test_what_weakens_the_job_is_said(tmp_path: Path) -> None:
    warnings = config_warnings(load_config(write(tmp_path, require_identity=False)))
    assert any("require_identity is false" in each for each in warnings)
    assert any("crl_path is empty" in each for each in warnings)
    assert config_warnings(load_config(write(tmp_path, crl_path="crl.pem"))) == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("muster.certs.config", ("grpc", "cryptography", "ssl", "numpy")),
        ("muster.certs.pki.identity", ("grpc", "cryptography", "ssl", "numpy")),
        ("muster.certs.runtime.store", ("grpc", "numpy")),
        ("muster.certs.runtime.tls", ("grpc", "cryptography", "numpy")),
        ("muster.certs.runtime.preflight", ("grpc", "numpy")),
        ("muster.certs.runtime.watcher", ("grpc", "numpy")),
    ],
)
def test_imports_stay_lean(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    assert run_python(code).stdout == "[]\n"
