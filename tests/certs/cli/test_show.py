"""What ``muster certs show`` says of a SPIFFE identity: from a file, and from the Workload API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.bench.identities.agent import AgentEntry, StandInAgent
from muster.certs.__main__ import main
from muster.certs.pki.certificates import to_pem

RULES = [
    {"uri": "spiffe://prod.example/{job}/scheduler", "role": "scheduler"},
    {"uri": "spiffe://prod.example/{job}/worker/{node}", "role": "worker"},
]
WORKER = AgentEntry("red/worker/n1", life_s=3600)


@pytest.fixture
def agent() -> Iterator[StandInAgent]:
    with StandInAgent() as made:
        yield made


@pytest.fixture(autouse=True)
def _no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MS_CONFIG_FILE", raising=False)


def configure(directory: Path, **values: object) -> str:
    files = dict.fromkeys(("server_cert_path", "client_cert_path", "ca_cert_path"), "none.pem")
    path = directory / "config.json"
    path.write_text(json.dumps(files | {"identity_map": RULES} | values))
    return str(path)


def certificate(directory: Path, agent: StandInAgent, entry: AgentEntry) -> str:
    path = directory / "leaf.pem"
    path.write_bytes(to_pem([agent.issue(entry)[1]]))
    return str(path)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What is said of the first certificate."""
    assert main(["show", "--json", *words]) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[0]))


def test_the_map_says_what_a_spiffe_id_stands_for_and_for_how_long(
    tmp_path: Path, agent: StandInAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    file, config = certificate(tmp_path, agent, WORKER), configure(tmp_path)
    facts = shown(capsys, "--config", config, file)
    assert facts["spiffe_id"] == "spiffe://prod.example/red/worker/n1"
    assert facts["identity"] == "muster://red/worker/n1"
    assert (facts["role"], facts["job"], facts["node"]) == ("worker", "red", "n1")
    assert facts["time_left"] == "59 min" and facts["days_left"] == 0
    assert facts["problems"] == []
    assert main(["show", "--config", config, file]) == 0
    text = capsys.readouterr().out
    assert "spiffe id          spiffe://prod.example/red/worker/n1" in text
    assert "time left          59 min" in text


def test_without_a_map_a_spiffe_id_is_shown_and_is_no_problem(
    tmp_path: Path, agent: StandInAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = shown(capsys, certificate(tmp_path, agent, WORKER))
    assert facts["spiffe_id"] == "spiffe://prod.example/red/worker/n1"
    assert "--config" in facts["identity"] and "role" not in facts
    assert facts["problems"] == []


def test_a_spiffe_id_that_no_rule_fits_is_a_problem(
    tmp_path: Path, agent: StandInAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = certificate(tmp_path, agent, AgentEntry("red/stranger/n1"))
    [problem] = shown(capsys, "--config", configure(tmp_path), stranger)["problems"]
    assert "spiffe://prod.example/red/stranger/n1 stands for no job and role here" in problem


def test_what_the_workload_api_hands_out_is_shown_with_its_authorities(
    tmp_path: Path, agent: StandInAgent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = agent.serve(tmp_path / "a.sock", WORKER)
    monkeypatch.setenv("MS_CONFIG_FILE", configure(tmp_path, spiffe_endpoint_socket=address))
    assert main(["show", "--json"]) == 0
    leaf, authority = map(json.loads, capsys.readouterr().out.splitlines())
    assert leaf["file"] == authority["file"] == address
    assert leaf["identity"] == "muster://red/worker/n1" and leaf["problems"] == []
    assert authority["authority"] and authority["time_left"] == "23 h 59 min"


def test_a_spiffe_id_of_a_certificate_that_is_no_svid_is_refused_by_the_map_alone(
    tmp_path: Path, agent: StandInAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    file = certificate(tmp_path, agent, AgentEntry("red/worker/n1", usage=False))
    [problem] = shown(capsys, "--config", configure(tmp_path), file)["problems"]
    assert "is no X.509-SVID" in problem


def test_nothing_named_is_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--config", configure(tmp_path)]):
        assert main(["show", *words]) == 2
        assert "Nothing to show" in capsys.readouterr().err
