"""Ports in deploy/ are the same everywhere, and those that the documentation names."""

from __future__ import annotations

import re

import pytest
import yaml

from muster.wire.variables import TABLE
from tests.deploy.test_deploy import DEPLOY, ROOT, named

TEXTS = sorted(
    path
    for folder in (DEPLOY, ROOT / "docs")
    for path in folder.rglob("*")
    if path.suffix in (".yaml", ".yml", ".md", ".service", ".nft")
)


@pytest.mark.parametrize("variable", ["MS_SCHED_PORT", "MS_METRICS_PORT"])
def test_every_file_names_the_same_port(variable: str) -> None:
    written = rf"{variable}(?:`, |: \"?|=|, value: \"?)(\d+)"
    found = {port: path.name for path in TEXTS for port in re.findall(written, path.read_text())}
    expected = {"MS_SCHED_PORT": "6667", "MS_METRICS_PORT": "9464"}
    assert set(found) - {"0"} == {expected[variable]}, found
    assert variable in TABLE


def test_the_containers_open_the_ports_that_service_policy_and_prometheus_name() -> None:
    container = named("Deployment", "muster-scheduler")["spec"]["template"]["spec"]["containers"][0]
    opened = {one["name"]: one["containerPort"] for one in container["ports"]}
    service = named("Service", "muster-scheduler")["spec"]["ports"]
    assert {one["targetPort"]: one["port"] for one in service} == opened
    rules = named("NetworkPolicy", "muster-scheduler")["spec"]["ingress"]
    assert {port["port"] for rule in rules for port in rule["ports"]} == set(opened.values())
    scrape = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yml").read_text())["scrape_configs"]
    targets = [one for each in scrape for static in each["static_configs"] for one in static["targets"]]
    assert {int(one.rpartition(":")[2]) for one in targets} == {opened["metrics"]}
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert int(values["MS_METRICS_PORT"]) == opened["metrics"]
    shared = named("ConfigMap", "muster-job")["data"]
    assert int(shared["MS_SCHED_PORT"]) == opened["rendezvous"]
