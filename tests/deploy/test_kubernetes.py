"""deploy/kubernetes: what each kustomization applies, and a job that trains through its manifests."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.deploy.cluster import Cluster
from tests.deploy.kustomize import Object, build, documents, identity
from tests.deploy.machines import Machine, can_make_machines, end
from tests.deploy.test_deploy import DEPLOY
from tests.deploy.test_recipes import Pods
from tests.end_to_end.hosts import can_make_namespaces

KUBERNETES = DEPLOY / "kubernetes"
FOLDERS = sorted(path.parent.relative_to(KUBERNETES) for path in KUBERNETES.rglob("kustomization.yaml"))
OWN_KINDS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
"""Kinds that Kubernetes itself does not have, and the names of their models."""
NODE_JOB = "node"
"""The Job that Kubeflow's Trainer looks for in a runtime."""

TRAINED_S = 240.0


def one_of(objects: list[Object], kind: str) -> Object:
    [one] = [each for each in objects if each["kind"] == kind]
    return one


def pod_template(objects: list[Object]) -> tuple[int, Object]:
    """How many workers a kustomization starts, and the template of their pods."""
    for one in objects:
        if one["kind"] == "Job":
            return one["spec"]["completions"], one["spec"]["template"]
        if one["kind"] == "JobSet":
            [replicated] = one["spec"]["replicatedJobs"]
            job = replicated["template"]["spec"]
            return replicated["replicas"] * job["completions"], job["template"]
        if one["kind"] == "ClusterTrainingRuntime":
            [replicated] = one["spec"]["template"]["spec"]["replicatedJobs"]
            return one["spec"]["mlPolicy"]["numNodes"], replicated["template"]["spec"]["template"]
    raise AssertionError("no workers")


def host_stem(objects: list[Object]) -> str:
    """What the controllers of Job, JobSet and TrainJob call the workers' hosts, but for the index."""
    for one in objects:
        if one["kind"] == "JobSet":
            [replicated] = one["spec"]["replicatedJobs"]
            return f"{one['metadata']['name']}-{replicated['name']}-0"
        if one["kind"] == "TrainJob":  # the JobSet that is made of the runtime has the name of the TrainJob
            assert one["spec"].keys() == {"runtimeRef"}, "what else it says would change the pods"
            return f"{one['metadata']['name']}-{NODE_JOB}-0"
    return str(one_of(objects, "Job")["metadata"]["name"])


# ---------------------------------------------------------------- what is applied


def as_its_api_reads(one: Object) -> Object | None:
    """Returns an object of one of these kinds as its model has it: without what the API does not know."""
    from kubeflow_trainer_api import models  # two seconds, which a collection need not take

    read = getattr(models, OWN_KINDS[one["kind"]]).from_dict(one)
    return None if read is None else read.to_dict()


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_what_a_kustomization_applies_fits_the_schema_of_each_kind(folder: Path) -> None:
    for one in build(KUBERNETES / folder):
        if one["kind"] in OWN_KINDS:
            assert as_its_api_reads(one) == one  # a field that is unknown would have been dropped
        else:
            kubernetes_validate.validate(one, "1.31", strict=True)


def test_a_field_that_the_api_of_jobset_does_not_have_is_noticed() -> None:
    broken = one_of(build(KUBERNETES / "jobset"), "JobSet")
    broken["spec"]["failurePolicy"]["restartPlan"] = "InPlaceRestart"
    assert as_its_api_reads(broken) != broken


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_our_helper_builds_what_kubectl_builds(folder: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not here to compare with")
    told = subprocess.run(
        ["kubectl", "kustomize", KUBERNETES / folder], capture_output=True, text=True, check=True
    )
    theirs = {identity(one): one for one in yaml.safe_load_all(told.stdout)}
    assert theirs == {identity(one): one for one in build(KUBERNETES / folder)}


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_as_many_workers_start_as_the_scheduler_waits_for(folder: Path) -> None:
    objects = build(KUBERNETES / folder)
    [data] = [one["data"] for one in objects if one["metadata"]["name"] == "muster-job"]
    assert pod_template(objects)[0] == int(data["MS_WORKER_NUM"])


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_all_kustomizations_start_the_same_pods_but_for_image_and_resources(folder: Path) -> None:
    def essence(template: Object) -> Object:
        spec = {key: value for key, value in template["spec"].items() if key != "tolerations"}
        [container] = spec["containers"]
        own = {key: container[key] for key in container if key not in ("name", "image", "resources")}
        return {"labels": template["metadata"]["labels"], "spec": spec | {"containers": [own]}}

    base = pod_template(build(KUBERNETES / "base"))[1]
    assert essence(pod_template(build(KUBERNETES / folder))[1]) == essence(base)


def test_the_pod_monitor_finds_the_schedulers_metrics() -> None:
    [monitor] = documents(KUBERNETES / "pod-monitor.yaml")
    template = one_of(build(KUBERNETES / "base"), "Deployment")["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in [one["name"] for one in template["spec"]["containers"][0]["ports"]]


# ---------------------------------------------------------------- what trains


needs_namespaces = pytest.mark.skipif(
    not (can_make_machines() and can_make_namespaces() and shutil.which("nft")),
    reason="needs root, mounts, network namespaces and nftables",
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """The small overlay's cluster, with certificates made by hand as deploy/README.md says."""
    with contextlib.ExitStack() as stack:
        machine = Machine(tmp_path / "machine")
        stack.callback(machine.close)
        pods = Pods(machine)
        pods.secrets_by_hand()
        made = Cluster(machine, build(KUBERNETES / "overlays" / "small"), pods.fill)
        stack.callback(made.close)
        yield made


@pytest.mark.system
@needs_namespaces
def test_two_workers_train_through_the_manifests_and_strangers_reach_nobody(cluster: Cluster) -> None:
    scheduler = cluster.add("muster-scheduler-0", one_of(cluster.objects, "Deployment")["spec"]["template"])
    count, template = pod_template(cluster.objects)
    workers = [cluster.add(f"muster-workers-{index}", template, index) for index in range(count)]
    nobody: Object = {"metadata": {"labels": {}}, "spec": {}}
    stranger = cluster.add("stranger", nobody)
    prometheus = cluster.add("prometheus", nobody, namespace="monitoring")
    cluster.connect()

    serving = cluster.start(scheduler)
    log = ""
    try:
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert cluster.probe(scheduler, kind), kind
        rendezvous, metrics = (scheduler.port(name) for name in ("rendezvous", "metrics"))
        assert cluster.reaches(workers[0], "muster-scheduler.muster.svc", rendezvous)
        assert cluster.reaches(prometheus, scheduler.address, metrics)
        for pod, port in ((stranger, rendezvous), (stranger, metrics), (prometheus, rendezvous)):
            assert not cluster.reaches(pod, scheduler.address, port)
        training = [cluster.start(pod, "--epochs", "1") for pod in workers]
        told = [process.communicate(timeout=TRAINED_S)[0] for process in training]
    finally:
        [log] = end(serving)
    assert [process.returncode for process in training] == [0, 0], "\n".join([*told, log])
    assert "test accuracy" in told[0], log
    assert all(pod.address in log for pod in workers) or "muster-workers-1" in log, log


@pytest.mark.system
@needs_namespaces
def test_the_pods_of_a_jobset_train_and_then_those_of_a_trainjob_by_the_same_scheduler(
    cluster: Cluster,
) -> None:
    """As their manifests say, but two of the four: the scheduler is that of the small overlay."""
    scheduler = cluster.add("muster-scheduler-0", one_of(cluster.objects, "Deployment")["spec"]["template"])
    jobs = {}
    for folder in ("jobset", "kubeflow"):
        objects = build(KUBERNETES / folder)
        _, template = pod_template(objects)
        jobs[folder] = [cluster.add(f"{host_stem(objects)}-{index}", template, index) for index in range(2)]
    cluster.connect()

    serving = cluster.start(scheduler)
    log = ""
    told = {}
    try:
        assert cluster.probe(scheduler, "startupProbe")
        for folder, pods in jobs.items():
            training = [cluster.start(pod, "--epochs", "1") for pod in pods]
            told[folder] = [process.communicate(timeout=TRAINED_S)[0] for process in training]
            assert [process.returncode for process in training] == [0, 0], told
    finally:
        [log] = end(serving)
    assert all("test accuracy" in output[0] for output in told.values()), (told, log)
    hosts = [pod.name for pods in jobs.values() for pod in pods]
    assert hosts == [
        "muster-workers-worker-0-0",
        "muster-workers-worker-0-1",
        "muster-node-0-0",
        "muster-node-0-1",
    ]
    assert all(host in log for host in hosts), log
