"""The driver of pods on a real API server, with real controllers and a real scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.kubernetes.control_plane import ControlPlane
from benchmarks.kubernetes.fake_kubelet import ApiClient, FakeKubelet
from entities.provisioner.drivers.kubernetes_driver import KubernetesApi, KubernetesDriver
from entities.provisioner.drivers.kubernetes_manifest import MachinePods
from schemas.errors import Refused, Unavailable
from schemas.machines.kubernetes import KubernetesMachines
from tests.integration.kubernetes.conftest import start_warm
from tests.patience import PATIENCE_S
from tests.waiting import eventually

Form = Literal["job", "pod"]
FORMS: tuple[Form, ...] = ("job", "pod")


def driver(plane: ControlPlane, namespace: str, form: Form = "job", **more: Any) -> KubernetesDriver:
    rules = KubernetesMachines(image="dmsc:test", form=form, namespace=namespace, **more)
    pods = MachinePods(mesh="t", pool="far", rules=rules, bus="nats://127.0.0.1:1", join=["--wait", "3600"])
    api = KubernetesApi(str(plane.kubeconfig), namespace=namespace, timeout_s=PATIENCE_S)
    return KubernetesDriver(api, pods)


@pytest.mark.parametrize("form", FORMS)
async def test_one_pod_runs_for_many_orders_and_is_given_back_with_its_process(
    control_plane: ControlPlane, admin: ApiClient, namespace: str, form: Form, tmp_path: Path
) -> None:
    kubelet = FakeKubelet(
        admin, tmp_path, {f"n-{namespace}": {"of": namespace}}, {"cpu": "4"}, start=start_warm
    )
    machines = driver(control_plane, namespace, form, resources={"cpu": "1"}, node_selector={"of": namespace})
    async with kubelet.running():
        await machines.order("t-far-1")
        await machines.order("t-far-1")
        assert await machines.machines() == {"t-far-1"}
        await eventually(lambda: kubelet.began)
        await machines.order("t-far-1")
        await machines.release("t-far-1")
        await eventually(lambda: gone(machines))
        (pod,) = kubelet.began
        assert kubelet.signalled == [pod]
        assert pod in kubelet.ended
        assert await admin.items(f"/api/v1/namespaces/{namespace}/pods") == []
        await machines.release("t-far-1")


@pytest.mark.parametrize("form", FORMS)
async def test_a_quota_refuses_a_machine_but_not_the_second_order_of_one_that_is_there(
    control_plane: ControlPlane, admin: ApiClient, namespace: str, form: Form
) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    place = f"/api/v1/namespaces/{namespace}"
    await admin.ask("POST", f"{place}/resourcequotas", quota)

    async def counted(pods: str) -> bool:
        found = await admin.ask("GET", f"{place}/resourcequotas/few")
        used = found.get("status", {}).get("used", {})
        return bool(used.get("pods") == pods)

    await eventually(lambda: counted("0"))
    machines = driver(control_plane, namespace, form)
    await machines.order("t-far-1")
    await eventually(lambda: counted("1"))
    with pytest.raises(Refused, match="exceeded quota: few, requested: pods=1") as caught:
        await machines.order("t-far-2")
    assert "\n" not in caught.value.text
    await machines.order("t-far-1")
    assert await machines.machines() == {"t-far-1"}


async def test_an_account_without_rights_and_a_namespace_that_is_not_there_are_one_line(
    control_plane: ControlPlane, namespace: str
) -> None:
    stranger = KubernetesApi(
        str(control_plane.kubeconfig_of("no-such-token", "stranger")), namespace=namespace
    )
    rules = KubernetesMachines(image="dmsc:test", namespace=namespace)
    pods = MachinePods(mesh="t", pool="far", rules=rules, bus="nats://127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"401: Unauthorized|does not say its version"):
        await KubernetesDriver(stranger, pods).machines()
    with pytest.raises(Refused, match='404: namespaces "nowhere" not found'):
        await driver(control_plane, "nowhere").order("t-far-1")


async def test_a_priority_class_that_is_not_there_refuses_the_machine(
    control_plane: ControlPlane, namespace: str
) -> None:
    with pytest.raises(Refused, match="no PriorityClass with name urgent was found"):
        await driver(control_plane, namespace, priority_class="urgent").order("t-far-1")


async def gone(machines: KubernetesDriver) -> bool:
    return not await machines.machines()
