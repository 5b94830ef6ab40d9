"""What a machine is on Kubernetes: a pod with one node agent, alone or as the one pod of a Job. Pure.

Whoever replaces a machine is the provisioner: nothing restarts the container, and no second pod comes for a
Job. Pods are such as the policy `restricted` of pod security allows, and have no token of the API server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from schemas.machines.kubernetes import KubernetesMachines, PodToleration

MESH_LABEL = "dmsc/mesh"
POOL_LABEL = "dmsc/pool"
MACHINE_LABEL = "dmsc/machine"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
GROUP_SIZE = "kueue.x-k8s.io/pod-group-total-count"
COMPONENT = "node"
CREDENTIAL_FOLDER = "/run/dmsc/node"
CREDENTIAL_KEY = "credential"
STATE_FOLDER = "/var/lib/dmsc"
METRICS_PORT = 9464
TO_END = 10
"""Seconds more than its grace that the pod has: the agent ends by itself before it is killed."""
USER = 10001
"""Of the image (Dockerfile)."""
FINISHED_PHASES = frozenset({"Succeeded", "Failed"})
FINISHED_CONDITIONS = frozenset({"Complete", "Failed"})

Manifest = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MachinePods:
    """Makes the manifests of one pool.

    Args:
        mesh: the name in the file of pools.
        pool: the pool's name.
        rules: what the file of pools says of its pods.
        bus: addresses of the bus, separated by commas, as the pods reach it.
        join: further words of `dmsc join`.
    """

    mesh: str
    pool: str
    rules: KubernetesMachines
    bus: str
    join: Sequence[str] = ()

    @property
    def selector(self) -> str:
        """Finds all that belongs to this pool, and nothing else."""
        return f"{MESH_LABEL}={self.mesh},{POOL_LABEL}={self.pool}"

    def is_own(self, found: Mapping[str, Any]) -> bool:
        """Whether an object that bears a machine's name is that machine."""
        labels = found.get("metadata", {}).get("labels") or {}
        return labels.get(MESH_LABEL) == self.mesh and labels.get(POOL_LABEL) == self.pool

    def machine(
        self,
        name: str,
        owner: Mapping[str, Any] | None = None,
        gang: tuple[str, int] | None = None,
    ) -> Manifest:
        """The object that is ordered: its name is the machine's, so that no second one comes into being.

        Args:
            name: the machine's.
            owner: an owner reference: with the end of that object the machine ends.
            gang: name and size of the group that Kueue admits together; only pods can be in one.
        """
        if self.rules.form == "pod":
            pod = self.pod(name, owner)
            if self.rules.queue:
                pod["metadata"]["labels"][QUEUE_LABEL] = self.rules.queue
            if self.rules.queue and gang is not None:
                group, size = gang
                pod["metadata"]["labels"][GROUP_LABEL] = group
                annotations = pod["metadata"].setdefault("annotations", {})
                annotations[GROUP_SIZE] = str(size)
            return pod
        metadata: Manifest = {"name": name, "labels": self._labels(name)}
        if self.rules.queue:
            metadata["labels"][QUEUE_LABEL] = self.rules.queue
        if owner is not None:
            metadata["ownerReferences"] = [dict(owner)]
        template = self.pod(name)
        del template["apiVersion"], template["kind"], template["metadata"]["name"]
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata,
            "spec": {
                "parallelism": 1,
                "completions": 1,
                "backoffLimit": 0,
                "podReplacementPolicy": "Failed",
                "ttlSecondsAfterFinished": int(self.rules.keep_s),
                "template": template,
            },
        }

    def pod(self, name: str, owner: Mapping[str, Any] | None = None) -> Manifest:
        """The pod of a machine."""
        rules = self.rules
        metadata: Manifest = {"name": name, "labels": self._labels(name)}
        if rules.annotations:
            metadata["annotations"] = dict(rules.annotations)
        if owner is not None:
            metadata["ownerReferences"] = [dict(owner)]
        mounts: list[Manifest] = [
            {"name": "state", "mountPath": STATE_FOLDER},
            {"name": "tmp", "mountPath": "/tmp"},
        ]
        volumes: list[Manifest] = [{"name": "state", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]
        environment = {
            "DMSC_GRACE": f"{rules.grace_s:g}",
            "DMSC_METRICS_PORT": str(METRICS_PORT),
            "DMSC_METRICS_BIND": "0.0.0.0",
            "HOME": STATE_FOLDER,
            **rules.environment,
        }
        if rules.secret:
            mounts.append({"name": "credential", "mountPath": CREDENTIAL_FOLDER, "readOnly": True})
            volumes.append({"name": "credential", "secret": {"secretName": rules.secret}})
            environment["DMSC_CREDENTIAL"] = f"{CREDENTIAL_FOLDER}/{CREDENTIAL_KEY}"
        container: Manifest = {
            "name": "node",
            "image": rules.image,
            "args": ["join", self.bus, "--node", name, "--state", STATE_FOLDER, *self.join],
            "env": [{"name": key, "value": value} for key, value in environment.items()],
            "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
            "volumeMounts": mounts,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
        }
        if rules.resources:
            container["resources"] = {"requests": dict(rules.resources), "limits": dict(rules.resources)}
        spec: Manifest = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": int(rules.grace_s) + TO_END,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": volumes,
        }
        if rules.node_selector:
            spec["nodeSelector"] = dict(rules.node_selector)
        if rules.tolerations:
            spec["tolerations"] = [_toleration(each) for each in rules.tolerations]
        if rules.priority_class:
            spec["priorityClassName"] = rules.priority_class
        if rules.service_account:
            spec["serviceAccountName"] = rules.service_account
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def _labels(self, name: str) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "dmsc",
            "app.kubernetes.io/component": COMPONENT,
            MESH_LABEL: self.mesh,
            POOL_LABEL: self.pool,
            MACHINE_LABEL: name,
        }


def _toleration(toleration: PodToleration) -> Manifest:
    return {key: value for key, value in toleration.model_dump().items() if value}


def ended_at(found: Mapping[str, Any]) -> float | None:
    """When a machine, a pod or a Job, ended, in seconds since the epoch; None: it is there, or on its way.

    A Job that is suspended or whose pod is not there yet is on its way. One that is being deleted is there
    until nothing of it is left.
    """
    status = found.get("status") or {}
    conditions = status.get("conditions") or ()
    if "containers" in found.get("spec", {}):  # objects of a list don't say their kind
        if status.get("phase") not in FINISHED_PHASES:
            return None
        states = [each.get("state", {}).get("terminated") for each in status.get("containerStatuses") or ()]
        times = [each.get("finishedAt") for each in states if each]
    else:
        over = [
            each
            for each in conditions
            if each.get("type") in FINISHED_CONDITIONS and each.get("status") == "True"
        ]
        if not over:
            return None
        times = [each.get("lastTransitionTime") for each in over]
    created = found.get("metadata", {}).get("creationTimestamp")
    return max((_seconds(time) for time in (*times, created) if time), default=0.0)


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def obstacle(pod: Mapping[str, Any]) -> str:
    """Why a pod has not begun to run, in Kubernetes' words; empty: it has, or nobody has said so."""
    status = pod.get("status") or {}
    if status.get("phase") != "Pending":
        return ""
    for each in status.get("containerStatuses") or ():
        waiting = each.get("state", {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".removesuffix(": ")
    for each in status.get("conditions") or ():
        if each.get("type") == "PodScheduled" and each.get("status") == "False":
            return f"{each.get('reason', '')}: {each.get('message', '')}"
    return ""
