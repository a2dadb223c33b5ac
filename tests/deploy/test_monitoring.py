"""Alerts and the dashboard: they ask for what a scheduler serves, and a real Prometheus understands them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from muster.wire.v1 import rendezvous_pb2 as pb
from tests.ports import free_port
from tests.scheduler.processes import ROOT, Pki, channel, form, scheduler
from tests.waiting import LIMIT_S
from tests.web.launch import launch

MONITORING = ROOT / "deploy" / "monitoring"
DASHBOARD = MONITORING / "grafana-dashboard.json"
OF_A_BUSY_MACHINE = {"MusterSchedulerDown", "MusterStraggler"}
"""Alerts that wait for minutes, and may have begun to: an answer took over a second, or one rank was slow."""

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs prometheus and promtool"
)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def queries() -> list[str]:
    """Every expression of the dashboard, its variables put in."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    exprs = [target["expr"] for panel in panels for target in panel["targets"]]
    return [re.sub(r"\$\w+", ".*", expr) for expr in exprs]


def test_alerts_and_dashboard_ask_for_what_is_served(pki: Pki) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    with scheduler(**pki.env(), MS_METRICS_PORT=str(port)), _get(url) as answer:
        served = set(re.findall(r"^# TYPE (\w+) ", answer.read().decode(), re.MULTILINE))
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    exprs = [rule["expr"] for group in groups for rule in group["rules"]]
    asked = {name for expr in (*exprs, *queries()) for name in re.findall(r"\bmuster_\w+", expr)}
    served |= {f"{name}_total" for name in served}
    assert len(asked) > 12
    assert asked <= served


def test_every_panel_has_its_place() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_prometheus_asks_where_all_that_is_shipped_has_the_scheduler_serve() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    [target] = [each for part in config["scrape_configs"][0]["static_configs"] for each in part["targets"]]
    port = target.rpartition(":")[2]
    said = re.compile(r"""MS_METRICS_PORT(?:=|, value: )"?([0-9]+)""")
    places = [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    found = {path.name: said.findall(path.read_text()) for path in (*places, ROOT / "docs" / "operating.md")}
    assert {"README.md", "scheduler.yaml", "operating.md"} <= {name for name, ports in found.items() if ports}
    assert {each for ports in found.values() for each in ports} == {port}


@pytest.mark.system
@needs_prometheus
def test_promtool_finds_no_fault() -> None:
    for words in ("check config prometheus.yml", "check rules alerts.yml", "test rules alerts_test.yml"):
        command = ["promtool", *words.split()]
        ran = subprocess.run(command, cwd=MONITORING, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.system
@needs_prometheus
def test_a_real_prometheus_sees_a_job_suspended(pki: Pki, tmp_path: Path) -> None:
    metrics, port = free_port(), free_port()
    configure(tmp_path, metrics)
    with (
        scheduler(**pki.env(), MS_METRICS_PORT=str(metrics), MS_NODE_TIMEOUT="60") as running,
        channel(running.target, pki.credentials("client")) as over,
        prometheus(tmp_path, port),
    ):
        first, second = form(over)
        steps = iter(range(1, 10_000))

        def beat() -> None:
            for stream in (first, second):
                heartbeat = pb.Heartbeat(generation=1, step=next(steps), samples_per_s=4.0)
                stream.put(pb.WorkerMessage(heartbeat=heartbeat))

        until(lambda: value(port, 'muster_job_state{exported_job="default",state="running"}') == 1.0, beat)
        for expr in queries():
            until(lambda expr=expr: bool(ask(port, expr)) or may_be_empty(expr), beat)  # type: ignore[misc]
        until(lambda: value(port, "muster_workers_missing") == 0.0, beat)
        second.call.cancel()
        until(lambda: "pending" in alerts(port).get("MusterJobSuspended", []))
        until(lambda: value(port, "muster_workers_missing") == 1.0)
        rules = api(port, "rules")["groups"][0]["rules"]
        assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []


@pytest.mark.system
@needs_prometheus
def test_a_real_prometheus_scrapes_a_job_that_trains_and_loses_a_worker(tmp_path: Path) -> None:
    metrics, port = free_port(), free_port()
    configure(tmp_path, metrics)
    with launch(tmp_path, 3, MS_METRICS_PORT=str(metrics)) as job, prometheus(tmp_path, port):

        def step() -> float:
            return value(port, "muster_step") or 0.0

        until(lambda: step() > 5 and value(port, "muster_workers_missing") == 0.0)
        for expr in queries():
            until(lambda expr=expr: bool(ask(port, expr)) or may_be_empty(expr))  # type: ignore[misc]
        until(lambda: alerts(port).keys() <= OF_A_BUSY_MACHINE)
        os.kill(job.pid_of(2), signal.SIGKILL)
        until(lambda: "pending" in alerts(port).get("MusterWorkersMissing", []))
        until(lambda: value(port, "muster_workers_missing") == 1.0)
        reached = step()
        until(lambda: step() > reached + 5)
        until(lambda: alerts(port).keys() - OF_A_BUSY_MACHINE == {"MusterWorkersMissing"})


def may_be_empty(expr: str) -> bool:
    """Whether a query of the dashboard may find nothing: nobody refused, no straggler, no GPU."""
    return any(
        each in expr for each in ("rate(muster_refusals_total", "muster_straggler_slowdown", "muster_gpu")
    )


def configure(directory: Path, metrics: int) -> None:
    """Prometheus' settings as they are shipped, for the scheduler here and once a second."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(MONITORING / "alerts.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{metrics}"]}]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))


class prometheus:  # noqa: N801
    """A Prometheus that keeps its data here."""

    def __init__(self, directory: Path, port: int) -> None:
        self._command = [
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        self._log = (directory / "prometheus.log").open("w")

    def __enter__(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=subprocess.STDOUT)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(LIMIT_S)
        self._log.close()


def _get(url: str) -> Any:
    return urllib.request.urlopen(url, timeout=LIMIT_S)


def api(port: int, path: str) -> Any:
    with _get(f"http://127.0.0.1:{port}/api/v1/{path}") as answer:
        return json.loads(answer.read())["data"]


def ask(port: int, expr: str) -> list[Any]:
    found: list[Any] = api(port, f"query?{urllib.parse.urlencode({'query': expr})}")["result"]
    return found


def value(port: int, expr: str) -> float | None:
    found = ask(port, expr)
    return float(found[0]["value"][1]) if found else None


def alerts(port: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for alert in api(port, "alerts")["alerts"]:
        found.setdefault(alert["labels"]["alertname"], []).append(alert["state"])
    return found


def until(true: Callable[[], bool], meanwhile: Callable[[], object] = bool) -> None:
    """Asks until it is so."""
    for _ in _tries():
        meanwhile()
        try:
            if true():
                return
        except OSError:  # it is starting
            continue
    raise AssertionError("it never was")


def _tries() -> Iterator[int]:
    deadline, count = time.monotonic() + LIMIT_S, 0
    while time.monotonic() < deadline:
        yield count
        count += 1
        time.sleep(0.3)
