"""``muster run --encrypt-nccl``: what programs find, and what workers are refused for. Needs no GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from muster.communicators.nccl import library
from tests.communicators.nccl.stand_in_plugin import build_stand_in, needs_compiler
from tests.end_to_end.test_torch_programs import STORE
from tests.scheduler.processes import Pki, environment, scheduler

SEES = """
import hashlib

def sees(generation):
    descriptor = int(os.environ["MS_NCCL_SECRET_FD"])
    record = os.pread(descriptor, 100, 0)
    magic, number, secret = struct.unpack("<8sQ32s", record)
    assert magic == b"MSNCCLK1" and number == generation, (magic, number, generation)
    everywhere = open("/proc/self/environ", "rb").read() + open(f"/proc/{os.getppid()}/environ", "rb").read()
    assert secret not in everywhere and secret.hex().encode() not in everywhere
    with open(os.environ["SECRETS"], "a") as file:
        file.write(secret.hex() + "\\n")
    held = os.listdir("/proc/self/fd")
    names = [os.readlink(f"/proc/self/fd/{each}") for each in held if os.path.islink(f"/proc/self/fd/{each}")]
    nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    assert os.path.isfile(nccl.pop("NCCL_NET_PLUGIN"))
    print("secret of", number, hashlib.sha256(secret).hexdigest()[:16], "held",
          sum("muster-nccl" in name for name in names), nccl, flush=True)
"""

ONCE = """
sees(GENERATION)
"""

ON = """
from muster.programs.generations import on_new_generation

def train(generation):
    sees(generation.number)
    if generation.number > 1:
        return "trained"
    store.meet() if store.add(b"again") < SIZE else store.say(1, b"both", b"1")
    store.wait(b"both")
    if RANK == 1:
        raise ValueError("its own fault")
    store.wait(b"never")

print("returned", on_new_generation(train), flush=True)
"""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A user's cache with a built plug-in; one that lies beside Muster goes before it."""
    folder = tmp_path_factory.mktemp("cache")
    target = library.places({"XDG_CACHE_HOME": str(folder)})[-1]
    target.parent.mkdir(parents=True)
    build_stand_in(target)
    return str(folder)


def run(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs ``muster run --scheduler`` to its end."""
    command = [sys.executable, "-m", "muster", "run", "--scheduler", "--tail", "all", *words]
    full = environment(SECRETS=str(folder / "secrets"), **env)
    return subprocess.run(
        command, cwd=folder, env=full, capture_output=True, text=True, timeout=200, check=False
    )


def secrets_of(folder: Path) -> set[str]:
    return set((folder / "secrets").read_text().split())


@needs_compiler
def test_programs_get_their_generation_s_secret_and_nothing_else_has_it(
    pki: Pki, cache: str, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(STORE + SEES + ONCE)
    words = ("-n", "2", "--program", "torch", "--encrypt-nccl", "--", sys.executable, "job.py")
    done = run(tmp_path, *words, **pki.env(), XDG_CACHE_HOME=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch, scheduler and nccl between hosts encrypted, gloo's own traffic NOT" in done.stderr
    said = set(re.findall(r"secret of 1 (\w+) held 1 (\{.*\})", done.stdout))
    [(_, nccl)] = said  # both ranks say the same
    assert "'NCCL_NET': 'MusterSealed'" in nccl and "'NCCL_MNNVL_ENABLE': '0'" in nccl
    [secret] = secrets_of(tmp_path)
    for path in (tmp_path / "muster-runs").rglob("*"):
        if path.is_file():
            assert bytes.fromhex(secret) not in path.read_bytes() and secret not in path.read_text(
                errors="replace"
            )


@needs_compiler
def test_a_program_that_lives_on_gets_the_next_secret_in_place_of_the_last(
    pki: Pki, cache: str, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(STORE.replace("SystemExit", "OSError") + SEES + ON)
    words = ("-n", "3", "--min-workers", "2", "--program", "torch", "--encrypt-nccl=prefer", "--")
    done = run(tmp_path, *words, sys.executable, "job.py", **pki.env(), XDG_CACHE_HOME=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("returned trained") == 2
    found = re.findall(r"secret of (\d+) (\w+) held (\d)", done.stdout)
    assert [each[0] for each in sorted(found)].count("1") == 3 and len(found) == 5
    assert len({digest for _, digest, _ in found}) == 2 == len({number for number, _, _ in found})
    assert {held for _, _, held in found} == {"1"}, "an older secret is still open"
    assert len(secrets_of(tmp_path)) == 2


def test_require_without_certificates_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('started')\n")
    words = ("-n", "2", "--program", "torch", "--encrypt-nccl", "--", sys.executable, "job.py")
    done = run(tmp_path, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "started" not in done.stdout
    assert (
        "MS_NCCL_ENCRYPTION is 'require'. NCCL's traffic cannot be encrypted without certificates"
        in done.stderr
    )


def test_require_beside_a_network_of_the_users_own_starts_nothing(pki: Pki, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('started')\n")
    words = ("-n", "1", "--program", "torch", "--encrypt-nccl", "--", sys.executable, "job.py")
    done = run(tmp_path, *words, **pki.env(), NCCL_IB_HCA="mlx5_0")
    assert done.returncode == 2 and "started" not in done.stdout, done.stdout + done.stderr
    assert "NCCL_IB_HCA is 'mlx5_0': it chooses InfiniBand or RoCE" in done.stderr


UNDER_TORCHRUN = """
import os, pathlib, struct, sys
import torch, torch.distributed as dist

magic, number, secret = struct.unpack("<8sQ32s", os.pread(int(os.environ["MS_NCCL_SECRET_FD"]), 48, 0))
for each in ("/proc/self/environ", f"/proc/{os.getppid()}/environ"):
    assert secret not in open(each, "rb").read()
dist.init_process_group("gloo")
first = pathlib.Path("first-" + os.environ["RANK"])
begun = not first.exists()
first.touch()
os.write(1, f"rank {dist.get_rank()} {magic} {number} {os.environ['NCCL_NET']} {secret.hex()}\\n".encode())
dist.barrier()
if begun:
    sys.exit(7)
dist.destroy_process_group()
"""


@needs_compiler
@pytest.mark.system
@pytest.mark.timeout(300)
def test_workers_of_torchrun_get_the_secret_each_time_that_they_are_started(
    pki: Pki, cache: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "job.py").write_text(UNDER_TORCHRUN)
    with scheduler(MS_WORKER_NUM="1", MS_TOPO_TIMEOUT="600", **pki.env()) as served:
        where = [f"--rdzv-endpoint=127.0.0.1:{served.port}", "--rdzv-id=default", "--rdzv-backend=muster"]
        command = [*where, "--nnodes=1", "--nproc-per-node=2", "--max-restarts=2", "job.py"]
        env = environment(
            **pki.env(), OMP_NUM_THREADS="1", MS_NCCL_ENCRYPTION="require", XDG_CACHE_HOME=cache
        )
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *command],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(re.findall(r"rank (\d) b'MSNCCLK1' 1 MusterSealed (\w{64})", done.stdout))
    assert [rank for rank, _ in lines] == ["0", "0", "1", "1"] and len({secret for _, secret in lines}) == 1


EXCHANGES = """
import ctypes as c, time

lib = c.CDLL(os.environ["NCCL_NET_PLUGIN"])
table = (c.c_void_p * 19).in_dll(lib, "ncclNetPlugin_v8")
NAMES = "init devices properties listen connect accept regMr dmabuf deregMr isend irecv iflush test".split()
LOG = c.CFUNCTYPE(None, c.c_int, c.c_ulong, c.c_char_p, c.c_int, c.c_char_p)(lambda *said: None)
P, I = c.c_void_p, c.c_int
KINDS = {"init": [type(LOG)], "listen": [I, P, P], "connect": [I, P, P, P], "accept": [P, P, P],
         "isend": [P, P, I, I, P, P], "irecv": [P, I, P, P, P, P, P], "test": [P, P, P]}

def call(name, *given):
    code = c.CFUNCTYPE(c.c_int, *KINDS[name])(table[1 + NAMES.index(name)])(*given)
    if code:
        text = c.create_string_buffer(512)
        lib.muster_nccl_reason(text, c.c_size_t(512))
        raise SystemExit(f"{name} answers {code}: {text.value.decode()}")

def until(step, found):
    end = time.monotonic() + 30
    while not found():
        step()
        assert time.monotonic() < end, "it takes too long"

assert c.string_at(table[0]) == os.environ["NCCL_NET"].encode()
call("init", LOG)
size, comm, device, request, done, got = 1 << 20, P(), P(), P(), I(), I()
data = c.create_string_buffer(bytes(range(256)) * 4096 if RANK == 0 else size, size)
if RANK == 1:
    handle, listening = c.create_string_buffer(128), c.c_void_p()
    call("listen", 0, handle, c.byref(listening))
    with open("handle.new", "wb") as file:
        file.write(handle.raw)
    os.rename("handle.new", "handle")
    until(lambda: call("accept", listening, c.byref(comm), c.byref(device)), lambda: comm.value)
    given = (P * 1)(c.addressof(data)), (I * 1)(size), (I * 1)(0), (P * 1)()
    until(lambda: call("irecv", comm, 1, *given, c.byref(request)), lambda: request.value)
else:
    until(lambda: time.sleep(0.01), lambda: os.path.exists("handle"))
    handle = c.create_string_buffer(open("handle", "rb").read(), 128)
    until(lambda: call("connect", 0, handle, c.byref(comm), c.byref(device)), lambda: comm.value)
    until(lambda: call("isend", comm, data, size, 0, None, c.byref(request)), lambda: request.value)
until(lambda: call("test", request, c.byref(done), c.byref(got)), lambda: done.value)
print("rank", RANK, "exchanged", data.raw[:size] == bytes(range(256)) * 4096, flush=True)
store.meet() if store.add(b"late") < SIZE else store.say(1, b"over", b"1")
store.wait(b"over")
"""


@pytest.mark.parametrize("secret", ["their generation's", "none"])
def test_two_programs_exchange_through_the_plug_in_with_what_they_were_handed(
    pki: Pki, tmp_path: Path, secret: str
) -> None:
    """Without NCCL: its table is called as NCCL would. Each worker has derived the secret by itself."""
    lost = 'os.environ.pop("MS_NCCL_SECRET_FD")\n' if secret == "none" else ""
    (tmp_path / "job.py").write_text(STORE + lost + EXCHANGES)
    words = ("-n", "2", "--program", "torch", "--encrypt-nccl", "--", sys.executable, "job.py")
    done = run(tmp_path, *words, **pki.env(), NCCL_SOCKET_IFNAME="lo")
    if secret == "none":
        assert done.returncode != 0 and "init answers" in done.stdout, done.stdout + done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank \d exchanged \w+", done.stdout)) == [
        "rank 0 exchanged True",
        "rank 1 exchanged True",
    ]
