"""The check before training: what it compares, how it judges, what it prints."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import muster
from muster.launch.check.command import Result, show
from muster.launch.check.rules import (
    MUST_AGREE,
    clock_skews,
    compare,
    name_clashes,
    ranges,
    rounds,
    slow_sentences,
    unsealed,
)
from muster.worker.host import (
    MUST_AGREE_NCCL,
    PROJECTS,
    all_facts,
    bind_libraries,
    driver_version,
    gpu_models,
    join_facts,
    package_versions,
)
from tests.end_to_end.workers import company
from tests.launch.launching import free_port
from tests.scheduler.processes import ROOT, environment, scheduler


class OnCpu:
    facts: ClassVar[dict[str, str]] = {}
    on_device = False


class Plane:
    facts: ClassVar[dict[str, str]] = {"nccl": "2.28.9"}
    on_device = True


def plane(kind: type) -> Any:
    return kind()


def machine(root: Path) -> Path:
    gpus = root / "proc/driver/nvidia/gpus"
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (gpus / bus).mkdir(parents=True)
        (gpus / bus / "information").write_text("Model: \t NVIDIA H200\nDevice Minor: \t 0\n")
    version = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (x)\nGCC 12\n"
    )
    (root / "proc/driver/nvidia/version").write_text(version)
    return root


def folder(path: Path, *entries: str) -> str:
    """A folder in which packages are installed."""
    for entry in entries:
        (path / entry).mkdir(parents=True)
    return str(path)


def test_what_a_worker_sends_when_it_joins(tmp_path: Path) -> None:
    env = {
        "NCCL_ALGO": "Ring",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_PROTO": "",
        "MS_CLIENT_PASSWORD": "secret",
    }
    first = folder(tmp_path / "first", "torch-2.11.0+cu128.dist-info", "torchvision-0.26.dist-info")
    second = folder(
        tmp_path / "second", "torch-1.0.dist-info", "cupy_cuda12x-13.4.1.dist-info", "numpy-2.4.dist-info"
    )
    path = [str(tmp_path / "nowhere.zip"), first, second]
    assert join_facts(plane(OnCpu), env, tmp_path, path) == {"muster": muster.__version__}
    assert join_facts(plane(Plane), env, machine(tmp_path), path) == {
        "muster": muster.__version__,
        "nccl": "2.28.9",
        "NCCL_ALGO": "Ring",
        "torch": "2.11.0+cu128",
        "cupy": "13.4.1",
        "~driver": "580.95.05",
    }


def test_the_join_path_imports_nothing_that_is_slow() -> None:
    slow = "{'torch', 'cupy', 'numpy', 'importlib.metadata', 'dataclasses', 'email.parser', 'json'}"
    code = (
        "import sys, muster.worker.host as f;"
        "plane = type('Plane', (), {'facts': {}, 'on_device': True});"
        "f.join_facts(plane, {'NCCL_ALGO': 'Ring'}); "
        f"print({slow} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.stdout == "set()\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("entry", "version"),
    [
        ("Torch-2.11.0.dist-info", "2.11.0"),
        ("torch-2.1-py3.10.egg-info", "2.1"),
        ("torch-2.1-py3.10-linux-x86_64.egg-info", "2.1"),
        ("~orch-2.1.dist-info", None),  # what pip leaves of an installation that it replaces
        ("torch-2.1\nNCCL_ALGO=x.dist-info", None),
        ("torch.dist-info", None),
        ("torch-2.1", None),
    ],
)
def test_versions_come_from_the_names_of_metadata_folders(
    tmp_path: Path, entry: str, version: str | None
) -> None:
    assert package_versions(["torch", "cuda"], [folder(tmp_path, entry)]).get("torch") == version


def test_the_versions_are_those_that_the_packages_tell_themselves() -> None:
    from importlib.metadata import version

    found = package_versions(PROJECTS)
    assert {"numpy", "grpcio", "protobuf", "cryptography"} <= found.keys()
    assert all(version(name) == found[name] for name in ("numpy", "grpcio", "protobuf", "cryptography"))


def test_what_is_compared_at_each_join_is_refused_by_the_check_too(tmp_path: Path) -> None:
    projects = {name: projects[-1] for name, projects in PROJECTS.items()}
    path = folder(tmp_path / "site", *(f"{name}-1.0.dist-info" for name in projects.values()))
    env = dict.fromkeys(MUST_AGREE_NCCL, "1")
    facts = join_facts(plane(Plane), env, machine(tmp_path), [path])
    assert {"torch", "cupy", "cuda", "nccl", *MUST_AGREE_NCCL} <= facts.keys()
    assert {name for name in facts if not name.startswith("~")} <= MUST_AGREE


def test_what_the_check_compares(tmp_path: Path) -> None:
    facts = all_facts({"NCCL_DEBUG": "INFO", "MS_CLIENT_PASSWORD": "secret"}, machine(tmp_path))
    assert facts["gpus"] == "2" and facts["gpu model"] == "NVIDIA H200" and facts["driver"] == "580.95.05"
    assert facts["NCCL_DEBUG"] == "INFO" and facts["muster"] == muster.__version__
    assert {"numpy", "grpcio", "python"} <= facts.keys()
    assert "secret" not in str(facts)


def test_without_a_gpu_there_is_no_driver(tmp_path: Path) -> None:
    assert (driver_version(tmp_path), gpu_models(tmp_path)) == ("", [])


def test_the_version_is_that_of_the_package() -> None:
    found = re.search(r"^version = \"(.*)\"$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert found is not None and muster.__version__ == found[1]


def test_the_interface_is_handed_to_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    import os

    bind_libraries("")
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    bind_libraries("eth1")
    assert (os.environ.pop("NCCL_SOCKET_IFNAME"), os.environ["GLOO_SOCKET_IFNAME"]) == ("=eth1", "ib0")


def test_what_differs_is_found_and_what_must_agree_comes_first() -> None:
    facts = [
        {"nccl": "2.28", "python": "3.11"},
        {"nccl": "2.28", "python": "3.12"},
        {"python": "3.12", "kernel": "6"},
    ]
    found = compare(facts)
    assert [(each.name, each.refused) for each in found] == [
        ("nccl", True),
        ("kernel", False),
        ("python", False),
    ]
    assert found[0].values == (("2.28", (0, 1)), ("(unset)", (2,)))
    assert found[2].values == (("3.12", (1, 2)), ("3.11", (0,)))
    assert compare([facts[0]] * 3) == []


def test_ranks_that_must_encrypt_nccl_and_cannot_are_told() -> None:
    must = {"MS_NCCL_ENCRYPTION": "require"}
    cannot = {**must, "nccl_traffic": "plain", "NCCL between hosts": "plain: There is no C compiler."}
    can = {**must, "nccl_traffic": "sealed", "NCCL between hosts": "sealed"}
    assert unsealed([can, cannot, cannot]) == [
        "NCCL between hosts is plain: There is no C compiler. (rank 1-2)"
    ]
    assert not unsealed([can, {}, {**cannot, "MS_NCCL_ENCRYPTION": "prefer"}])
    [first, *_] = compare([can, cannot, {}])
    assert (first.name, first.refused) == ("MS_NCCL_ENCRYPTION", True)
    assert next(each for each in compare([can, cannot]) if each.name == "nccl_traffic").refused


def test_machines_with_one_name_are_told() -> None:
    assert name_clashes([("a", "n1"), ("a", "n1"), ("b", "n2")]) == []
    [sentence] = name_clashes([("a", "n1"), ("b", "n1"), ("b", "n1"), ("c", "n2")])
    assert sentence == "2 machines are named n1: ranks 0 and 1-2; give each a host name of its own."


def test_a_clock_that_is_off_is_told() -> None:
    assert clock_skews([0.0, 0.4, -0.3], 0.01) == []
    [sentence] = clock_skews([0.0, -7.5, 0.1, 0.0], 0.01)
    assert "rank 1 is 7.5 s behind the others'" in sentence
    assert "rank 0 is 7.5 s ahead of" in clock_skews([0.0, -7.5, -7.5], 0.01)[0]
    assert clock_skews([0.0, 3.0], uncertainty_s=5.0) == []


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_every_pair_meets_once_and_nobody_twice_in_a_round(count: int) -> None:
    found = rounds(count)
    for meeting in found:
        members = [one for pair in meeting for one in pair]
        assert len(set(members)) == len(members)
    pairs = sorted(pair for meeting in found for pair in meeting)
    assert pairs == [(one, other) for one in range(count) for other in range(one + 1, count)]


NAMES = ["a", "b", "c", "d"]
EVEN = {(one, other): 10.0 for one in range(4) for other in range(one + 1, 4)}


def test_a_slow_host_is_named() -> None:
    speeds = EVEN | {(0, 2): 1.0, (1, 2): 2.0, (2, 3): 1.5}
    assert slow_sentences(NAMES, speeds) == [
        "Host c is slow: at most 2.00 GB/s with each other host, where 10.00 GB/s is usual."
    ]


def test_a_slow_link_between_good_hosts_is_named() -> None:
    assert slow_sentences(NAMES, EVEN | {(1, 3): 4.0}) == [
        "The link between b and d is slow: 4.00 GB/s, where 10.00 GB/s is usual."
    ]


def test_nothing_is_slow_among_equals_or_two() -> None:
    assert slow_sentences(NAMES, EVEN) == []
    assert slow_sentences(NAMES[:2], {(0, 1): 0.1}) == []


def test_rank_numbers_in_short() -> None:
    assert ranges([7, 0, 1, 2, 3]) == "0-3, 7"


def test_a_plane_beside_the_session_is_measured_and_its_lies_are_seen(tmp_path: Path) -> None:
    with scheduler(MS_WORKER_NUM="3") as sched, company(tmp_path, sched) as hired:
        workers = hired.form(3)
        for each in workers:
            each.tell("__import__('tests.launch.check.plane_probe', fromlist=['probe']).probe(s)")
        expected = "ok [[], [True, False, True], [1], [True, False, True]]"
        assert [each.answer() for each in workers] == [expected] * 3
        assert [each.finish() for each in workers] == [0] * 3


def examined(tmp_path: Path, *, clocks_ahead_s: list[int], hosts: list[str]) -> list[str]:
    """What ``examine`` warns of, the same on each of these real workers."""
    with scheduler(MS_WORKER_NUM=str(len(hosts))) as sched, company(tmp_path, sched) as hired:
        workers = [
            hired.start(MS_NODE_ID=str(rank), MS_WORKER_NUM=str(len(hosts)), MS_HOST_ID=host)
            for rank, host in enumerate(hosts)
        ]
        assert [each.answer() for each in workers] == [f"ok {rank}" for rank in range(len(hosts))]
        for each, ahead_s in zip(workers, clocks_ahead_s, strict=True):
            clock = f"lambda: __import__('time').time() + {ahead_s}"
            examine = "__import__('muster.launch.check.command', fromlist=['examine']).examine"
            each.tell(f"{examine}(s, [{{}}] * s.world_size, {clock}).warnings")
        answers = {each.answer() for each in workers}
        assert [each.finish() for each in workers] == [0] * len(hosts)
    assert len(answers) == 1
    return list(ast.literal_eval(answers.pop().removeprefix("ok ")))


def test_the_check_tells_clocks_that_are_off(tmp_path: Path) -> None:
    [sentence] = examined(tmp_path, clocks_ahead_s=[0, 5000, 0], hosts=["one"] * 3)
    assert re.match(r"The clock of rank 1 is (499\d|500\d)\.\d s ahead of the others'", sentence)


def test_the_check_tells_machines_that_share_a_name(tmp_path: Path) -> None:
    [sentence] = examined(tmp_path, clocks_ahead_s=[0, 0], hosts=["one", "other"])
    assert sentence.startswith("2 machines are named ")
    assert sentence.endswith(": ranks 0 and 1; give each a host name of its own.")


def test_everything_that_was_found_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    host = SimpleNamespace(id="one", name="alpha")
    session: Any = SimpleNamespace(members=[SimpleNamespace(rank=rank, host=host) for rank in range(2)])
    facts = [{"nccl": "2.28", "muster": "1"}, {"nccl": "2.27", "muster": "1"}]
    show(session, facts, Result(compare(facts), warnings=["A clock is off."], errors=["Wrong numbers."]))
    told = capsys.readouterr().out
    assert "2 ranks on 1 host" in told and "the same everywhere: muster 1" in told
    assert "warning: A clock is off." in told and "refused: Wrong numbers." in told
    assert re.search(r"refused +\S* *nccl +\S* *2\.28", told)
    assert told.rstrip().endswith("not ready to train: make equal what is refused above")


def run(tmp_path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "muster", "check", *arguments],
        env=environment(**{"MS_TOPO_TIMEOUT": "60", **env}),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=tmp_path,
    )


TASK = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}


@pytest.mark.parametrize("env", [{}, TASK], ids=["by hand", "as srun's only task on a node"])
def test_the_command_on_one_machine(tmp_path: Path, env: dict[str, str]) -> None:
    done = run(tmp_path, "--size-mib", "1", "-n", "2", "--scheduler", "--tail", "0", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on 1 host" in done.stdout
    assert f"muster {muster.__version__}" in done.stdout
    assert "AllReduce over tcp: the numbers are right" in done.stdout
    assert done.stdout.rstrip().endswith("ready to train")


def test_the_command_says_whether_nccl_s_traffic_would_be_encrypted(tmp_path: Path) -> None:
    words = ("--size-mib", "1", "-n", "2", "--scheduler", "--tail", "0", "--encrypt-nccl")
    done = run(tmp_path, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    flat = " ".join(done.stdout.split())
    assert "refused: NCCL between hosts is plain: NCCL's traffic cannot be encrypted without cert" in flat
    assert "AllReduce over tcp" not in done.stdout
    preferred = run(tmp_path, *words[:-1], "--encrypt-nccl=prefer")
    assert preferred.returncode == 0, preferred.stdout + preferred.stderr
    assert "MS_NCCL_ENCRYPTION prefer" in " ".join(preferred.stdout.split())


def test_rank_0_tells_what_is_refused_before_a_launcher_ends_it_for_another_rank(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    options = (
        "--size-mib",
        "1",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--join",
        address,
        "--tail",
        "0,2",
    )
    with ThreadPoolExecutor(2) as pool:
        launches = [
            pool.submit(run, tmp_path, *options, "--log-dir", algorithm, *more, NCCL_ALGO=algorithm)
            for algorithm, more in (
                ("Ring", ("--node-rank", "0", "--scheduler")),
                ("Tree", ("--node-rank", "1")),
            )
        ]
    first, second = (launch.result() for launch in launches)
    assert (first.returncode, second.returncode) == (1, 1)
    assert re.search(r"refused\W+NCCL_ALGO\W+Ring\W+0-1\b", first.stdout), first.stdout + first.stderr
    assert "not ready to train: make equal what is refused above" in first.stdout
    assert re.search(r"not ready to train: rank 0, on host \S+, says why", second.stderr), second.stderr


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    worker_env = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "1"}
    for before in (["-n", "2", "--scheduler"], []):  # nothing is launched first
        done = run(tmp_path, *before, "--size-mib", "0", **({} if before else worker_env))
        assert (done.returncode, "--size-mib must be from 1 to 4096" in done.stderr) == (2, True)
        assert not (tmp_path / "device").exists()
    done = run(tmp_path, "-n", "2", **worker_env)
    assert (done.returncode, "has no option '-n'" in done.stderr) == (2, True)
