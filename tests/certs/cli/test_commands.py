from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509

from muster.certs.__main__ import main
from muster.certs.config import load_config
from muster.certs.errors import RevokedError
from muster.certs.pki.authority import open_authority
from muster.certs.pki.certificates import common_name
from muster.certs.runtime.store import load_configured, load_credentials, load_for_etcd
from muster.launch.options import parse
from muster.scheduler.config import load_settings as load_scheduler_settings
from muster.worker.config import load_settings as load_worker_settings
from tests.certs.making import PASSWORD

VARIABLES = ("MS_CERTS_PASSWORD", "MS_SERVER_PASSWORD", "MS_CLIENT_PASSWORD")


@pytest.fixture(autouse=True)
def _no_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(f"{variable}_FILE", raising=False)
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """What init makes."""
    monkeypatch.setenv("MS_CERTS_PASSWORD", PASSWORD.decode())
    assert (
        main(
            ["init", "--dir", str(tmp_path / "certs"), "--job", "resnet", "--hosts", "sched.example,10.0.0.1"]
        )
        == 0
    )
    capsys.readouterr()
    return tmp_path / "certs"


def test_a_fresh_machine_has_what_it_needs_after_init(tmp_path: Path) -> None:
    """As a user runs it, and what it prints can be run as it stands."""
    command = [
        sys.executable,
        "-m",
        "certs",
        "init",
        "--dir",
        "c",
        "--job",
        "resnet",
        "--password-file",
        "secret",
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    scheduler, worker = (dict(re.findall(r"(MS_\w+)=(\S+)", line)) for line in ended.stdout.splitlines()[2:4])
    assert load_scheduler_settings(scheduler).job_id == load_worker_settings(worker).job_id == "resnet"
    assert scheduler["MS_SERVER_PASSWORD_FILE"] == worker["MS_CLIENT_PASSWORD_FILE"] == "secret"
    password = (tmp_path / "secret").read_text().strip()
    assert len(password) == 32 and password not in ended.stdout
    modes = {
        each.name: stat.S_IMODE(each.stat().st_mode)
        for each in [*(tmp_path / "c").iterdir(), tmp_path / "secret"]
    }
    for secret in ("secret", "ca.key", "server.p12", "client.p12", "operator.p12"):
        assert modes[secret] == 0o600
    config = load_config(tmp_path / "c" / "config.json")
    found = {"MS_SERVER_PASSWORD_FILE": str(tmp_path / "secret"), "MS_CLIENT_PASSWORD": password}
    assert load_configured(config, "scheduler", found).identity.uri() == "muster://resnet/scheduler"
    assert load_configured(config, "worker", found).identity.uri() == "muster://resnet/worker"
    operator = load_credentials(tmp_path / "c" / "operator.p12", password.encode(), config.ca_cert_path)
    assert operator.identity.uri() == "muster://resnet/operator"


def test_init_names_all_hosts(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--json", str(directory / "server.p12")]) == 0
    hosts = json.loads(capsys.readouterr().out)["hosts"]
    assert {"localhost", "127.0.0.1", "::1", "sched.example", "10.0.0.1"} <= set(hosts)


def test_init_twice_changes_nothing(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {each: each.read_bytes() for each in directory.glob("*.*")}
    assert main(["init", "--dir", str(directory)]) == 1
    assert "holds an authority already" in capsys.readouterr().err
    assert before == {each: each.read_bytes() for each in directory.glob("*.*")}
    assert main(["init", "--dir", str(directory), "--force"]) == 0
    # Nothing of the old authority is in the way of the new one.
    assert load_configured(load_config(directory / "config.json"), "worker", {}, password=PASSWORD)


def test_init_says_where_each_sides_password_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MS_SERVER_PASSWORD_FILE", str(tmp_path / "of servers"))
    monkeypatch.setenv("MS_CLIENT_PASSWORD", "of clients")
    monkeypatch.setenv("MS_CERTS_PASSWORD", "of the authority")
    (tmp_path / "of servers").write_text("x\n")
    assert main(["init", "--dir", str(tmp_path / "c")]) == 0
    told = capsys.readouterr().out
    assert f"MS_SERVER_PASSWORD_FILE='{tmp_path / 'of servers'}' python -m scheduler" in told
    assert "MS_CLIENT_PASSWORD=... (as set here) python train.py" in told
    assert "of clients" not in told and "of the authority" not in told


def test_init_says_how_a_job_is_launched_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, password = tmp_path / "made here", tmp_path / "password"
    assert main(["init", "--dir", str(made), "--password-file", str(password), "--job", "a b"]) == 0
    [told] = [line for line in capsys.readouterr().out.splitlines() if "muster run" in line]
    words = shlex.split(told.partition("muster run ")[2])
    assert parse(words).config == made / "config.json"
    assert parse(words).password_file == password
    assert parse(words).job_id == "a b"


def test_password_options_win_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "of another job")
    for name in ("own", "server", "client"):
        (tmp_path / name).write_text(f"{name}'s\n")
    own = ["--password-file", str(tmp_path / "own")]
    assert main(["init", "--dir", str(tmp_path / "c"), *own]) == 0
    told = capsys.readouterr().out
    assert told.count(f"_PASSWORD_FILE={tmp_path / 'own'} ") == 2
    for name in ("server", "client", "operator"):
        assert load_credentials(tmp_path / "c" / f"{name}.p12", b"own's", tmp_path / "c" / "ca.crt")
    sides = [f"--{side}-password-file={tmp_path / side}" for side in ("server", "client")]
    assert main(["init", "--dir", str(tmp_path / "d"), *own, *sides]) == 0
    assert main(["issue", "--dir", str(tmp_path / "d"), "--node", "n1", *own, sides[1]]) == 0
    for name, side in (("server", "server"), ("client", "client"), ("worker-n1", "client")):
        assert load_credentials(
            tmp_path / "d" / f"{name}.p12", f"{side}'s".encode(), tmp_path / "d" / "ca.crt"
        )


def test_each_side_may_have_its_own_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, password in zip(VARIABLES, ("ca", "server", "client"), strict=True):
        monkeypatch.setenv(variable, password)
    assert main(["init", "--dir", str(tmp_path)]) == 0
    for name, password in (("server", "server"), ("client", "client"), ("operator", "client")):
        assert load_credentials(tmp_path / f"{name}.p12", password.encode(), tmp_path / "ca.crt")
    assert main(["renew", "--dir", str(tmp_path), str(tmp_path / "server.p12")]) == 0
    assert load_credentials(tmp_path / "server.p12", b"server", tmp_path / "ca.crt")


def test_issue_binds_to_job_and_node(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["issue", "--dir", str(directory), "--job", "resnet", "--node", "rack1/node7", "--days", "3"])
        == 0
    )
    file = directory / "worker-rack1_node7.p12"
    assert f"{file}: muster://resnet/worker/rack1%2Fnode7, good until" in capsys.readouterr().out
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load_credentials(file, PASSWORD, directory / "ca.crt").identity.node == "rack1/node7"
    assert main(["issue", "--dir", str(directory), "--node", "rack1/node7"]) == 1
    assert "exists already" in capsys.readouterr().err
    assert main(["issue", "--dir", str(directory), "--node", "x", "--out", str(file), "--force"]) == 0


def test_a_hosts_certificate_names_its_nodes_and_goes_with_each(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = ["--node", "9", "--node", "10", "--node", "9"]
    assert main(["issue", "--dir", str(directory), "--role", "host", *nodes]) == 0
    file = directory / "host-9.p12"
    assert f"{file}: muster://*/host/10/9, good until" in capsys.readouterr().out
    assert main(["renew", "--dir", str(directory), str(file)]) == 0
    assert "muster://*/host/10/9" in capsys.readouterr().out
    assert main(["revoke", "--dir", str(directory), "--node", "10"]) == 0
    assert "2 revoked" in capsys.readouterr().out  # the renewed one, and the one before
    for wrong in (["--role", "host"], ["--role", "worker", *nodes]):
        assert main(["issue", "--dir", str(directory), *wrong]) == 2
        assert "must name at least one node" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["issue", "--hosts", "a b"], "neither a host name nor an address"),
        (["issue", "--days", "0"], "--days is 0; legal are 1 to 36500"),
        (["issue", "--job", "a\nb"], "The job name"),
        (["issue", "--node", ".."], "The node name"),
        (["issue", "--node", ""], "1 to 128 characters"),
        (["revoke", "--serial", "xyz"], "--serial is 'xyz'"),
        (["revoke", "--serial", "0"], "hexadecimal numbers from 1 to 2^159-1"),
        (["revoke", "--serial=-5"], "--serial is '-5'"),
        (["revoke", "--serial", "f" * 60], "hexadecimal numbers from 1 to 2^159-1"),
        (["revoke", "--serial", f"{2**159:x}"], "hexadecimal numbers from 1 to 2^159-1"),
        (["revoke", "--node", "nobody"], "no certificate bound to the node 'nobody'"),
        (["revoke", "--fingerprint", "AB"], "16 hexadecimal digits"),
        (["renew"], "Nothing to renew"),
    ],
)
def test_wrong_arguments_end_with_2_and_one_sentence(
    directory: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    before = (directory / "crl.pem").read_bytes()
    assert main([*arguments, "--dir", str(directory)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith(f"certs {arguments[0]}: ") and error.count("\n") == 1
    assert (directory / "crl.pem").read_bytes() == before


def test_an_unknown_role_or_command_is_a_usage_error() -> None:
    for arguments in (["issue", "--role", "boss"], ["destroy"], []):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_without_a_password_nothing_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--dir", str(tmp_path / "c")]) == 2
    assert "MS_CERTS_PASSWORD is not set" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        ["--hosts", "a b"],
        ["--days", "0"],
        ["--ca-days", "99999"],
        ["--name", "x" * 65],
        ["--job", ""],
        ["--parent", "/nowhere"],
    ],
)
def test_a_refused_init_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: list[str]
) -> None:
    monkeypatch.setenv("MS_CERTS_PASSWORD", "x")
    assert main(["init", "--dir", str(tmp_path / "c"), *wrong]) in (1, 2)
    assert not (tmp_path / "c").exists()


def test_a_new_password_is_asked_for_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ["one", "two", "same", "same"]
    monkeypatch.setattr("muster.certs.cli.commands.prompt_on_terminal", lambda question: answers.pop(0))
    assert main(["init", "--dir", str(tmp_path / "c")]) == 2
    assert "The two passwords differ" in capsys.readouterr().err
    assert main(["init", "--dir", str(tmp_path / "c")]) == 0
    assert load_credentials(tmp_path / "c" / "client.p12", b"same", tmp_path / "c" / "ca.crt")


def test_a_wrong_password_is_a_plain_error(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MS_CERTS_PASSWORD", "wrong-secret")
    for arguments in (["issue", "--dir", str(directory)], ["show", str(directory / "client.p12")]):
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert "does not open with this password" in error and "wrong-secret" not in error


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for word in (
        "muster://<job>/<role>[/<node>]",
        "muster certs init",
        "revoke",
        "renew",
        "MS_CERTS_PASSWORD",
    ):
        assert word in text


def test_show_prints_identity_validity_and_fingerprint(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(directory / name) for name in ("client.p12", "ca.crt", "crl.pem")]
    assert main(["show", *files]) == 0
    text = capsys.readouterr().out
    credentials = load_credentials(directory / "client.p12", PASSWORD, directory / "ca.crt")
    for word in (
        "muster://resnet/worker",
        credentials.fingerprint,
        f"{credentials.not_after:%Y-%m-%dT%H:%M:%SZ}",
        "EC secp256r1",
        "authority",
        "revocation list of",
        "days left",
    ):
        assert word in text
    assert "problems" not in text and "PRIVATE" not in text


def test_show_names_what_would_be_refused(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:1024", "-nodes", "-keyout", "k", "-out", "bad.pem"]
    config = tmp_path / "o.cnf"
    config.write_text("[req]\ndistinguished_name=d\nprompt=no\n[d]\nCN=weak\n")
    subprocess.run(
        [*command, "-config", str(config)], cwd=tmp_path, check=True, capture_output=True, timeout=60
    )
    assert main(["show", "--json", str(tmp_path / "bad.pem")]) == 0
    problems = " ".join(json.loads(capsys.readouterr().out)["problems"])
    assert "1024 bits" in problems and "names no job and role" in problems
    assert main(["show", str(tmp_path / "o.cnf")]) == 1


def test_revoke_by_file_node_serial_and_fingerprint(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--dir", str(directory)]
    for node in ("n1", "n2", "n3"):
        assert main(["issue", *base, "--node", node]) == 0
    loaded = [
        load_credentials(directory / f"worker-n{i}.p12", PASSWORD, directory / "ca.crt") for i in (1, 2, 3)
    ]
    capsys.readouterr()
    assert main(["revoke", *base, str(directory / "worker-n1.p12"), "--node", "n2"]) == 0
    assert "2 revoked" in capsys.readouterr().out
    assert main(["revoke", *base, "--fingerprint", loaded[2].fingerprint]) == 0
    assert "3 revoked" in capsys.readouterr().out
    assert main(["revoke", *base, "--serial", "AB:CD"]) == 0
    assert main(["revoke", *base, "--serial", f"{2**159 - 1:x}", "--days", "9"]) == 0
    for i in (1, 2, 3):
        with pytest.raises(RevokedError):
            load_credentials(
                directory / f"worker-n{i}.p12", PASSWORD, directory / "ca.crt", crl_path=directory / "crl.pem"
            )
    assert load_configured(load_config(directory / "config.json"), "worker", {}, password=PASSWORD)
    capsys.readouterr()
    assert main(["show", "--json", str(directory / "crl.pem")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["revoked_count"] == 5 and "abcd" in shown["revoked"] and shown["days_left"] in (8, 9)


def test_revoke_without_a_certificate_renews_the_list(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (directory / "crl.pem").read_bytes()
    assert main(["revoke", "--dir", str(directory), "--days", "30"]) == 0
    assert "0 revoked, good for 30 days" in capsys.readouterr().out
    assert (directory / "crl.pem").read_bytes() != before


def test_the_root_is_not_said_to_be_revoked_because_nobody_would_look(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (directory / "crl.pem").read_bytes()
    root = directory / "ca.crt"
    former = tmp_path / "former.crt"
    former.write_bytes(root.read_bytes())
    assert main(["renew", "--dir", str(directory), "--ca"]) == 0
    new_serial = f"{x509.load_pem_x509_certificate(root.read_bytes()).serial_number:x}"
    capsys.readouterr()
    for named in ([str(root)], [str(former)], ["--serial", new_serial]):
        assert main(["revoke", "--dir", str(directory), *named]) == 2
        told = capsys.readouterr()
        assert "is the authority itself" in told.err and "ca_cert_path" in told.err
        assert "revoked" not in told.out
    assert (directory / "crl.pem").read_bytes() == before


def test_init_says_that_certificates_for_any_job_open_every_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MS_CERTS_PASSWORD", PASSWORD.decode())
    assert main(["init", "--dir", str(tmp_path / "any")]) == 0
    assert "enter every job under this authority; --job NAME" in capsys.readouterr().out
    assert main(["init", "--dir", str(tmp_path / "one"), "--job", "resnet"]) == 0
    assert "every job" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["init", "--help"])
    assert "enter every other job" in " ".join(capsys.readouterr().out.split())


def test_others_certificates_are_neither_revoked_nor_renewed(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--dir", str(tmp_path / "other")]) == 0
    for command in ("revoke", "renew"):
        assert main([command, "--dir", str(directory), str(tmp_path / "other" / "client.p12")]) == 1
        assert "was not issued by the authority" in capsys.readouterr().err


def test_renew_keeps_identity_and_hosts_and_changes_the_key(directory: Path) -> None:
    config = load_config(directory / "config.json")
    before = load_configured(config, "scheduler", {}, password=PASSWORD)
    assert (
        main(["renew", "--dir", str(directory), "--ca", "--days", "40", str(directory / "server.p12")]) == 0
    )
    after = load_configured(config, "scheduler", {}, password=PASSWORD)
    assert after.identity == before.identity
    assert after.peer(after.leaf_pem).hosts == before.peer(before.leaf_pem).hosts
    assert after.peer(after.leaf_pem).addresses == before.peer(before.leaf_pem).addresses
    assert after.key_pem != before.key_pem and after.fingerprint != before.fingerprint
    assert after.ca_pem != before.ca_pem
    assert after.not_after < before.not_after


@pytest.mark.parametrize("command", ["renew", "revoke"])
def test_the_authority_is_the_one_beside_the_file_and_no_other_is_to_be_made(
    command: str,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = (directory / "client.p12").read_bytes(), (directory / "crl.pem").read_bytes()
    assert main([command, str(directory / "client.p12")]) == 0
    assert ((directory / "client.p12").read_bytes(), (directory / "crl.pem").read_bytes()) != before
    (tmp_path / "host").mkdir()
    copy = tmp_path / "host" / "client.p12"
    copy.write_bytes((directory / "client.p12").read_bytes())
    capsys.readouterr()
    assert main([command, str(copy)]) == 1
    said = capsys.readouterr().err
    assert (
        f"There is no authority (no ca.key) in '{copy.parent}' or 'certificates'" in said and "--dir" in said
    )
    assert "init" not in said
    assert main([command, "--dir", str(directory), str(copy)]) == 0


def test_an_intermediate_authority_by_the_command_line(directory: Path, tmp_path: Path) -> None:
    below = tmp_path / "below"
    assert main(["init", "--dir", str(below), "--parent", str(directory), "--job", "resnet"]) == 0
    config = load_config(below / "config.json")
    credentials = load_configured(config, "worker", {}, password=PASSWORD)
    assert credentials.ca_pem == (directory / "ca.crt").read_bytes()
    # The parent revokes the whole branch.
    assert main(["revoke", "--dir", str(directory), str(below / "chain.crt")]) == 0
    (below / "crl.pem").write_bytes((below / "crl.pem").read_bytes() + (directory / "crl.pem").read_bytes())
    with pytest.raises(RevokedError):
        load_configured(config, "worker", {}, password=PASSWORD)


REVOKING = """
import sys
from muster.certs.__main__ import main
from muster.certs.pki.authority import open_authority

print("ready", flush=True)
sys.stdin.readline()
for serial in sys.argv[2:]:
    assert main(["revoke", "--dir", sys.argv[1], "--serial", serial]) == 0
"""


def test_revocations_at_once_lose_none(directory: Path) -> None:
    """Each replaces the list that it has read: without taking turns they would undo one another's."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", REVOKING, str(directory)]
    serials = [[f"{process:x}{number:02x}" for number in range(12)] for process in range(1, 5)]
    with contextlib.ExitStack() as at_end:
        processes = []
        for mine in serials:
            made = subprocess.Popen(
                [*command, *mine], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            processes.append(at_end.enter_context(made))
            at_end.callback(made.kill)
        for each in processes:
            assert each.stdout is not None and each.stdout.readline() == "ready\n"
        for each in processes:
            assert each.stdin is not None
            each.stdin.write("go\n")
            each.stdin.flush()
        assert [each.communicate(timeout=100) and each.returncode for each in processes] == [0, 0, 0, 0]
    revoked = {f"{entry.serial_number:x}" for entry in open_authority(directory, PASSWORD).revoked()}
    assert revoked == {serial for mine in serials for serial in mine}


def test_etcd_gets_an_authority_of_its_own_and_the_scheduler_a_name_there(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["etcd", "--dir", str(directory), "--job", "resnet", "--hosts", "etcd0,10.0.0.9"]) == 0
    said = capsys.readouterr().out
    for command in (
        "role grant-permission --prefix=true muster-resnet readwrite /muster/resnet/",
        "user add resnet.scheduler --no-password",
        "auth enable",
    ):
        assert command in said
    config = load_config(directory / "config.json")
    assert config.etcd_cert_path == directory / "etcd.p12"
    own = load_for_etcd(config, {}, PASSWORD)
    assert own.ca_pem == (directory / "etcd" / "ca.crt").read_bytes()
    assert own.ca_pem != (directory / "ca.crt").read_bytes()
    (member,) = x509.load_pem_x509_certificates((directory / "etcd" / "member.crt").read_bytes())
    names = member.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "etcd0" in names.get_values_for_type(x509.DNSName)
    assert common_name(member) != "resnet.scheduler"  # a member's key makes no scheduler
    assert stat.S_IMODE((directory / "etcd" / "member.key").stat().st_mode) == 0o600
    assert load_configured(config, "worker", {}, password=PASSWORD).ca_pem != own.ca_pem


def test_without_keys_for_etcd_the_schedulers_own_certificate_counts(directory: Path) -> None:
    config = load_config(directory / "config.json")
    assert config.etcd_cert_path is None
    assert load_for_etcd(config, {}, PASSWORD).ca_pem == (directory / "ca.crt").read_bytes()


def test_etcd_needs_the_authoritys_password_and_says_if_there_is_one_already(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["etcd", "--dir", str(directory)]
    assert main(arguments) == 0
    assert main(arguments) == 1
    assert "--force" in capsys.readouterr().err
    before = (directory / "config.json").read_bytes()
    assert main(["etcd", "--dir", str(directory / "nowhere")]) != 0
    assert (directory / "config.json").read_bytes() == before
