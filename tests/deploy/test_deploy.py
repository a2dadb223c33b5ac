"""Every file in deploy/ is read by the tool that will read it, or by that tool's own schema."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose
from dockerfile_parse import DockerfileParser

from muster.scheduler.__main__ import parser as server_parser
from muster.scheduler.cli.command import parser as status_parser
from muster.scheduler.etcd.leadership import REFUSED_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES_FILES = sorted(
    path
    for folder in ("", "base")
    for path in (DEPLOY / "kubernetes" / folder).glob("*.yaml")
    if path.name != "kustomization.yaml"
)
# Kinds of operators: test_kubernetes.py checks them, so far as Python packages have their schemas.
OPERATORS = ("cert-manager.io/", "monitoring.coreos.com/")


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def unit(name: str) -> dict[str, list[str]]:
    """The settings of a systemd unit; each may stand there several times."""
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", (DEPLOY / "systemd" / name).read_text(), re.M):
        found.setdefault(key, []).append(value)
    return found


ALL_OBJECTS = [one for path in KUBERNETES_FILES for one in documents(path)]


def named(kind: str, name: str) -> dict[str, Any]:
    return next(one for one in ALL_OBJECTS if one["kind"] == kind and one["metadata"]["name"] == name)


# ---------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize("path", KUBERNETES_FILES, ids=lambda path: path.name)
def test_kubernetes_objects_fit_the_schema_of_their_kind(path: Path) -> None:
    core = [one for one in documents(path) if not one["apiVersion"].startswith(OPERATORS)]
    for one in core:
        kubernetes_validate.validate(one, "1.31", strict=True)
    assert core or path.name in ("certificates.yaml", "pod-monitor.yaml")


def test_the_schema_check_bites() -> None:
    broken = dict(named("Deployment", "muster-scheduler"), spec={"replicas": "one"})
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.31", strict=True)


def test_certificates_name_the_roles_that_the_scheduler_checks() -> None:
    certificates = [one for one in ALL_OBJECTS if one["kind"] == "Certificate" and "uris" in one["spec"]]
    roles = {uri for one in certificates for uri in one["spec"]["uris"]}
    assert roles == {"muster://default/scheduler", "muster://default/worker"}
    for one in certificates:
        store = one["spec"]["keystores"]["pkcs12"]
        assert store["create"] is True
        assert set(store["passwordSecretRef"]) == {"name", "key"}
        assert one["spec"]["privateKey"]["size"] >= 256


def test_every_mounted_secret_and_config_is_made_somewhere() -> None:
    made = {one["metadata"]["name"] for one in ALL_OBJECTS if one["kind"] in ("ConfigMap", "Secret")}
    made |= {one["spec"]["secretName"] for one in ALL_OBJECTS if one["kind"] == "Certificate"}
    made |= {"muster-scheduler-password", "muster-worker-password", "muster-crl"}  # by README.md's commands
    for kind, name in (("Deployment", "muster-scheduler"), ("Job", "muster-workers")):
        pod = named(kind, name)["spec"]["template"]["spec"]
        used = {v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
        used |= {v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v}
        assert used <= made
        mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
        # A Secret of cert-manager holds more than a pod may see: the private key without a password.
        shown = [one["secret"].get("items") for one in pod["volumes"] if one["name"] == "tls"]
        assert [{item["key"] for item in items} for items in shown] == [{"keystore.p12", "ca.crt"}]


def test_the_commands_take_only_options_that_the_scheduler_has() -> None:
    container = named("Deployment", "muster-scheduler")["spec"]["template"]["spec"]["containers"][0]
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]["scheduler"]
    probes = [container[name]["exec"]["command"] for name in ("startupProbe", "readinessProbe")]
    for command in (*probes, compose["healthcheck"]["test"][1:]):
        assert command[:4] == ["python", "-m", "scheduler", "health"]
        assert status_parser().parse_args(command[3:]).host == "127.0.0.1"
    # The probe shows the scheduler's certificate, as a client, at this address.
    certificate = named("Certificate", "muster-scheduler")["spec"]
    assert "client auth" in certificate["usages"]
    assert certificate["ipAddresses"] == ["127.0.0.1"]
    for command in (container["command"], compose["command"]):
        options = server_parser().parse_args(command[3:])
        assert options.bind == "0.0.0.0"


def test_the_environment_is_one_that_the_scheduler_and_the_workers_accept() -> None:
    from muster.scheduler.config import load_settings as scheduler_settings
    from muster.worker.config import load_settings as worker_settings

    shared = named("ConfigMap", "muster-job")["data"]

    def environment(kind: str, name: str) -> dict[str, str]:
        container = named(kind, name)["spec"]["template"]["spec"]["containers"][0]
        own = {str(one["name"]): str(one["value"]) for one in container["env"] if "value" in one}
        return {**shared, **own}

    scheduler = scheduler_settings(environment("Deployment", "muster-scheduler"), serve=True)
    assert (scheduler.metrics_host, scheduler.metrics_port) == ("0.0.0.0", 9464)
    assert scheduler.recovery_path is not None
    worker = worker_settings({**environment("Job", "muster-workers"), "JOB_COMPLETION_INDEX": "3"})
    assert (worker.node_id, worker.worker_num) == ("3", scheduler.worker_num)


def test_the_job_has_as_many_workers_as_the_scheduler_waits_for() -> None:
    job = named("Job", "muster-workers")["spec"]
    worker_num = int(named("ConfigMap", "muster-job")["data"]["MS_WORKER_NUM"])
    assert job["completions"] == job["parallelism"] == worker_num


def test_a_worker_that_is_evicted_counts_as_no_failure() -> None:
    rules = named("Job", "muster-workers")["spec"]["podFailurePolicy"]["rules"]
    ignored = [
        rule["onPodConditions"] for rule in rules if rule["action"] == "Ignore" and "onPodConditions" in rule
    ]
    assert ignored == [[{"type": "DisruptionTarget", "status": "True"}]]


def test_the_network_policy_lets_only_workers_reach_the_rendezvous_port() -> None:
    rules = named("NetworkPolicy", "muster-scheduler")["spec"]["ingress"]
    senders = [rule["from"] for rule in rules if {"protocol": "TCP", "port": 6667} in rule["ports"]]
    assert senders == [[{"podSelector": {"matchLabels": {"app": "muster-worker"}}}]]


# ---------------------------------------------------------------- the security configuration in the ConfigMap


def test_the_config_map_holds_a_valid_security_configuration(tmp_path: Path) -> None:
    from muster.certs.config import load_config

    text = named("ConfigMap", "muster-security")["data"]["config.json"]
    (tmp_path / "config").mkdir()
    path = tmp_path / "config" / "config.json"
    path.write_text(text)
    assert load_config(path).ca_cert_path == tmp_path / "tls" / "ca.crt"


# ---------------------------------------------------------------- containers


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_dockerfile_copies_only_what_exists(target: str) -> None:
    lines = DockerfileParser(path=str(DEPLOY / "docker" / "Dockerfile")).structure
    stages = [line["value"] for line in lines if line["instruction"] == "FROM"]
    assert any(value.endswith(f" AS {target}") for value in stages)
    copied = [
        source
        for line in lines
        if line["instruction"] == "COPY" and not line["value"].startswith("--from=")
        for source in line["value"].split()[:-1]
    ]
    assert copied
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_the_dockerfile_runs_nothing_as_root() -> None:
    lines = DockerfileParser(path=str(DEPLOY / "docker" / "Dockerfile")).structure
    stages: dict[str, list[str]] = {}
    for line in lines:
        if line["instruction"] == "FROM":
            stages[line["value"].rpartition(" ")[2]] = own = []
        elif stages:
            own.append(line["instruction"])
    run = {name for name, instructions in stages.items() if "CMD" in instructions}
    assert run == {"cpu", "cuda"}
    for name in run:
        after = stages[name][stages[name].index("USER") :]
        assert "RUN" not in after and "COPY" not in after  # the user owns nothing of the image


def test_the_images_take_no_key() -> None:
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert {"**/*.key", "**/*.p12", "**/*password"} <= set(ignored)


def test_compose_fits_the_compose_specification() -> None:
    text = (DEPLOY / "docker" / "compose.yaml").read_text()
    compose = PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(text)))
    compose.validate()
    assert compose.to_spec().name == "muster"
    services = yaml.safe_load(text)["services"]
    assert set(services) == {"certificates", "scheduler", "worker"}
    worker = services["worker"]
    assert worker["deploy"]["replicas"] == int(worker["environment"]["MS_WORKER_NUM"])
    # Built three times, the image would leave two nameless ones behind.
    assert [name for name, service in services.items() if "build" in service] == ["certificates"]
    for service in services.values():
        assert service["init"]
        secret = {name: value for name, value in service["environment"].items() if "PASSWORD" in name}
        assert secret
        assert [name for name in secret if not name.endswith("_FILE")] == []


def test_the_compose_check_bites() -> None:
    with pytest.raises(ValueError, match="replicas"):
        PyCompose.from_yaml("services: {worker: {image: x, deploy: {replicas: many}}}").validate()


# ---------------------------------------------------------------- systemd and Slurm


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", ["muster-scheduler.service", "muster-worker@.service"])
def test_systemd_finds_no_fault_in_the_units(name: str, tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / name).read_text()
    unit = tmp_path / name
    unit.write_text(text.replace("/opt/muster/.venv/bin/python", "/usr/bin/env").replace("/opt/muster", "/"))
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", ["muster-scheduler.service", "muster-worker@.service"])
def test_the_units_user_and_directories_are_made(name: str) -> None:
    settings = unit(name)
    made = re.findall(r"^u (\S+) ", (DEPLOY / "systemd" / "muster-sysusers.conf").read_text(), re.M)
    assert settings["User"] == settings["Group"] == made
    assert "DynamicUser" not in settings
    assert settings["StateDirectory"] == ["muster"]
    own = ("/opt/muster", "/var/lib/muster", "/var/log/muster", "/etc/muster")
    text = " ".join(word for key in settings for word in settings[key])
    assert [path for path in re.findall(r"(?<![\w%])/[\w./-]+", text) if not path.startswith(own)] == []
    # Missing directories in here would keep the unit from starting; StateDirectory makes its own.
    assert "ReadWritePaths" not in settings
    # A credential is copied at the start: right for a password, but no certificate could be renewed.
    assert [line for line in settings["LoadCredential"] if not line.endswith("-password")] == []


@pytest.mark.parametrize(
    ("name", "what"), [("muster-scheduler.service", "the scheduler"), ("muster-worker@.service", "a worker")]
)
def test_the_units_do_not_restart_for_ever(name: str, what: str) -> None:
    settings = unit(name)
    needed = settings["EnvironmentFile"] + [line.split(":")[1] for line in settings["LoadCredential"]]
    assert settings["AssertPathExists"] == needed
    [interval], [burst] = settings["StartLimitIntervalSec"], settings["StartLimitBurst"]
    minutes = int(interval.removesuffix("min"))
    # The limit is reached also where each try takes long: 5 starts in 10 s, the default, is not.
    assert int(burst) * (int(settings["RestartSec"][0]) + 15) <= 60 * minutes
    readme = " ".join((DEPLOY / "README.md").read_text().split())
    assert re.search(rf"{what} {burst} times in {minutes}\b", readme)


def test_a_standby_that_etcd_refuses_is_not_given_up_by_systemd() -> None:
    """Not without the file for several schedulers either: else a role that is given back comes to nobody."""
    settings = unit("muster-scheduler.service")
    [interval], [burst], [pause] = (
        settings[name] for name in ("StartLimitIntervalSec", "StartLimitBurst", "RestartSec")
    )
    assert int(burst) * (REFUSED_S + int(pause)) > 60 * int(interval.removesuffix("min"))


def test_the_systemd_scheduler_is_reached_from_other_machines() -> None:
    # Bound to its own name it would not be, where /etc/hosts takes that to 127.0.1.1, as on Debian.
    [command] = unit("muster-scheduler.service")["ExecStart"]
    options = server_parser().parse_args(command.split()[3:])
    assert (options.serve, options.bind) == (True, "0.0.0.0")


def test_systemd_stops_the_workers_before_the_scheduler_that_they_take_leave_of() -> None:
    assert "muster-scheduler.service" in unit("muster-worker@.service")["After"][0].split()


def test_systemd_credentials_reach_the_password_variables() -> None:
    scheduler = (DEPLOY / "systemd" / "muster-scheduler.service").read_text()
    assert "LoadCredential=server-password:" in scheduler
    assert "MS_SERVER_PASSWORD_FILE=%d/server-password" in scheduler
    assert re.search(r"^Environment=.*PASSWORD=", scheduler, re.M) is None


def test_the_slurm_script_is_sound_shell() -> None:
    path = DEPLOY / "slurm" / "muster.sbatch"
    result = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    options = dict(
        found
        for line in re.findall(r"^#SBATCH (.*)$", path.read_text(), re.M)
        for found in re.findall(r"--([a-z-]+)=(\S+)", line)
    )
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "signal"} <= set(options)
    assert options["open-mode"] == "append"  # a job that is queued again keeps what it had said
    page = (DEPLOY.parent / "docs" / "slurm.md").read_text()
    assert f"```bash\n{path.read_text()}```" in page


def test_every_file_is_described_in_the_readme() -> None:
    readme = (DEPLOY / "README.md").read_text()
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and path.name != "README.md"]
    assert [path.name for path in files if path.name not in readme] == []
