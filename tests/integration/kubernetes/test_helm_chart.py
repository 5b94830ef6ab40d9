"""The chart by Helm on a real API server: strict schemas, what is refused, and what it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.kubernetes.control_plane import ControlPlane
from benchmarks.kubernetes.fake_kubelet import ApiClient, Object
from tests.kubernetes.helm_chart import CHART, OLD, HelmFailure, HelmRelease, helm
from tests.kubernetes.strict_schemas import VERSIONS, errors_of

EVERYTHING: dict[str, Any] = {
    "clusters": ["a", "b"],
    "bus": {"url": "nats://nats.nats:4222", "replicas": 3},
    "provisioner": {
        "pools": {
            "name": "t",
            "pools": {"gpus": {"driver": "kubernetes", "most": 4, "kubernetes": {"image": "dmsc:1"}}},
        }
    },
    "image": {"repository": "r.example/dmsc", "tag": "1.0", "pullSecrets": [{"name": "r"}]},
    "tolerations": [{"key": "control", "operator": "Exists"}],
    "nodeSelector": {"pool": "control"},
    "priorityClassName": "system-cluster-critical",
    "environment": {"DMSC_QUEUE_ORDER": "fair"},
    "networkPolicy": {
        "monitoring": {"kubernetes.io/metadata.name": "monitoring"},
        "clients": [{"namespaceSelector": {}}],
        "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 443}]}],
    },
}


@pytest.fixture
def release(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> HelmRelease:
    helm()
    return HelmRelease(control_plane, namespace, tmp_path)


def find(manifests: list[Object], kind: str, name: str) -> Object:
    (found,) = [each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["as it is", "with all"])
async def test_all_that_the_chart_makes_keeps_to_the_schemas(
    release: HelmRelease, admin: ApiClient, values: dict[str, Any]
) -> None:
    release.run("install", values)
    manifests = await release.manifests(admin)
    swapped = [each for each in manifests if each["apiVersion"] == "policy/v1beta1"]
    assert bool(swapped) is release.is_old
    for each in swapped:  # the one difference of an old server: the chart's own value is put back
        each["apiVersion"] = yaml.safe_load((CHART / "values.yaml").read_text())["podDisruptionBudget"][
            "apiVersion"
        ]
    assert OLD["podDisruptionBudget"]["apiVersion"] not in {each["apiVersion"] for each in manifests}
    problems = {
        f"{version} {each['kind']} {each['metadata']['name']}": errors
        for version in VERSIONS
        for each in manifests
        if (errors := errors_of(each, version))
    }
    assert problems == {}
    assert len(manifests) > 30


async def test_what_the_chart_promises(release: HelmRelease, admin: ApiClient) -> None:
    release.run("install", EVERYTHING)
    manifests = await release.manifests(admin)
    pods = [each for each in manifests if each["kind"] in ("Deployment", "StatefulSet")]
    with_token = []
    for each in pods:
        spec = each["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"livenessProbe", "readinessProbe"} <= container.keys()
        zones = [constraint["topologyKey"] for constraint in spec["topologySpreadConstraints"]]
        assert "topology.kubernetes.io/zone" in zones
        if spec["automountServiceAccountToken"]:
            with_token.append(each["metadata"]["name"])
    assert with_token == ["mesh-provisioner"]
    (role,) = [each for each in manifests if each["kind"] == "Role"]
    assert {resource for rule in role["rules"] for resource in rule["resources"]} == {
        *("jobs", "pods", "configmaps")
    }
    assert not [each for each in manifests if each["kind"].startswith("Cluster")]
    for component in ("service-registry", "orchestrator", "authorizer"):
        budget = find(manifests, "PodDisruptionBudget", f"mesh-{component}")
        chosen = budget["spec"]["selector"]["matchLabels"]
        of_component = [
            each for each in pods if chosen.items() <= each["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert sum(each["spec"]["replicas"] for each in of_component) == 2
        assert budget["spec"]["maxUnavailable"] == 1
    deny = find(manifests, "NetworkPolicy", "mesh-default-deny")["spec"]
    assert (deny["policyTypes"], deny.keys()) == (["Ingress", "Egress"], {"podSelector", "policyTypes"})
    pools = find(manifests, "ConfigMap", "mesh-pools")["data"]["pools.yaml"]
    assert yaml.safe_load(pools) == EVERYTHING["provisioner"]["pools"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"clusters": "a"}, "clusters"),
        ({"bus": {"replicas": "three"}}, "bus/replicas"),
        ({"gateway": {"port": 0}}, "gateway/port"),
        ({"imagee": {}}, "imagee"),
        ({"provisioner": {"pools": {"pools": {"gpus": {"driver": "kubernetes", "most": "4"}}}}}, "most"),
    ],
)
async def test_a_value_of_the_wrong_type_is_refused_before_anything_is_done(
    release: HelmRelease, admin: ApiClient, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(HelmFailure) as caught:
        release.run("install", values)
    assert said in str(caught.value)
    assert await admin.items(f"/apis/apps/v1/namespaces/{release.namespace}/deployments") == []


def test_the_rules_of_alerts_are_those_of_the_containers() -> None:
    own = CHART.parents[1] / "observability" / "rules.yml"
    assert (CHART / "files" / "rules.yml").read_text() == own.read_text()
