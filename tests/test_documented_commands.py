"""Every command in a shell block of the documents is run by a test, or listed with the reason why not."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.end_to_end.test_taught_pages import PAGES as TAUGHT
from tests.ports import free_port
from tests.scheduler.processes import ROOT, environment
from tests.waiting import LIMIT_S

PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text()
    for page in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "deploy" / "README.md",
    )
}

KEYS = "--config keys/config.json"
BOTH = f"{KEYS} --password-file keys/password"

RUN_HERE = {
    "README.md": "test_the_readme_s_commands_start_its_job",
    "docs/quickstart.md": "test_the_quick_start_in_terminals_of_your_own",
    "docs/operating.md": "test_operators_ask_a_job_that_runs",
    "docs/launching.md": "test_the_launcher_s_commands",
    "docs/web.md": "test_a_page_and_a_report_of_a_run",
    "docs/fault_injection.md": "test_harm_is_done_to_a_job",
}
"""Pages whose commands a test of this file runs as they stand, but for those in the lists below."""

ELSEWHERE = {
    "make train": "tests/end_to_end/test_make.py",
    "muster plan models:make --gpus 8": "tests/parallel/test_command.py",
    "muster plan models:make --gpus 8 --why fc": "tests/parallel/test_command.py",
    'muster plan models:make --gpus 8 --strategy "fc=((1, 1), (8, 1))" --out plan.json --html plan.html': (
        "tests/parallel/test_command.py"
    ),
    "muster plan models:make --gpus 8 --mode data_parallel": "tests/parallel/test_command.py",
    "muster plan models:make --gpus 4 --machine machine.json": "tests/parallel/test_command.py",
    "muster plan models:make --hosts 8 --gpus 64 --machine h100": "tests/parallel/test_command.py",
    "muster run -n 4 --scheduler -- muster plan --measure machine.json": "tests/parallel/test_command.py",
    f"muster run -n 8 --scheduler {BOTH} -- python ddp.py": "tests/end_to_end/test_torch_programs.py",
    f"MS_TORCH_GLOO=muster muster run -n 8 --scheduler {BOTH} -- python ddp.py": (
        "tests/end_to_end/test_torch_programs.py"
    ),
    f"muster run -n 8 --in-place --max-restarts 3 --scheduler {BOTH} -- python ddp.py": (
        "tests/end_to_end/test_in_place.py"
    ),
    f"muster run -n 2 --scheduler {BOTH} -- python train.py": "tests/end_to_end/test_jax.py",
    f"muster run -n 8 --encrypt-nccl --scheduler {BOTH} -- python train.py": (
        "tests/end_to_end/test_nccl_encryption.py"
    ),
    "muster audit verify /var/log/muster/audit.jsonl* --journal device/scheduler-resnet.sqlite --step 1200": (
        "tests/scheduler/audit/test_command.py"
    ),
    'exec python -m muster slurm --spare-nodes "${SPARE_NODES:-1}" -- "${@:-train.py}"': (
        "tests/launch/slurm/test_cluster.py"
    ),
    "sbatch deploy/slurm/muster.sbatch train.py --resume": "tests/launch/slurm/test_cluster.py",
    "muster certs show --config keys/config.json": "tests/certs/cli/test_show.py",
    "muster nccl-plugin build": "tests/launch/test_nccl_plugin.py",
    "muster nccl-plugin show": "tests/launch/test_nccl_plugin.py",
}
"""Commands that tests elsewhere run, perhaps with fewer workers: each names the file."""

_HOSTS = "names hosts of the reader's; its options are parsed by tests/test_project.py"
_JOIN = "--nnodes 2 --nproc-per-node 8 --join 10.0.0.1:6667"
_SUITE = "is what runs the tests"
_NETWORKS = (
    "cuts networks of its own as root; tests/end_to_end/test_cut_between_hosts.py does it in namespaces"
)
_MINUTES = "takes minutes; tests/bench/ runs it for seconds"
_DEPLOY = "changes a machine or a cluster; tests/deploy/ runs these recipes on machines of its own"
NOT_RUN = {
    "README.md": {"make test": _SUITE},
    "docs/quickstart.md": {
        "make test": _SUITE,
    },
    "CONTRIBUTING.md": {
        **dict.fromkeys(
            (
                "make test",
                "make test-torch",
                "make test-torch-oldest",
                "make test-system",
                "make test-frameworks",
                "make test-newest",
                "make test-lowest",
            ),
            _SUITE,
        ),
        "make lint": "tests/test_project.py runs the same tools",
        "make format": "changes the checkout",
        "make proto": "changes the checkout; tests/test_project.py compares the stubs",
        "python -m muster bench formation --workers 8 --json formation.json --peer openmpi": "needs Open MPI",
        "python -m muster bench train --gpus 1 2 --batch 32 --json train.json --check example/muster=0.8": (
            "needs two GPUs"
        ),
    },
    "docs/launching.md": {
        f"python -m muster run -H node1:8,node2:8 --scheduler {KEYS} -- python train.py": _HOSTS,
        f"python -m muster run --hostfile hosts --scheduler {KEYS} -- python train.py": _HOSTS,
        f"python -m muster run {_JOIN} {KEYS} -- python train.py": _HOSTS,
        f"python -m muster check {_JOIN} {KEYS}": _HOSTS,
    },
    "docs/operating.md": {
        f"muster status --host 10.0.0.1 {KEYS} --job my-job": "names a host of the reader's",
        **dict.fromkeys(
            (
                """revision=$(etcdctl endpoint status --write-out json"""
                """ | grep -o '"revision":[0-9]*' | head -1 | cut -d: -f2)""",
                "etcdctl compact $revision",
                "etcdctl defrag",
                "etcdctl alarm disarm",
            ),
            "tests/scheduler/etcd/test_real_etcd.py does the same to an etcd without space",
        ),
    },
    "docs/containers.md": dict.fromkeys(
        (
            "mmdebstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm base.tar",
            "container=$(buildah from scratch)",
            "buildah add $container base.tar /",
            "buildah commit $container localhost/base",
            "buildah build --build-arg BASE=localhost/base --target cpu -t muster:cpu"
            " -f deploy/docker/Dockerfile .",
        ),
        "tests/deploy/images.py does the same in a storage of its own",
    ),
    "docs/spiffe.md": {"python -m muster bench identities --minutes 10 --every 10 --ends 5": _MINUTES},
    "docs/fault_injection.md": {
        **dict.fromkeys(
            (
                "python -m muster bench recovery",
                "python -m muster bench recovery --seed 7 --kills 3 --scheduler-kills 3 --keep logs",
                "python -m muster bench recovery --kills 0 --scheduler-kills 0 --chaos-s 60",
                "python -m muster bench flood --rules none",
            ),
            _MINUTES,
        ),
        "python -m muster bench recovery --backend nccl": "needs four GPUs",
        **dict.fromkeys(
            (
                "ip netns add switch",
                "ip -n switch link add br0 type bridge; ip -n switch link set br0 up",
                "for i in 1 2 3; do",
                "ip netns add host$i",
                "ip -n switch link add port$i type veth peer name eth0 netns host$i",
                "ip -n switch link set port$i master br0 up",
                "ip -n host$i address add 10.77.0.$i/24 dev eth0",
                "ip -n host$i link set eth0 up; ip -n host$i link set lo up",
                "done",
                "ip -n switch link set port3 nomaster",
                "ip -n switch link set port3 master br0",
                "for i in 1 2 3; do ip netns del host$i; done; ip netns del switch",
                "ip -n host2 neighbour replace 10.77.0.3 lladdr 02:00:00:00:00:01 dev eth0 nud permanent",
                "ip -n host2 neighbour del 10.77.0.3 dev eth0",
            ),
            _NETWORKS,
        ),
    },
    "docs/torch.md": {
        f"MS_SCHED_HOST=head muster scheduler --serve {KEYS}": _HOSTS,
        "export MS_CONFIG_FILE=keys/config.json MS_CLIENT_PASSWORD_FILE=keys/password": _HOSTS,
        "torchrun --rdzv-backend=muster --rdzv-endpoint=head:6667 --rdzv-id=my-job"
        " --nnodes=1:4 --nproc-per-node=8 --max-restarts=3 ddp.py": _HOSTS,
        "muster certs init --dir keys --password-file keys/password": "README.md has it, and is run",
    },
    "docs/web.md": {
        "pip install '.[web]'": "installs packages",
        "muster web --bind 0.0.0.0 --name host.example --port 8443": "opens a port to the network",
    },
}
"""Commands that no test runs, by page, each with the reason."""

WHOLE_PAGES = {"deploy/README.md": _DEPLOY}
"""Pages none of whose commands is run here."""


def commands(page: str) -> list[str]:
    """The commands in the shell blocks of a page: continued lines joined, comments taken away.

    Blocks with prompts also have what is printed: tests/end_to_end/test_taught_pages.py runs those.
    """
    blocks = re.findall(r"^```(?:sh|bash|console|shell)\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)
    text = "\n".join(block for block in blocks if not block.startswith("$ ")).replace("\\\n", " ")
    lines = (re.sub(r"(?:^|\s+)#.*", "", line).strip() for line in text.splitlines())
    return [" ".join(line.split()) for line in lines if line]


def test_every_shell_block_says_that_it_is_one() -> None:
    """A block without a language would escape this file: none may begin with a command."""
    begins = re.compile(r"^(?:```\n|    )(?:\$ |muster |python |make |pip |export |kill |MS_)", re.MULTILINE)
    assert not [page for page, text in PAGES.items() if begins.search(text)]


def test_pages_that_show_what_a_command_prints_are_run() -> None:
    shows = {Path(page).name for page, text in PAGES.items() if re.search(r"^\$ ", text, re.MULTILINE)}
    assert shows == set(TAUGHT)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_run_or_listed_with_a_reason(page: str) -> None:
    if page in WHOLE_PAGES:
        return
    not_run = NOT_RUN.get(page, {})
    unknown = [line for line in commands(page) if line not in not_run and line not in ELSEWHERE]
    assert page in RUN_HERE or not unknown


def test_the_lists_have_no_stale_rows() -> None:
    there = {page: set(commands(page)) for page in PAGES}
    for page, rows in NOT_RUN.items():
        assert not rows.keys() - there[page], page
    everything = set().union(*there.values())
    assert not ELSEWHERE.keys() - everything
    assert all((ROOT / file).exists() for file in ELSEWHERE.values())
    assert all(name in globals() and there[page] for page, name in RUN_HERE.items())
    assert all(there[page] for page in WHOLE_PAGES)


# ---------------------------------------------------------------- the pages' commands, as they stand


INSTALLED = os.environ.get("MUSTER_TEST_PYTHON", "")
"""The Python of an environment with an installed wheel, to walk the pages there; empty: this checkout."""


class Shell:
    """A folder and an environment in which a page's commands are run by bash."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = folder / "bin"
        names.mkdir()
        for name, words in (("python", ""), ("muster", "-m muster")):
            (names / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            (names / name).chmod(0o755)
        self.env = environment(
            MS_BACKEND="tcp",
            MS_TOPO_TIMEOUT="60",
            XDG_RUNTIME_DIR=str(folder / "runtime"),
            PATH=f"{Path(INSTALLED).parent if INSTALLED else names}{os.pathsep}{os.environ['PATH']}",
            **({"PYTHONPATH": ""} if INSTALLED else {}),
        )
        (folder / "runtime").mkdir(mode=0o700)

    def run(self, *lines: str, **more: str) -> str:
        """Runs lines one after the other, the first that fails ends it; returns all that was written."""
        done = subprocess.run(
            ["bash", "-e", "-c", "\n".join(lines)],
            cwd=self.folder,
            env=self.env | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    @contextmanager
    def running(self, line: str) -> Iterator[subprocess.Popen[str]]:
        """Runs a line beside the test; ended with SIGINT, as by Ctrl-C, if it has not ended by itself."""
        with (self.folder / "beside.log").open("w") as written:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"],
                cwd=self.folder,
                env=self.env,
                stdout=written,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                try:
                    process.wait(timeout=100)
                finally:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()

    def interrupted(self, line: str, *, after: str) -> None:
        """Runs a line on a terminal until it has written these words, and then presses Ctrl-C: no failure."""
        screen, terminal = os.openpty()
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=self.folder,
            env=self.env | {"COLUMNS": "120"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        seen = b""
        try:
            while after.encode() not in seen:
                assert select.select([screen], [], [], LIMIT_S)[0], seen
                seen += os.read(screen, 4096)
            process.send_signal(signal.SIGINT)
            with suppress(OSError):  # EIO: the terminal's last user has gone
                while more := os.read(screen, 4096):
                    seen += more
            assert process.wait(LIMIT_S) == 0, seen
        finally:
            os.close(screen)
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def to_run(page: str) -> list[str]:
    return [line for line in commands(page) if line not in ELSEWHERE and line not in NOT_RUN.get(page, {})]


INIT = "python -m muster certs init --dir keys --password-file keys/password"
STEPS = """
import time
from pathlib import Path
import muster

with muster.init() as session:
    step = 0
    while True:
        try:
            session.step_boundary(step)
            step = int(muster.all_reduce(float(step), op="max")) + 1
            session.report(step, 1.0, loss=1.0 / step)
            if muster.all_reduce(float(Path("stop").exists())):
                break
        except muster.MembershipChanged:
            session.rejoin()
        except muster.LeaveGranted:
            break
        time.sleep(0.05)
"""


def test_the_readme_s_commands_start_its_job(shell: Shell) -> None:
    (shell.folder / "job.py").write_text(re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL)[0])
    assert "0 of 2 [1. 2. 3.]" in shell.run(*to_run("README.md"))


def test_the_quick_start_in_terminals_of_your_own(shell: Shell) -> None:
    lines = [f"{line} &" if line.startswith("MS_ROLE=") else line for line in to_run("docs/quickstart.md")]
    assert sum(line.endswith("&") for line in lines) == 3
    port = str(free_port())
    lines = [
        line.replace("MS_SCHED_PORT=6667", f"MS_SCHED_PORT={port}") for line in lines
    ]  # maybe taken here
    output = shell.run(*lines, "for job in $(jobs -p); do wait $job; done")
    assert output.count("test accuracy: 0.9") == 2


def test_the_launcher_s_commands(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(
        "import muster\nwith muster.init() as session:\n    muster.barrier()\n"
    )
    launch, table = to_run("docs/launching.md")
    shell.run(INIT, launch)
    shell.run(table)
    assert (shell.folder / "table.json").exists()


def await_shown(shell: Shell, words: str, *, within_s: float = 100.0) -> str:
    """Asks for the job's state until it has these words."""
    deadline = time.monotonic() + within_s
    while True:
        done = subprocess.run(
            ["bash", "-c", "muster status"],
            cwd=shell.folder,
            env=shell.env,
            capture_output=True,
            text=True,
            check=False,
        )
        if words in done.stdout:
            return done.stdout
        assert time.monotonic() < deadline, done.stdout + done.stderr
        time.sleep(0.2)


LAUNCH = f"muster run -n 3 --min-workers 2 --max-restarts 0 --scheduler {BOTH} -- python train.py"


def test_operators_ask_a_job_that_runs(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(STEPS)
    watch, jobs, drain, stacks, health = to_run("docs/operating.md")
    shell.run(INIT)
    with shell.running(LAUNCH) as launch:
        await_shown(shell, "running")
        address = re.search(r"127\.0\.0\.1:(\d+)", shell.run("muster jobs"))
        assert address is not None
        where = {"MS_SCHED_PORT": address[1], "MS_CLIENT_PASSWORD_FILE": "keys/password"}
        assert "running" in shell.run(jobs, **where)
        assert "SERVING" in shell.run(health, **where)
        assert "MainThread (most recent call first)" in shell.run(stacks.replace("NODE", "1"), **where)
        shell.run(drain.replace("NODE", "2"), **where)
        await_shown(shell, "2 of")
        shell.interrupted(watch, after="running")
        (shell.folder / "stop").touch()
        assert launch.wait(timeout=100) == 0, (shell.folder / "beside.log").read_text()


def test_a_page_and_a_report_of_a_run(shell: Shell) -> None:
    pytest.importorskip("starlette")
    (shell.folder / "train.py").write_text(STEPS)
    web, report, runs = to_run("docs/web.md")
    shell.run(INIT)
    with shell.running(LAUNCH):
        await_shown(shell, "running")
        shell.interrupted(web, after="http://127.0.0.1")
        (shell.folder / "stop").touch()
    [run] = [
        path for path in (shell.folder / "muster-runs").iterdir() if path.is_dir() and not path.is_symlink()
    ]
    assert ".html" in shell.run(report.replace("NAME", run.name))
    assert run.name in shell.run(runs)


@pytest.mark.system
@pytest.mark.timeout(400)
def test_harm_is_done_to_a_job(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(STEPS)
    init, variables, passwords, where, start, workers, kill, replace, leave, drain, stop, *scheduler = to_run(
        "docs/fault_injection.md"
    )
    kill_it, again, stop_it = scheduler
    assert again == start
    port = str(free_port())
    script = [
        *(init, variables, passwords, where.replace("6667", port)),
        *(start, "SCHEDULER_PID=$!", workers, "PIDS=($(jobs -p)); await running 'generation 1'"),
        *(kill.replace("PID", "${PIDS[3]}"), f"{replace} &", "await running 'generation 3'"),
        stop.replace("PID", "${PIDS[1]}").replace("sleep 8", "sleep 1"),
        *(drain, "await running 'generation 4'", f"{replace} &", "await running 'generation 5'"),
        *(kill_it.replace("SCHEDULER_PID", "$SCHEDULER_PID"), again, "SCHEDULER_PID=$!"),
        "await running 'generation 5'",
        stop_it.replace("SCHEDULER_PID", "$SCHEDULER_PID").replace("sleep 10", "sleep 1"),
        *(leave.replace("PID", "${PIDS[2]}"), "await running 'generation 6'"),
        *("touch stop", "wait $SCHEDULER_PID"),
    ]
    awaiting = """
    await() {
        for try in $(seq 300); do
            shown=$(python -m scheduler status 2>&1) || true
            found=1
            for word in "$@"; do [[ $shown == *$word* ]] || found=; done
            [ -n "$found" ] && return 0
            sleep 0.2
        done
        echo "$shown"; return 1
    }
    """
    output = shell.run(awaiting, *script)
    assert "Traceback" not in output
