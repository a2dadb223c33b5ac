"""The pods of Kubernetes manifests as processes: each has a network, a host name and mounts of its own.

What the kubelet and the network of a cluster do is done by hand, from what the manifests say: environment,
volumes, user, probes; the Services' names and addresses; the NetworkPolicies.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.kustomize import Object
from tests.deploy.machines import Machine, as_user
from tests.end_to_end.hosts import ip

Process = subprocess.Popen[str]
NODE = "10.77.0.1"
# As root, in the pod's network and with its name as the host's.
_NAMED = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
_GET = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2]))"
_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)"


@dataclass(frozen=True)
class Pod:
    """One pod: its name, address, labels, and what its template says of it."""

    name: str
    address: str
    namespace: str
    labels: dict[str, str]
    template: Object
    index: int | None

    @property
    def container(self) -> Object:
        [container] = self.template["spec"]["containers"]
        return dict(container)

    def port(self, wanted: str | int) -> int:
        """The number of a port that is named or numbered."""
        if isinstance(wanted, int):
            return wanted
        return next(int(one["containerPort"]) for one in self.container["ports"] if one["name"] == wanted)


class Cluster:
    """A node with pods.

    Args:
        machine: the file system of the image.
        objects: what was applied.
        fill: makes the folder of a volume.
    """

    def __init__(
        self, machine: Machine, objects: list[Object], fill: Callable[[Object, Path, int], None]
    ) -> None:
        self.machine, self.objects, self._fill = machine, objects, fill
        self.pods: list[Pod] = []
        self.services: dict[str, str] = {}
        self._prefix = f"mk{os.getpid()}-"
        self._run_namespace("node")
        node = ["ip", "-n", self._prefix + "node"]
        for words in (
            ["link", "add", "br0", "type", "bridge"],
            ["addr", "add", f"{NODE}/24", "dev", "br0"],
            ["link", "set", "br0", "up"],
        ):
            subprocess.run([*node, *words], check=True, capture_output=True)

    def of_kind(self, kind: str) -> list[Object]:
        """All objects of a kind."""
        return [one for one in self.objects if one["kind"] == kind]

    def add(self, name: str, template: Object, index: int | None = None, namespace: str = "muster") -> Pod:
        """Gives a pod its network; it is started later."""
        address = f"10.77.0.{len(self.pods) + 10}"
        pod = Pod(name, address, namespace, template["metadata"]["labels"], template, index)
        self.pods.append(pod)
        self._run_namespace(name)
        node, own, end = self._prefix + "node", self._prefix + name, f"v{len(self.pods)}"
        ip("-n", node, "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", own)
        ip("-n", node, "link", "set", end, "master", "br0", "up")
        ip("-n", own, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", own, "link", "set", "eth0", "up")
        return pod

    def connect(self) -> None:
        """Makes Services and NetworkPolicies of the manifests hold between the pods."""
        rules = ""
        for number, service in enumerate(self.of_kind("Service")):
            address = f"10.77.0.{200 + number}"
            name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
            self.services |= dict.fromkeys((name, f"{name}.{namespace}", f"{name}.{namespace}.svc"), address)
            for pod in self._selected(service["spec"]["selector"], namespace):
                rules += "".join(
                    f"ip daddr {address} tcp dport {one['port']} "
                    f"dnat to {pod.address}:{pod.port(one['targetPort'])}\n"
                    for one in service["spec"]["ports"]
                )
        with (self.machine.directory / "etc" / "hosts").open("a") as hosts:
            hosts.writelines(f"{address} {name}\n" for name, address in self.services.items())
        for pod in self.pods:
            table = (
                "table ip services {\nchain output {\ntype nat hook output priority -100;\n"
                + rules
                + "}\n}\n"
            )
            self._load(pod, table + self._policy(pod))

    def start(self, pod: Pod, *more: str, command: Sequence[str] = ()) -> Process:
        """Starts the container of a pod as its manifest says, or another command in its place."""
        spec, container = pod.template["spec"], pod.container
        folders = self.machine.directory / "mounts" / pod.name
        if not command:
            for volume in spec["volumes"]:
                self._fill(volume, folders / volume["name"], spec["securityContext"]["fsGroup"])
        user = container["securityContext"].get("runAsUser", spec["securityContext"]["runAsUser"])
        return self.machine.start(
            *(command or container["command"] + container.get("args", [])),
            *more,
            user=as_user(str(user)),
            env=self.environment(pod),
            mounts={one["mountPath"]: folders / one["name"] for one in container["volumeMounts"]},
            within=[*self._inside(pod.name), "unshare", "--uts", "sh", "-c", _NAMED, pod.name],
        )

    def environment(self, pod: Pod) -> dict[str, str]:
        """What the kubelet puts into a container's environment."""
        maps = {one["metadata"]["name"]: one["data"] for one in self.of_kind("ConfigMap")}
        fields = {"status.podIP": pod.address, "metadata.name": pod.name}
        env: dict[str, str] = {}
        for source in pod.container.get("envFrom", []):
            env |= maps[source["configMapRef"]["name"]]
        for one in pod.container.get("env", []):
            env[one["name"]] = (
                one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            )
        return env if pod.index is None else env | {"JOB_COMPLETION_INDEX": str(pod.index)}

    def probe(self, pod: Pod, kind: str) -> bool:
        """Asks a probe as often as its manifest allows, and says whether it was answered well."""
        probe = pod.container[kind]
        for attempt in range(probe.get("failureThreshold", 3)):
            if attempt:
                time.sleep(probe["periodSeconds"])  # as the kubelet does
            if self._probed(pod, probe):
                return True
        return False

    def reaches(self, pod: Pod, host: str, port: int) -> bool:
        """Whether a connection from a pod to an address, or to a Service's name, is taken."""
        address = self.services.get(host, host)
        command = [*self._inside(pod.name), sys.executable, "-c", _CONNECT, address, str(port)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        """Takes the networks away; the machine ends the processes."""
        for name in ["node", *[pod.name for pod in self.pods]]:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", self._prefix + name)

    def _run_namespace(self, name: str) -> None:
        ip("netns", "add", self._prefix + name)
        ip("-n", self._prefix + name, "link", "set", "lo", "up")

    def _inside(self, name: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._prefix}{name}"]

    def _selected(self, labels: dict[str, str], namespace: str) -> list[Pod]:
        return [
            pod for pod in self.pods if pod.namespace == namespace and labels.items() <= pod.labels.items()
        ]

    def _policy(self, pod: Pod) -> str:
        """Who may open connections to a pod: nftables' rules; none where no policy selects it."""
        rules, selected = "", False
        for one in self.of_kind("NetworkPolicy"):
            namespace = one["metadata"]["namespace"]
            if pod not in self._selected(one["spec"]["podSelector"]["matchLabels"], namespace):
                continue
            selected = True
            for rule in one["spec"]["ingress"]:
                ports = "".join(f"{each['port']}, " for each in rule.get("ports", []))
                what = f"tcp dport {{ {ports} }}" if ports else ""
                for sender in (each for source in rule["from"] for each in self._senders(source, namespace)):
                    rules += f"ip saddr {sender.address} {what} accept\n"
        if not selected:
            return ""
        # A cluster's network lets the node itself through: the kubelet asks the probes.
        always = f"iif lo accept\nct state established,related accept\nip saddr {NODE} accept\n"
        head = "table inet access {\nchain input {\ntype filter hook input priority 0; policy drop;\n"
        return head + always + rules + "}\n}\n"

    def _senders(self, source: Object, namespace: str) -> list[Pod]:
        if "namespaceSelector" in source:
            wanted = source["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
            return [pod for pod in self.pods if pod.namespace == wanted]
        return self._selected(source["podSelector"]["matchLabels"], namespace)

    def _load(self, pod: Pod, rules: str) -> None:
        subprocess.run([*self._inside(pod.name), "nft", "-f", "-"], input=rules, text=True, check=True)

    def _probed(self, pod: Pod, probe: dict[str, Any]) -> bool:
        limit = 10 * probe.get("timeoutSeconds", 1)  # a busy machine is no fault of the manifest
        if "exec" in probe:
            process = self.start(pod, command=probe["exec"]["command"])
            try:
                process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            return process.returncode == 0
        get = probe["httpGet"]
        url = f"http://{pod.address}:{pod.port(get['port'])}{get['path']}"
        command = [*self._inside("node"), sys.executable, "-c", _GET, url, str(limit)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
