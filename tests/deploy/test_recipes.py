"""deploy/README.md from nothing to a job that has trained: its commands, as they stand there.

The managers themselves (systemd, Docker, the kubelet, Slurm) are not here. What they would do with a unit or
a manifest is done by hand: mounts, user, environment and command are those of the file.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.machines import WAIT_S, Machine, as_user, block, can_make_machines, end, section
from tests.deploy.test_deploy import DEPLOY, named, unit
from tests.launch.launching import free_port

pytestmark = [
    pytest.mark.system,  # half a minute of a core
    pytest.mark.skipif(not can_make_machines(), reason="needs root, mounts and unshare"),
]

Make = Callable[..., Machine]
Process = subprocess.Popen[str]
COMMON = {"config.json", "ca.crt", "crl.pem"}
LOADS = """
import os, sys
from muster.certs.config import load_config
from muster.certs.runtime.store import load_configured
config = load_config(os.environ["MS_CONFIG_FILE"])
print(load_configured(config, sys.argv[1], os.environ, prompt=None).identity.uri())
"""
# Other hosts are directories of this one.
SSH = 'mkdir -p "/srv/hosts/$1" && cd "/srv/hosts/$1" && "${@:2}"'
SCP = 'target=${!#} && [ "$1" = -p ] && cp -p "${@:2:$#-2}" "/srv/hosts/${target/://}"'


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def machine(*names: str) -> Machine:
            made = Machine(tmp_path / "machine", *names)
            stack.callback(made.close)
            made.program("ssh", SSH)
            made.program("scp", SCP)
            return made

        yield machine


def make_certificates(machine: Machine, hosts: str) -> None:
    machine.shell(block("Certificates", "certs init"), cwd="/srv", hosts=hosts)


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def ended(*processes: Process) -> list[str]:
    """What processes have said that end by themselves, and well."""
    told = [process.communicate(timeout=WAIT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(told)
    return told


# ---------------------------------------------------------------- systemd

SYSTEMD = "systemd: your own machines"
UNITS = {"scheduler": "muster-scheduler.service", "worker": "muster-worker@.service"}


def start_unit(
    role: str, machine: Machine, *more: str, command: tuple[str, ...] = (), user: str = "", instance: str = ""
) -> Process:
    """What systemd does with a unit: its directories, credentials, environment and user, and its command."""
    settings = unit(UNITS[role])
    etc = machine.directory / "etc"
    [own_user] = settings["User"]
    owner = int(re.findall(rf"^{own_user}:[^:]*:(\d+):", (etc / "passwd").read_text(), re.M)[0])
    for key, place in (("StateDirectory", "var/lib"), ("LogsDirectory", "var/log")):
        for name in settings.get(key, []):
            (machine.directory / place / name).mkdir(mode=0o700, exist_ok=True)
            shutil.chown(machine.directory / place / name, owner, owner)
    credentials = machine.directory / f"credentials-{role}"
    credentials.mkdir(exist_ok=True)
    for line in settings["LoadCredential"]:
        name, source = line.split(":")
        shutil.copy(machine.directory / source.lstrip("/"), credentials / name)
        (credentials / name).chmod(0o400)
        shutil.chown(credentials / name, owner)
    env = {"HOME": "/var/lib/muster"}
    for file in settings["EnvironmentFile"]:
        lines = (machine.directory / file.lstrip("/")).read_text().splitlines()
        env |= dict(line.split("=", 1) for line in lines)
    for line in settings["Environment"]:
        line = line.replace("%d", "/credentials").replace("%i", instance)
        env |= dict(word.split("=", 1) for word in line.split())
    words = settings["ExecStart"][0].replace("/opt/muster/.venv/bin/python", "python").split()
    return machine.start(
        *(command or words),
        *more,
        user=as_user(user or own_user),
        env=env,
        mounts={"/credentials": credentials},
        cwd="/" if user else settings["WorkingDirectory"][0],
    )


@pytest.fixture
def installed(make: Make) -> Machine:
    """Both hosts of the chapter in one, after all of its commands."""
    machine = make("scheduler.example.org")
    for name in ("systemctl", "journalctl"):
        machine.program(name, "exit 0")
    make_certificates(machine, "scheduler.example.org")
    machine.shell(block(SYSTEMD, "scp -p"), cwd="/srv")
    lines = block(SYSTEMD, "systemd-sysusers").splitlines()
    machine.shell("\n".join(line for line in lines if ".venv" not in line), cwd="/srv")
    port = str(free_port("127.0.0.1"))
    for host, role in (("scheduler", "scheduler"), ("node1", "worker")):
        text = (
            block(SYSTEMD, f"/etc/muster/{role}.env")
            .replace("6667", port)
            .replace("WORKER_NUM=8", "WORKER_NUM=2")
        )
        machine.shell(text, cwd=f"/srv/hosts/root@{host}.example.org/muster")
    return machine


def test_systemd_each_host_gets_what_its_role_needs_and_nothing_else(installed: Machine) -> None:
    for host, own in (("scheduler", "server"), ("node1", "client")):
        copied = installed.directory / f"srv/hosts/root@{host}.example.org/muster"
        assert contents(copied) == COMMON | {f"{own}.p12", f"{own}-password"}
    etc = installed.directory / "etc/muster"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (etc, *etc.iterdir())}
    assert modes["muster"] == 0o750
    assert modes["server-password"] == modes["client-password"] == 0o600
    assert {modes[name] for name in (*COMMON, "server.p12", "client.p12")} == {0o640}


@pytest.mark.parametrize("role", UNITS)
def test_systemd_the_units_user_can_load_the_files_and_others_cannot(installed: Machine, role: str) -> None:
    loads = ("python", "-c", LOADS, role)
    assert ended(start_unit(role, installed, command=loads)) == [f"muster://default/{role}\n"]
    stranger = start_unit(role, installed, command=loads, user="nobody")
    assert "Permission denied" in stranger.communicate(timeout=WAIT_S)[0]


def test_systemd_renewed_certificates_are_installed_and_open_with_the_old_passwords(
    installed: Machine,
) -> None:
    before = {
        name: (installed.directory / "etc/muster" / name).read_bytes()
        for name in ("server.p12", "client.p12")
    }
    installed.shell(block("Certificates", "certs renew"), cwd="/srv")
    installed.shell(block(SYSTEMD, "scp -p"), cwd="/srv")
    for host, role, file in (("scheduler", "scheduler", "server.p12"), ("node1", "worker", "client.p12")):
        first = block(SYSTEMD, f"/etc/muster/{role}.env").splitlines()[0]
        installed.shell(first, cwd=f"/srv/hosts/root@{host}.example.org/muster")
        assert (installed.directory / "etc/muster" / file).read_bytes() != before[file]
        loads = ("python", "-c", LOADS, role)
        assert ended(start_unit(role, installed, command=loads)) == [f"muster://default/{role}\n"]


def test_systemd_the_units_train(installed: Machine) -> None:
    scheduler = start_unit("scheduler", installed)
    try:
        numbers = ("0", "1")
        told = ended(*[start_unit("worker", installed, "--epochs", "1", instance=each) for each in numbers])
    finally:
        [log] = end(scheduler)
    assert "test accuracy" in "".join(told), log
    assert contents(installed.directory / "var/lib/muster/checkpoints")
    assert (installed.directory / "var/log/muster/audit.jsonl").read_text().count('"joined"') == 2


# ---------------------------------------------------------------- Docker Compose


class Containers:
    """The services of compose.yaml, each with its own mounts, user and environment."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        text = (DEPLOY / "docker" / "compose.yaml").read_text().replace("6667", str(free_port("127.0.0.1")))
        self.services: dict[str, Any] = yaml.safe_load(text)["services"]

    def volume(self, name: str) -> Path:
        path = self.machine.directory / "volumes" / name
        if not path.exists():
            path.mkdir(parents=True)
            if name == "journal":  # a new volume takes over the owner of the image's directory
                shutil.chown(path, 10001, 10001)
        return path

    def start(self, name: str, *command: str, more: tuple[str, ...] = ()) -> Process:
        service = self.services[name]
        scratch = self.machine.directory / "scratch"
        scratch.mkdir(exist_ok=True)
        scratch.chmod(0o1777)
        mounts = {one.split(":")[1]: self.volume(one.split(":")[0]) for one in service["volumes"]}
        kept = [each.lower() for each in service.get("cap_add", [])]
        return self.machine.start(
            *[each.replace("$$", "$") for each in command or service["command"]],
            *more,
            user=as_user(service.get("user", "10001").partition(":")[0], *kept),
            env=service["environment"],
            mounts={"/tmp": scratch, **mounts},
            cwd=service.get("working_dir", "/opt/muster"),
        )


@pytest.fixture
def containers(make: Make) -> Containers:
    return Containers(make("scheduler"))


def test_compose_only_its_own_service_mounts_the_authority(containers: Containers) -> None:
    ended(containers.start("certificates"))
    authority = containers.volume("authority")
    assert len({(authority / f"{name}-password").read_text() for name in ("ca", "server", "client")}) == 3
    for role, own in (("scheduler", "server"), ("worker", "client")):
        assert not [one for one in containers.services[role]["volumes"] if one.startswith("authority:")]
        folder = containers.volume(f"{role}-certificates")
        assert contents(folder) == COMMON | {f"{own}.p12", f"{own}-password"}
        found = [path.stat() for path in folder.iterdir()]
        assert {(stat.S_IMODE(each.st_mode), each.st_uid) for each in found} == {(0o400, 10001)}


def test_compose_trains_and_revokes(containers: Containers) -> None:
    ended(containers.start("certificates"))
    scheduler = containers.start("scheduler")
    workers = [containers.start("worker", more=("--epochs", "1")) for _ in range(2)]
    assert "test accuracy" in "".join(ended(*workers, scheduler))
    # What runs must find no file missing, and install takes the old one away before it writes the new.
    missing = '[ ! -e "${!#}/config.json" ] || exit 1; exec /usr/bin/install "$@"'
    containers.machine.program("install", missing)
    commands = block("Docker Compose: one machine, CPU", "certs revoke").replace("\\\n", " ").splitlines()
    documented = "docker compose -f deploy/docker/compose.yaml run --rm certificates"
    for line in commands:
        assert line.startswith(documented)
        ended(containers.start("certificates", *shlex.split(line.removeprefix(documented))))
    refused = containers.start("worker", "python", "-c", LOADS, "worker")
    assert "was revoked by" in refused.communicate(timeout=WAIT_S)[0]


# ---------------------------------------------------------------- Kubernetes

# Keeps Secrets and ConfigMaps as folders.
KUBECTL = r"""
import base64, re, sys
from pathlib import Path
words, store = sys.argv[1:], Path("/srv/cluster")
if "create" in words:
    name = words[words.index("generic" if "secret" in words else "configmap") + 1]
    (store / name).mkdir(parents=True)
    for word in words:
        if word.startswith("--from-file="):
            key, path = word.removeprefix("--from-file=").split("=")
            (store / name / key).write_bytes(Path(path).read_bytes())
elif "get" in words:
    [key] = re.findall(r"=[{]\.data\.(.*)[}]$", words[-1])
    data = (store / words[words.index("secret") + 1] / key.replace("\\.", ".")).read_bytes()
    sys.stdout.write(base64.b64encode(data).decode())
"""
# As cert-manager fills them: beside the keystore lies the private key, without a password.
CERT_MANAGER = """
new="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout tls.key"
mkdir muster-ca
cd muster-ca
ca=$PWD
openssl req -x509 $new -out tls.crt -subj "/CN=muster CA" -addext keyUsage=critical,keyCertSign,cRLSign
for role in scheduler worker; do
  mkdir ../muster-$role-tls
  cd ../muster-$role-tls
  openssl req $new -out request -subj /
  echo "subjectAltName=URI:muster://default/$role,DNS:muster-scheduler.muster.svc,IP:127.0.0.1" > names
  printf "%s\n" extendedKeyUsage=serverAuth,clientAuth keyUsage=digitalSignature >> names
  openssl x509 -req -in request -CA $ca/tls.crt -CAkey $ca/tls.key -extfile names -out tls.crt
  openssl pkcs12 -export -inkey tls.key -in tls.crt -out keystore.p12 \\
    -passout "pass:$(cat ../muster-$role-password/password)"
  cp $ca/tls.crt ca.crt
  rm request names
done
"""
PODS = {"scheduler": ("Deployment", "muster-scheduler"), "worker": ("Job", "muster-workers")}


class Pods:
    """The pods of the manifests, as the kubelet starts them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.store = machine.directory / "srv" / "cluster"
        self.port = str(free_port("127.0.0.1"))
        machine.program("kubectl", f'exec python -c {shlex.quote(KUBECTL)} "$@"')
        (self.store / "muster-security").mkdir(parents=True)
        config = named("ConfigMap", "muster-security")["data"]["config.json"]
        (self.store / "muster-security" / "config.json").write_text(config)

    def secrets_by_hand(self) -> None:
        make_certificates(self.machine, "muster-scheduler.muster.svc")
        self.machine.shell(block("Kubernetes", "for pair in"), cwd="/srv")

    def secrets_by_cert_manager(self) -> None:
        [passwords] = re.findall(r"^for role in.*?^done", block("Kubernetes", "for role in"), re.M | re.S)
        self.machine.shell(passwords, cwd="/srv")
        self.machine.shell(CERT_MANAGER, cwd="/srv/cluster")

    def mounted(self, role: str, index: int = 0) -> Path:
        return self.machine.directory / "mounts" / f"{role}-{index}"

    def start(self, role: str, *command: str, more: tuple[str, ...] = (), index: int = 0) -> Process:
        pod = named(*PODS[role])["spec"]["template"]["spec"]
        [container] = pod["containers"]
        mounted = self.mounted(role, index)
        for volume in pod["volumes"]:
            self.fill(volume, mounted / volume["name"], pod["securityContext"]["fsGroup"])
        env = dict(named("ConfigMap", "muster-job")["data"])
        env |= {one["name"]: one.get("value", "127.0.0.1") for one in container["env"]}
        env |= {"MS_SCHED_PORT": self.port, "MS_METRICS_PORT": "", "JOB_COMPLETION_INDEX": str(index)}
        mounts = {one["mountPath"]: mounted / one["name"] for one in container["volumeMounts"]}
        user = as_user(str(pod["securityContext"]["runAsUser"]))
        return self.machine.start(
            *(command or container["command"] + container.get("args", [])),
            *more,
            user=user,
            env=env,
            mounts=mounts,
        )

    def fill(self, volume: dict[str, Any], target: Path, group: int) -> None:
        """Makes the folder of a volume, as the kubelet does."""
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        source = volume.get("secret") or volume.get("configMap")
        if source is None:
            target.chmod(0o777)
            return
        found = self.store / (source.get("secretName") or source["name"])
        if not found.exists():
            assert source.get("optional"), volume
            return
        for item in source.get("items") or [{"key": key, "path": key} for key in contents(found)]:
            shutil.copyfile(found / item["key"], target / item["path"])
            shutil.chown(target / item["path"], 0, group)
            (target / item["path"]).chmod(source.get("defaultMode", 0o644))


@pytest.fixture
def pods(make: Make) -> Pods:
    return Pods(make("muster-scheduler.muster.svc"))


@pytest.mark.parametrize("source", ["secrets_by_hand", "secrets_by_cert_manager"])
def test_kubernetes_pods_load_what_they_mount_and_mount_no_bare_key(pods: Pods, source: str) -> None:
    getattr(pods, source)()
    for role in PODS:
        assert ended(pods.start(role, "python", "-c", LOADS, role)) == [f"muster://default/{role}\n"]
        assert contents(pods.mounted(role) / "tls") == {"keystore.p12", "ca.crt"}
        files = [path for path in pods.mounted(role).rglob("*") if path.is_file()]
        assert [path for path in files if b"PRIVATE KEY" in path.read_bytes()] == []


def test_kubernetes_a_published_list_revokes_once_crl_path_names_it(pods: Pods) -> None:
    pods.secrets_by_cert_manager()
    pods.machine.shell(block("Kubernetes", "openssl pkcs8"), cwd="/srv")
    serial = pods.machine.shell("openssl x509 -noout -serial < muster-worker-tls/tls.crt", cwd="/srv/cluster")
    publish = block("Kubernetes", "create configmap").replace("#", f"--serial {serial.strip()[7:]} #", 1)
    pods.machine.shell(publish, cwd="/srv")
    loads = ("python", "-c", LOADS)
    ended(pods.start("worker", *loads, "worker"))  # off so far, as the chapter says
    config = pods.store / "muster-security" / "config.json"
    [value] = re.findall(r'`crl_path` in `config.yaml` says `"(.*?)"`', section("Kubernetes"))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"crl_path": value}))
    assert "was revoked by" in pods.start("worker", *loads, "worker").communicate(timeout=WAIT_S)[0]
    ended(pods.start("scheduler", *loads, "scheduler"))


def test_kubernetes_the_pods_train(pods: Pods) -> None:
    pods.secrets_by_hand()
    scheduler = pods.start("scheduler")
    try:
        told = ended(*[pods.start("worker", more=("--epochs", "1"), index=index) for index in range(4)])
    finally:
        [log] = end(scheduler)
    assert "test accuracy" in told[0], log


def test_kubernetes_a_worker_that_is_asked_to_leave_says_goodbye_and_is_not_done(pods: Pods) -> None:
    pods.secrets_by_hand()
    scheduler, worker = pods.start("scheduler"), pods.start("worker")
    try:
        assert worker.stdout is not None
        heard = [next(line for line in worker.stdout if "1 of 4 workers is in" in line)]
        heard += end(worker)
    finally:
        [log] = end(scheduler)
    assert worker.returncode == 128 + signal.SIGTERM, heard
    assert re.search(r"Node 0 on host \S+ left: asked to leave", log), log


# ---------------------------------------------------------------- Slurm

SRUN = """
while [ "${1#-}" != "$1" ]; do shift; done
export SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_NTASKS
for ((i = 1; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & done
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" && wait
"""
# In a network of its own, because the job's number decides on the port.
SBATCH = """
export SLURM_JOB_ID=77 SLURMD_NODENAME=node1 SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=1
exec unshare --net sh -c 'ip link set lo up && exec bash "$@"' sbatch "$@"
"""


@pytest.mark.parametrize("wildcard", [False, True], ids=["names", "wildcard"])
def test_slurm_from_nothing_to_a_job(make: Make, wildcard: bool) -> None:
    [domain] = re.findall(r"export MUSTER_DOMAIN=(\S+)`", section("Slurm"))
    assert f"hosts='*.{domain}'" in section("Slurm")
    machine = make("node1", f"node1.{domain}")
    for name, text in (("srun", SRUN), ("sbatch", SBATCH)):
        machine.program(name, text)
    machine.program("sinfo", "printf '%s\\n' node2 node1 node2")
    hosts = machine.shell(f"{block('Slurm', 'hosts=')} printf %s $hosts", cwd="/srv")
    assert hosts == "node1,node2"
    make_certificates(machine, f"*.{domain}" if wildcard else hosts)
    machine.shell(block("Slurm", "scp -p"), cwd="/srv")
    login = machine.directory / "srv/hosts/login.example.org"
    passwords = {"server-password", "client-password"}
    assert contents(login / "pki") == COMMON | {"server.p12", "client.p12"} | passwords
    submit = block("Slurm", "sbatch").replace("deploy/", "/opt/muster/deploy/")
    submit = submit.replace("train.py --epochs 10", "/opt/muster/train.py --epochs 1").rstrip()
    home = "/srv/hosts/login.example.org"
    env = {"HOME": home, "MS_TOPO_TIMEOUT": "40", "SPARE_NODES": "0"} | (
        {"MUSTER_DOMAIN": domain} if wildcard else {}
    )
    told = machine.shell(f"{submit} || {{ cat scheduler-77.log; false; }}", cwd=home, **env)
    assert "test accuracy" in told
    assert "has completed the training" in (login / "scheduler-77.log").read_text()
