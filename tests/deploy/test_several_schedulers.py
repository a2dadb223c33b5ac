"""What deploy/ has for three schedulers on etcd: schemas, and settings that the programs accept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose

from muster.scheduler.__main__ import parser as server_parser
from muster.scheduler.config import load_settings as scheduler_settings
from muster.worker.config import load_settings as worker_settings

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted((DEPLOY / "kubernetes" / "several-schedulers").glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


OBJECTS = [one for path in FILES for one in documents(path)]


def named(kind: str, name: str) -> dict[str, Any]:
    return next(one for one in OBJECTS if one["kind"] == kind and one["metadata"]["name"] == name)


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {str(one["name"]): str(one["value"]) for one in container["env"] if "value" in one}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kubernetes_objects_fit_their_schema(path: Path) -> None:
    for one in documents(path):
        kubernetes_validate.validate(one, "1.31", strict=True)


def test_the_schedulers_of_kubernetes_take_their_settings_and_find_etcd() -> None:
    container = named("Deployment", "muster-scheduler")["spec"]["template"]["spec"]["containers"][0]
    job = next(
        one for one in documents(DEPLOY / "kubernetes" / "base" / "config.yaml") if one["kind"] == "ConfigMap"
    )
    settings = scheduler_settings({**job["data"], **variables(container)}, serve=True)
    assert server_parser().parse_args(container["command"][3:]).serve
    assert settings.etcd is not None
    members = named("StatefulSet", "muster-etcd")["spec"]["replicas"]
    assert settings.etcd.endpoints == tuple((f"muster-etcd-{n}.muster-etcd", 2379) for n in range(members))
    assert len(settings.hosts) > 1
    names = [
        name
        for one in documents(DEPLOY / "kubernetes" / "certificates.yaml")
        if one["metadata"]["name"] == "muster-scheduler"
        for name in one["spec"]["dnsNames"]
    ]
    assert set(settings.hosts) <= set(names)


def test_ready_is_who_leads_and_alive_is_who_answers() -> None:
    container = named("Deployment", "muster-scheduler")["spec"]["template"]["spec"]["containers"][0]
    assert container["readinessProbe"]["httpGet"] == {"path": "/leader", "port": "metrics"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/metrics", "port": "metrics"}
    strategy = named("Deployment", "muster-scheduler")["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 0, "maxUnavailable": 2}


def test_every_member_of_etcd_demands_certificates_and_compacts() -> None:
    command = named("StatefulSet", "muster-etcd")["spec"]["template"]["spec"]["containers"][0]["command"]
    unit = (DEPLOY / "systemd" / "etcd.env").read_text()
    compose = yaml.safe_load((DEPLOY / "docker" / "several-schedulers.yaml").read_text())["services"][
        "etcd-a"
    ]
    for option in ("client-cert-auth", "peer-client-cert-auth"):
        assert f"--{option}" in command
        variable = "ETCD_" + option.upper().replace("-", "_")
        assert f"{variable}=true" in unit
        assert compose["environment"][variable] == "true"
    assert any(option.startswith("--auto-compaction-retention") for option in command)
    assert "ETCD_AUTO_COMPACTION_RETENTION" in unit
    assert "ETCD_AUTO_COMPACTION_RETENTION" in compose["environment"]


def test_the_compose_file_fits_its_schema_and_the_programs() -> None:
    text = (DEPLOY / "docker" / "several-schedulers.yaml").read_text()
    PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(text))).validate()
    services = yaml.safe_load(text)["services"]
    for name in ("scheduler-a", "scheduler-b", "scheduler-c"):
        settings = scheduler_settings({k: str(v) for k, v in services[name]["environment"].items()})
        assert settings.etcd is not None
        assert settings.etcd.endpoints == (("etcd-a", 2379), ("etcd-b", 2379), ("etcd-c", 2379))
        assert name in settings.hosts
    worker = worker_settings({k: str(v) for k, v in services["worker"]["environment"].items()})
    assert worker.scheduler_hosts == ("scheduler-a", "scheduler-b", "scheduler-c")
    said = " ".join(services["certificates"]["command"])
    assert re.search(r"certs etcd .*--hosts etcd-a,etcd-b,etcd-c", said)


def test_the_readmes_settings_for_systemd_are_accepted() -> None:
    readme = (DEPLOY / "README.md").read_text()
    part = readme.split("**Three schedulers**", 1)[1].split("## Kubernetes", 1)[0]
    written = "".join(re.findall(r"printf '([^']*)'", part)).replace("\\n", "\n")
    env = dict(line.split("=", 1) for line in written.splitlines())
    unit = (DEPLOY / "systemd" / "muster-scheduler.service").read_text()
    settings = scheduler_settings({"MS_ENABLE_RECOVERY": "1", **env}, serve=True)
    assert settings.etcd is not None
    assert settings.hosts == ("a", "b", "c")
    assert unit.index("EnvironmentFile=") < unit.index("MS_RECOVERY_PATH")  # what it says wins in any order
    assert "StartLimitIntervalSec=0" in (DEPLOY / "systemd" / "several-schedulers.conf").read_text()
