"""Machines that are pods of a Kubernetes cluster: what the file of pools says of them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from schemas.base import Part, Seconds

ObjectName = Annotated[str, StringConstraints(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", max_length=253)]
"""A name of Kubernetes' objects, or empty."""
NamespaceName = Annotated[
    str, StringConstraints(pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$", max_length=63)
]
Quantity = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$", max_length=32),
]
"""An amount as Kubernetes writes it: `500m`, `4`, `80Gi`."""


class PodToleration(Part):
    """A taint of nodes that the pods of a pool bear."""

    key: str = Field("", max_length=316, description="empty: any taint")
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = Field("", max_length=63)
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field("", description="empty: any")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.key and self.operator == "Equal":
            raise ValueError("a toleration of any taint has no key: give operator: Exists")
        if self.value and self.operator == "Exists":
            raise ValueError("Exists takes no value: give operator: Equal, or leave value out")
        return self


class KubernetesMachines(Part):
    """The pods of a pool: each is a machine of its own, with one node agent."""

    image: str = Field(min_length=1, max_length=500, description="whose entry point is dmsc")
    namespace: NamespaceName = Field("", description="empty: the provisioner's own")
    kubeconfig: str = Field(
        "", max_length=4096, description="file; empty: the pod's service account, else as kubectl finds it"
    )
    context: str = Field("", max_length=253, description="of the kubeconfig; empty: its current one")
    form: Literal["job", "pod"] = Field("job", description="what one machine is: a Job of one pod, or a pod")
    resources: dict[str, Quantity] = Field(
        {}, max_length=32, description="requests and limits: cpu, memory, nvidia.com/gpu"
    )
    node_selector: dict[str, str] = Field({}, max_length=32)
    tolerations: tuple[PodToleration, ...] = Field((), max_length=32)
    queue: ObjectName = Field("", description="Kueue's local queue, which admits the pods")
    priority_class: ObjectName = Field("", description="of the pods")
    service_account: ObjectName = Field("", description="of the pods, which get no token of it")
    secret: ObjectName = Field("", description="with the key `credential`, with which the nodes join")
    bus: str = Field(
        "", max_length=4096, description="the bus as the pods reach it; empty: the provisioner's"
    )
    environment: dict[str, str] = Field({}, max_length=64, description="of the node agents")
    annotations: dict[str, str] = Field({}, max_length=32, description="of the pods")
    grace_s: Seconds = Field(30.0, le=86_400, description="from SIGTERM until the node agent has to be gone")
    owner: ObjectName = Field("", description="a ConfigMap with whose end the machines end, too")
    timeout_s: Seconds = Field(15.0, gt=0, description="for each question to the API server")
    keep_s: Seconds = Field(3600.0, description="how long what has ended is kept, for its log")
