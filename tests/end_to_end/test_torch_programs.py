"""``muster run -- python ddp.py``: programs that know nothing of Muster, over mutual TLS.

Those that need no torch speak TCPStore's protocol themselves, which takes seconds less.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.launching import gone
from tests.scheduler.processes import ROOT, Pki, environment, scheduler
from tests.waiting import wait_for

STORE = """
import os, socket, struct, sys, time

RANK, SIZE, GENERATION = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "MUSTER_GENERATION"))


class Store:
    def __init__(self):
        self.s = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        self.s.sendall(b"\\0" + struct.pack("<I", 0x3C85F7CE))

    def say(self, command, *parts):
        self.s.sendall(bytes((command,)) + b"".join(struct.pack("<Q", len(p)) + p for p in parts))

    def hear(self, size):
        got = b""
        while len(got) < size:
            more = self.s.recv(size - len(got))
            if not more:
                raise SystemExit("the store has gone")
            got += more
        return got

    def add(self, key):
        self.s.sendall(b"\\4" + struct.pack("<Q", len(key)) + key + struct.pack("<q", 1))
        return struct.unpack("<q", self.hear(8))[0]

    def wait(self, key):
        self.s.sendall(b"\\6" + struct.pack("<QQ", 1, len(key)) + key)
        self.hear(1)

    def meet(self):
        if self.add(b"here") == SIZE:
            self.say(1, b"all", b"1")
        self.wait(b"all")


store = Store()
store.meet()
print("rank", RANK, "of", SIZE, "in", GENERATION, "local", os.environ["LOCAL_RANK"], flush=True)
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def run(
    directory: Path,
    pki: Pki,
    *command: str,
    options: tuple[str, ...] = (),
    timeout_s: float = 200,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Runs ``muster run --scheduler`` to its end."""
    launch = [sys.executable, "-m", "muster", "run", "--scheduler", "--tail", "all", *options, "--", *command]
    return subprocess.run(
        launch,
        cwd=directory,
        env=environment(**pki.env(), **env),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def places(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d of \d in \d+ local \d$", output, re.MULTILINE))


ENDINGS = """
import ctypes
from pathlib import Path
agent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().rstrip(b"\\0").decode()
print("the agent is", agent, flush=True)
if "well" not in sys.argv:
    sys.exit(3 if RANK == 1 else 0)
if RANK == 1:
    ctypes.PyDLL(None).sleep(5)  # holds the interpreter's lock for longer than MS_NODE_TIMEOUT
"""


def test_a_program_meets_by_the_store_and_its_exit_code_is_the_launch_s(pki: Pki, tmp_path: Path) -> None:
    """An interpreter's lock that is held for long in the program harms neither session nor store."""
    (tmp_path / "job.py").write_text(STORE + ENDINGS)
    command = (sys.executable, "job.py")
    options = ("-n", "3", "--program", "torch")
    well = run(tmp_path, pki, *command, "well", options=options, MS_NODE_TIMEOUT="3")
    assert well.returncode == 0, well.stdout + well.stderr
    assert places(well.stdout) == [f"rank {rank} of 3 in 1 local {rank}" for rank in range(3)]
    assert "have completed the training" in well.stdout
    assert "the agent is muster: rank 1 job.py\n" in well.stdout
    badly = run(tmp_path, pki, *command, options=("-n", "2", "--program", "torch"))
    assert badly.returncode == 3, badly.stdout + badly.stderr


ADOPTS = """
if RANK < 0:
    import torch  # so it is taken for a torch program
session = __import__("muster").init()
session.report(40 + RANK, loss=0.5)
print("adopted", session.rank, session.world_size, session.node_id, session.job_id, flush=True)
"""


def test_a_shell_script_gets_an_agent_and_init_adopts_its_session(pki: Pki, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(STORE + ADOPTS)
    (tmp_path / "run.sh").write_text(f"set -e\nRANK_BEFORE=$RANK exec {sys.executable} job.py\n")
    done = run(tmp_path, pki, "bash", "run.sh", options=("-n", "2"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert places(done.stdout) == ["rank 0 of 2 in 1 local 0", "rank 1 of 2 in 1 local 1"]
    adopted = sorted(re.findall(r"adopted (\d) (\d) (\S+) (\S+)", done.stdout))
    assert [each[:2] for each in adopted] == [("0", "2"), ("1", "2")]
    assert len({each[2] for each in adopted}) == 2 and {each[3] for each in adopted} == {"default"}


class Recorder:
    """Passes connections on to a port of loopback, and keeps what goes through."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self.recorded: list[bytes] = []
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._serve)

    def close(self) -> None:
        """Once all that were connected have gone."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(100)
        for each in self._sockets:
            each.close()

    def _start(self, function: Callable[..., None], *arguments: socket.socket) -> None:
        self._threads.append(threading.Thread(target=function, args=arguments))
        self._threads[-1].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    self._start(self._pass_on, source, sink)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.recorded.append(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


NAMED = """
store.say(1, b"a-name-to-look-for/%d" % RANK, b"a-value-to-look-for")
store.wait(b"a-name-to-look-for/%d" % (1 - RANK))
"""


@pytest.mark.system
@pytest.mark.parametrize("encrypted", [True, False])
def test_a_recording_of_what_leaves_the_agents_shows_no_key_and_no_value(
    pki: Pki, tmp_path: Path, encrypted: bool
) -> None:
    """Without TLS it does, so the recording is one of what the store is asked for."""
    (tmp_path / "job.py").write_text(STORE + NAMED)
    env = pki.env() if encrypted else {"MS_ALLOW_INSECURE": "1"}
    with scheduler(MS_WORKER_NUM="2", **env) as served:
        recorder = Recorder(served.port)
        launch = [sys.executable, "-m", "muster", "run", "-n", "2", "--program", "torch", "--tail", "all"]
        done = subprocess.run(
            [*launch, "--", sys.executable, "job.py"],
            cwd=tmp_path,
            env=environment(**env, MS_SCHED_HOST="127.0.0.1", MS_SCHED_PORT=str(recorder.port)),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        recorder.close()
    assert done.returncode == 0, done.stdout + done.stderr
    recorded = b"".join(recorder.recorded)
    assert len(recorded) > 2000
    for text in (b"a-name-to-look-for", b"a-value-to-look-for", b"torch/"):
        assert (text in recorded) is not encrypted, text


ELASTIC = """
import signal, subprocess
if GENERATION == 1:
    if RANK != 1:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        print("left", child.pid, flush=True)
    if store.add(b"ready") == SIZE:
        store.say(1, b"go", b"1")
    store.wait(b"go")
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL) if "kill" in sys.argv else sys.exit(5)
    store.wait(b"never")  # the store's end ends it, as a collective would
"""


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_survivors_are_started_again_in_the_next_generation(pki: Pki, tmp_path: Path, how: str) -> None:
    (tmp_path / "job.py").write_text(STORE + ELASTIC)
    options = ("-n", "3", "--min-workers", "2", "--program", "torch")
    done = run(tmp_path, pki, sys.executable, "job.py", how, options=options)
    assert done.returncode == 0, done.stdout + done.stderr
    first = [f"rank {rank} of 3 in 1 local {rank}" for rank in range(3)]
    assert places(done.stdout) == sorted(
        [*first, *(f"rank {rank} of 2 in 2 local {rank}" for rank in range(2))]
    )
    left = [int(pid) for pid in re.findall(r"left (\d+)", done.stdout)]
    assert len(left) == 2
    wait_for(lambda: all(map(gone, left)))  # once whoever inherits them has looked


def test_a_replacement_joins_the_survivors(pki: Pki, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(STORE + ELASTIC)
    options = ("-n", "2", "--max-restarts", "1", "--program", "torch")
    done = run(tmp_path, pki, sys.executable, "job.py", "exit", options=options)
    assert done.returncode == 0, done.stdout + done.stderr
    generations = {int(number) for number in re.findall(r"rank \d of 2 in (\d+) local", done.stdout)}
    assert len(generations) == 2, done.stdout


REBUILDING = """
import signal
from muster.programs.generations import on_new_generation

def train(generation):
    print("pid", os.getpid(), "rank", generation.rank, "of", generation.world_size, flush=True)
    if generation.number > 1:
        return "trained"
    if RANK == 0 and "asked" in sys.argv:  # its agent, and while the generation stands
        os.kill(os.getppid(), signal.SIGTERM)
    store.meet() if store.add(b"again") < SIZE else store.say(1, b"both", b"1")
    store.wait(b"both")
    if RANK == 1 and "dies" in sys.argv:
        time.sleep(0.5)  # as a process that dies takes to be torn down
        os._exit(4)
    if RANK == 1:
        raise ValueError("its own fault")
    if "dies" in sys.argv:
        raise OSError("connection reset by peer")
    store.wait(b"never")

print("returned", on_new_generation(train), flush=True)
"""


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_program_that_asks_for_it_goes_on_in_the_same_process(pki: Pki, tmp_path: Path, how: str) -> None:
    (tmp_path / "job.py").write_text(STORE.replace("SystemExit", "OSError") + REBUILDING)
    options = ("-n", "3", "--min-workers", "2")
    done = run(tmp_path, pki, sys.executable, "job.py", how, options=options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("returned trained") == 2
    assert ("ValueError: its own fault" in done.stdout) is (how == "raises")  # shown by whose fault it was
    assert f"worker 1 exited with code {1 if how == 'raises' else 4}; going on with 2" in done.stderr
    pids = re.findall(r"pid (\d+) rank \d of 3", done.stdout)
    again = re.findall(r"pid (\d+) rank \d of 2", done.stdout)
    assert len(set(pids)) == 3
    assert len(again) == 2
    assert set(again) < set(pids)


@pytest.mark.system
@pytest.mark.parametrize("when", ["afterwards", "asked"])
def test_a_program_that_waits_for_the_next_generation_ends_when_it_is_asked_to(
    pki: Pki, tmp_path: Path, when: str
) -> None:
    (tmp_path / "job.py").write_text(STORE.replace("SystemExit", "OSError") + REBUILDING)
    done = run(tmp_path, pki, sys.executable, "job.py", "dies", when, options=("-n", "2"))
    assert done.returncode == 4, done.stdout + done.stderr
    assert "worker 0 left as it was asked to" in done.stderr


ELASTIC_TORCH = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import muster.torch

kind, steps = sys.argv[1], 6
torch.manual_seed(0)
kept = torch.nn.Linear(8, 8)


def train(generation):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = kept if kind == "ddp" else torch.nn.Linear(8, 8)
    if kind == "ddp":  # a newcomer takes what rank 0 has
        place = torch.zeros(1, dtype=torch.int64) + train.step
        dist.all_reduce(place, dist.ReduceOp.MAX)
        source = torch.tensor([dist.get_rank() if train.step == int(place) else 99])
        dist.all_reduce(source, dist.ReduceOp.MIN)
        for parameter in net.parameters():
            dist.broadcast(parameter.data, int(source))
        model = DistributedDataParallel(net)
    else:
        model = fully_shard(net)
        place = torch.zeros(1, dtype=torch.int64)
        if os.path.exists("checkpoint/.metadata"):
            state = {"net": net.state_dict(), "place": place}
            dcp.load(state, checkpoint_id="checkpoint")
            net.load_state_dict(state["net"])
    begun = int(place)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(begun, steps):
        optimizer.zero_grad()
        model(torch.full((2, 8), float(step + 1))).square().mean().backward()
        optimizer.step()
        train.step = step + 1
        if kind == "fsdp2":
            state = {"net": net.state_dict(), "place": torch.tensor([step + 1])}
            dcp.save(state, checkpoint_id="checkpoint")
        if generation.number == 1 and step == 2:
            dist.barrier()
            if generation.rank == 1:
                os._exit(4)
            dist.barrier()
    total = sum(p.full_tensor().sum() if kind == "fsdp2" else p.sum() for p in net.parameters())
    return f"{kind} rank {generation.rank} of {generation.world_size} from {begun}: {total.item():.6f}"


train.step = 0
print(muster.torch.on_new_generation(train), flush=True)
"""


@pytest.mark.system
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_groups_are_built_again_in_the_same_process_and_a_spare_takes_the_place(
    pki: Pki, tmp_path: Path, kind: str
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "job.py").write_text(ELASTIC_TORCH)
    sizes = {"MS_WORKER_NUM": "2", "MS_WORKER_MIN": "2"}
    with scheduler(MS_SPARES="1", **sizes, **pki.env()) as served:
        env = environment(
            MS_ROLE="MS_WORKER", MS_SCHED_PORT=str(served.port), OMP_NUM_THREADS="1", **sizes, **pki.env()
        )
        command = [sys.executable, "-m", "muster.programs.agent", "--", sys.executable, "job.py", kind]
        agents = [
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env={**env, "MS_NODE_ID": node, "MS_WORKER_SPARE": spare},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node, spare in (("node0", "0"), ("node1", "0"), ("node2", "1"))
        ]
        try:
            outputs = [agent.communicate(timeout=300)[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
        assert [agent.returncode for agent in agents] == [0, 4, 0], "\n".join(outputs)
        assert served.wait() == 0
    found = re.findall(rf"{kind} rank (\d) of 2 from (\d): (\S+)", outputs[0] + outputs[2])
    assert [each[:2] for each in found] == [("0", "3"), ("1", "3")]
    assert len({each[2] for each in found}) == 1


COUNTING = """
for _ in range(100):
    store.add(b"count")
    time.sleep(0.02)
store.say(1, b"done/%d" % RANK, b"1")
for rank in range(SIZE):
    store.wait(b"done/%d" % rank)
print("counted", store.add(b"count"), flush=True)
"""


@pytest.mark.system
@pytest.mark.parametrize("next_host", ["127.0.0.1", "127.0.0.2"])
def test_a_scheduler_that_is_killed_and_started_again_has_each_change_once(
    pki: Pki, tmp_path: Path, next_host: str
) -> None:
    """Where a change was just on its way, the generation ends instead, and the next one counts again.

    The next one may be another of several schedulers, which listens elsewhere.
    """
    (tmp_path / "job.py").write_text(STORE + COUNTING)
    kept = {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(tmp_path / "journal"), **pki.env()}
    with scheduler(**kept) as first:
        join = ",".join(dict.fromkeys((first.target, f"{next_host}:{first.port}")))
        launch = [sys.executable, "-m", "muster", "run", "-n", "2", "--join", join, "--tail", "all"]
        launcher = subprocess.Popen(
            [*launch, "--program", "torch", "--", sys.executable, "job.py"],
            cwd=tmp_path,
            env=environment(**pki.env()),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert launcher.stdout is not None
        lines = []
        for line in launcher.stdout:
            lines.append(line)
            if "rank" in line and "local" in line:
                break  # it counts
        first.signal(signal.SIGKILL)
        first.wait()
    with scheduler(port=str(first.port), MS_SCHED_HOST=next_host, **kept) as second:
        output = "".join([*lines, launcher.communicate(timeout=100)[0]])
        assert launcher.returncode == 0, output + second.log
    assert sorted(re.findall(r"counted (\d+)", output)) == ["201", "202"], output


# ---------------------------------------------------------------- with torch

PROGRAM = str(ROOT / "tests" / "end_to_end" / "torch_program.py")


def said(output: str) -> list[str]:
    return sorted(re.findall(r"said \d .*", output))


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.parametrize("gloo", ["", "muster"])
def test_ddp_fsdp2_dtensor_and_checkpoints_compute_what_they_do_under_torchrun(
    pki: Pki, tmp_path: Path, gloo: str
) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--log-dir", str(tmp_path / "logs"), "--redirects", "3"]  # in one pipe lines would mix
    subprocess.run(
        [*command, PROGRAM, str(tmp_path / "theirs")],
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        timeout=200,
        check=True,
    )
    theirs = "\n".join(path.read_text() for path in (tmp_path / "logs").rglob("stdout.log"))
    ours = (sys.executable, PROGRAM, str(tmp_path / "ours"), "spawn")
    muster = run(tmp_path, pki, *ours, options=("-n", "2"), timeout_s=200, MS_TORCH_GLOO=gloo)
    assert muster.returncode == 0, muster.stdout + muster.stderr
    lines = said(muster.stdout)
    assert [line for line in lines if "spawned" not in line] == said(theirs)
    assert (
        len([line for line in lines if "ddp" in line])
        == len([line for line in lines if "fsdp2" in line])
        == 10
    )
    assert [line for line in lines if "spawned" in line] == [f"said {rank} spawned 10.0" for rank in range(4)]
    listening = dict(re.findall(r"listens (\d)(.*)", muster.stdout))
    assert sorted(listening) == ["0", "1"]
    assert not [each for each in listening.values() if "*:" in each or "[::]" in each]  # as a TCPStore does
    assert "said 0 checkpoint True" in lines
    assert muster.stdout.count("group GroupNamedGloo") == (2 if gloo else 0)
    assert ("CPU, torch, scheduler and gloo encrypted" in muster.stderr) is bool(gloo)


@pytest.mark.system
@pytest.mark.timeout(300)
def test_gloo_finds_no_network_where_its_groups_were_to_be_encrypted(pki: Pki, tmp_path: Path) -> None:
    """Without the plug-in for torch they would be Gloo's own, in plain text."""
    pytest.importorskip("torch")
    (tmp_path / "job.py").write_text("import torch.distributed as d\nd.init_process_group('gloo')\n")
    env = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "MS_TORCH_GLOO": "muster"}
    done = run(tmp_path, pki, sys.executable, "job.py", options=("-n", "2"), timeout_s=200, **env)
    assert done.returncode != 0
    assert "only-by-muster" in done.stdout + done.stderr
    wrong = run(tmp_path, pki, sys.executable, "job.py", options=("-n", "1"), MS_TORCH_GLOO="plain")
    assert wrong.returncode != 0
    assert "MS_TORCH_GLOO is 'plain'; legal is 'muster'" in wrong.stdout + wrong.stderr


@pytest.mark.system
@pytest.mark.timeout(300)
def test_with_the_plug_in_off_no_store_is_opened_and_the_program_runs(pki: Pki, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "job.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo'); dist.barrier()\n"
        "print('store', dist.distributed_c10d._get_default_store().underlying_store, flush=True)\n"
        "assert 'MUSTER_STORE' in __import__('os').environ\n"
    )
    env = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = run(tmp_path, pki, sys.executable, "job.py", options=("-n", "2"), timeout_s=200, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    # Who opens a TCPStore of its own at the address that it finds does not get one: the port is taken.
    script.write_text(
        "import os, torch.distributed as dist\n"
        "os.environ['TORCHELASTIC_USE_AGENT_STORE'] = 'False'\n"
        "dist.init_process_group('gloo')\n"
    )
    done = run(tmp_path, pki, sys.executable, "job.py", options=("-n", "1"), timeout_s=200, **env)
    assert done.returncode != 0
    assert "EADDRINUSE" in done.stdout


@pytest.mark.system
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_what_one_rank_writes_to_the_store_others_read_after_a_barrier(pki: Pki, tmp_path: Path) -> None:
    """Beside processes that want the processors too."""
    pytest.importorskip("torch")
    program = ROOT / "tests" / "end_to_end" / "torch_store_reads.py"
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        done = run(tmp_path, pki, sys.executable, str(program), "100", options=("-n", "2"), timeout_s=200)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"rank 1: (.*)", done.stdout)
    assert found == [f"{name}: 0 of 100 stale" for name in ("set", "append", "multi_set")]


TORCHRUN = """
import os, pathlib, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
first = pathlib.Path("first-" + os.environ["RANK"])
begun = not first.exists()
first.touch()
# One write for the line: torchrun's Python is unbuffered, and processes that share a pipe would mix pieces.
os.write(1, f"rank {dist.get_rank()} sum {int(total)} {'first' if begun else 'again'}\\n".encode())
if begun:
    dist.barrier()
    sys.exit(7) if os.environ["RANK"] == "1" else time.sleep(300)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.system
@pytest.mark.timeout(300)
def test_torchrun_s_agents_meet_over_muster_and_start_their_workers_again(pki: Pki, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "job.py").write_text(TORCHRUN)
    with scheduler(MS_WORKER_NUM="4", MS_WORKER_MIN="2", MS_TOPO_TIMEOUT="600", **pki.env()) as served:
        where = [f"--rdzv-endpoint=127.0.0.1:{served.port}", "--rdzv-id=default", "--rdzv-backend=muster"]
        where += ["--rdzv-conf=last_call_timeout=3"]  # two of four are enough then
        options = [*where, "--nnodes=2:4", "--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.1"]
        agents = [
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options, "job.py"],
                cwd=tmp_path,
                env=environment(**pki.env(), OMP_NUM_THREADS="1"),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for _ in range(2)
        ]
        try:
            outputs = [agent.communicate(timeout=200)[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
        assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
        lines = sorted(re.findall(r"rank \d sum \d \w+", "\n".join(outputs)))
        assert lines == sorted(
            f"rank {rank} sum 4 {when}" for rank in range(4) for when in ("first", "again")
        )
        assert served.wait() == 0  # both agents have finished
