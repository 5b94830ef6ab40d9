"""What a machine is on Kubernetes: manifests that strict schemas take, and what is read of answers."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import yaml

from entities.provisioner.drivers.kubernetes_manifest import MachinePods, ended_at, obstacle
from entities.provisioner.pools_file import parse_pools
from schemas.errors import BadInput
from schemas.machines.kubernetes import KubernetesMachines
from tests.kubernetes.strict_schemas import VERSIONS, errors_of

EVERYTHING: dict[str, Any] = {
    "image": "registry.example/dmsc:1.0",
    "namespace": "train",
    "resources": {"cpu": "8", "memory": "80Gi", "nvidia.com/gpu": "1"},
    "node_selector": {"cloud.google.com/gke-spot": "true"},
    "tolerations": [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "spot", "value": "yes"},
    ],
    "queue": "gpus",
    "priority_class": "batch",
    "service_account": "dmsc-node",
    "secret": "dmsc-node-a",
    "environment": {"DMSC_PORTS": "40000-40100"},
    "annotations": {"karpenter.sh/do-not-disrupt": "true"},
    "grace_s": 120,
}
OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "dmsc-machines", "uid": "5f0c"}


def pods(form: Literal["job", "pod"] = "job", **more: Any) -> MachinePods:
    rules = KubernetesMachines.model_validate({"image": "dmsc:1", "form": form, **more})
    return MachinePods(mesh="t", pool="far", rules=rules, bus="nats://bus:4222", join=["--cluster", "a"])


@pytest.mark.parametrize("version", VERSIONS)
def test_all_manifests_keep_to_the_schemas(version: str) -> None:
    for form in ("job", "pod"):
        for more in ({}, EVERYTHING):
            maker = pods(**{**more, "form": form})
            assert errors_of(maker.machine("t-far-1", OWNER), version) == []
            assert errors_of(maker.pod("t-far-1"), version) == []
    broken = pods().machine("t-far-1")
    broken["spec"]["backofLimit"] = broken["spec"].pop("backoffLimit")
    assert errors_of(broken, version), "a misspelt key has to be found"


def test_nobody_but_the_provisioner_replaces_a_machine() -> None:
    job = pods(**EVERYTHING).machine("t-far-1", OWNER)
    spec = job["spec"]["template"]["spec"]
    assert (job["spec"]["backoffLimit"], spec["restartPolicy"]) == (0, "Never")
    assert job["spec"]["podReplacementPolicy"] == "Failed", "no second pod while the first one leaves"
    assert "name" not in job["spec"]["template"]["metadata"]
    assert spec["containers"][0]["args"][:4] == ["join", "nats://bus:4222", "--node", "t-far-1"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["terminationGracePeriodSeconds"] == 130
    environment = {each["name"]: each["value"] for each in spec["containers"][0]["env"]}
    assert environment["DMSC_GRACE"] == "120"
    assert environment["DMSC_CREDENTIAL"] == "/run/dmsc/node/credential"


def test_the_queue_admits_what_is_ordered() -> None:
    label = "kueue.x-k8s.io/queue-name"
    job = pods(queue="gpus").machine("t-far-1")
    assert job["metadata"]["labels"][label] == "gpus"
    assert label not in job["spec"]["template"]["metadata"]["labels"]
    assert pods("pod", queue="gpus").machine("t-far-1")["metadata"]["labels"][label] == "gpus"


def test_what_a_job_begins_with_is_one_group_of_pods() -> None:
    group, size = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
    pod = pods("pod", queue="gpus").machine("t-far-2", gang=("t-far-1", 3))
    assert (pod["metadata"]["labels"][group], pod["metadata"]["annotations"][size]) == ("t-far-1", "3")
    assert errors_of(pod, VERSIONS[-1]) == []
    for maker in (pods("pod"), pods(queue="gpus")):  # nobody admits groups, or no Jobs as groups
        assert group not in maker.machine("t-far-2", gang=("t-far-1", 3))["metadata"]["labels"]


@pytest.mark.parametrize(
    ("status", "at"),
    [
        ({}, None),
        ({"conditions": [{"type": "Suspended", "status": "True"}]}, None),
        ({"conditions": [{"type": "FailureTarget", "status": "True"}]}, None),
        ({"conditions": [{"type": "Complete", "status": "False"}]}, None),
        (
            {
                "conditions": [
                    {"type": "Failed", "status": "True", "lastTransitionTime": "1970-01-01T00:01:00Z"}
                ]
            },
            60,
        ),
        ({"conditions": [{"type": "Complete", "status": "True"}]}, 5),
    ],
)
def test_a_job_is_there_until_it_is_over(status: dict[str, Any], at: float | None) -> None:
    job = {"metadata": {"creationTimestamp": "1970-01-01T00:00:05Z"}, "spec": {}, "status": status}
    assert ended_at(job) == at


def test_a_pod_is_there_until_its_container_has_ended() -> None:
    def pod(phase: str, **state: Any) -> dict[str, Any]:
        status = {"phase": phase, "containerStatuses": [{"state": state}]}
        return {"metadata": {}, "spec": {"containers": []}, "status": status}

    assert ended_at(pod("Pending")) is None
    assert ended_at(pod("Running", running={})) is None
    assert ended_at(pod("Succeeded", terminated={"finishedAt": "1970-01-01T00:01:00Z"})) == 60
    assert ended_at({"metadata": {}, "spec": {"containers": []}, "status": {"phase": "Failed"}}) == 0


def test_why_a_pod_waits() -> None:
    def pending(**status: Any) -> str:
        return obstacle({"status": {"phase": "Pending", **status}})

    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes",
    }
    assert pending(conditions=[unscheduled]) == "Unschedulable: 0/3 nodes"
    pulling = {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
    assert pending(containerStatuses=[pulling]) == "ErrImagePull: no such image"
    assert pending(containerStatuses=[{"state": {"waiting": {"reason": "ContainerCreating"}}}]) == ""
    assert obstacle({"status": {"phase": "Running"}}) == ""


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        ({}, "kubernetes: of the driver kubernetes alone: give kubernetes.image"),
        ({"kubernetes": {}}, "pools.a.kubernetes.image"),
        ({"kubernetes": {"image": "i", "imagee": "i"}}, "did you mean pools.a.kubernetes.image?"),
        ({"kubernetes": {"image": "i", "resources": {"cpu": "lots"}}}, "pools.a.kubernetes.resources.cpu"),
        ({"kubernetes": {"image": "i"}, "credential": "a.cred"}, "give kubernetes.secret"),
        ({"kubernetes": {"image": "i", "tolerations": [{}]}}, "give operator: Exists"),
        ({"kubernetes": {"image": "i", "namespace": "Train"}}, "pools.a.kubernetes.namespace"),
    ],
)
def test_bad_input_is_one_line(pool: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_pools(yaml.safe_dump({"pools": {"a": {"driver": "kubernetes", **pool}}}), "pools.yaml")
    assert said in caught.value.text
    assert "\n" not in caught.value.text
