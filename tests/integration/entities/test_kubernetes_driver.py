"""The driver of pods against a small API server: what is certain after each of its answers."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio

from entities.provisioner.drivers.kubernetes_driver import KubernetesApi, KubernetesDriver
from entities.provisioner.drivers.kubernetes_manifest import MachinePods
from schemas.errors import BadInput, Refused, Unavailable
from schemas.machines.kubernetes import KubernetesMachines
from tests.kubernetes.fake_api import HANGS, FakeApi, Trouble
from tests.patience import PATIENCE_S

Form = Literal["job", "pod"]
FORMS: tuple[Form, ...] = ("job", "pod")


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[FakeApi]:
    pytest.importorskip("kr8s", reason="kr8s is not installed (extra kubernetes)")
    fake = FakeApi()
    async with fake.served(tmp_path):
        yield fake


def driver(
    api: FakeApi, form: Form = "job", *, timeout_s: float = PATIENCE_S, **more: Any
) -> KubernetesDriver:
    rules = KubernetesMachines(image="dmsc:test", form=form, **more)
    pods = MachinePods(mesh="t", pool="far", rules=rules, bus="nats://bus:4222")
    return KubernetesDriver(KubernetesApi(str(api.kubeconfig), timeout_s=timeout_s), pods)


def kind_of(form: Form) -> str:
    return {"job": "jobs", "pod": "pods"}[form]


@pytest.mark.parametrize("form", FORMS)
async def test_a_machine_is_ordered_listed_and_released_by_its_name(api: FakeApi, form: Form) -> None:
    machines = driver(api, form)
    assert machines.idempotent
    assert await machines.machines() == frozenset()
    await machines.order("t-far-1")
    await machines.order("t-far-1")  # the same order
    assert set(api.objects) == {(kind_of(form), "t-far-1")}
    assert await machines.machines() == {"t-far-1"}
    await machines.release("t-far-1")
    await machines.release("t-far-1")
    assert await machines.machines() == frozenset()


@pytest.mark.parametrize("form", FORMS)
async def test_after_a_quota_there_is_no_machine_unless_it_was_there_before(api: FakeApi, form: Form) -> None:
    api.quota = 1
    machines = driver(api, form)
    await machines.order("t-far-1")
    with pytest.raises(Refused, match=r'403: pods "t-far-2" is forbidden: exceeded quota: gpus') as caught:
        await machines.order("t-far-2")
    assert "\n" not in caught.value.text
    await machines.order("t-far-1")  # 403 once more, because of the very machine that was ordered
    assert await machines.machines() == {"t-far-1"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_done", [True, False], ids=["after its work", "before its work"])
async def test_an_order_whose_connection_ends_is_in_doubt_and_is_one_machine_when_placed_again(
    api: FakeApi, form: Form, is_done: bool
) -> None:
    cut = Trouble("POST", kind_of(form), is_done=is_done)
    api.troubles.append(cut)
    machines = driver(api, form)
    with pytest.raises(Unavailable, match="the API server can't be reached"):
        await machines.order("t-far-1")
    assert api.met == [cut]
    assert bool(api.objects) is is_done
    await machines.order("t-far-1")
    assert len(api.objects) == 1


async def test_a_refusal_whose_meaning_cannot_be_looked_up_leaves_doubt(api: FakeApi) -> None:
    api.quota = 0
    api.troubles.append(Trouble("GET", "pods", 500, "InternalError", "etcd is away"))
    with pytest.raises(Unavailable, match=r"exceeded quota.*is it there"):
        await driver(api, "pod").order("t-far-1")
    assert api.met


async def test_somebody_elses_object_of_that_name_is_no_machine(api: FakeApi) -> None:
    api.objects["jobs", "t-far-1"] = {"metadata": {"name": "t-far-1", "labels": {"dmsc/mesh": "other"}}}
    with pytest.raises(Refused, match="there is a job t-far-1 already, which is not of this pool"):
        await driver(api).order("t-far-1")


async def test_a_busy_server_is_asked_again_when_it_says_so_and_else_is_in_doubt(api: FakeApi) -> None:
    busy = Trouble("POST", "pods", 429, "TooManyRequests", "slow down", {"Retry-After": "0"})
    api.troubles += [busy, busy]
    await driver(api, "pod").order("t-far-1")
    assert api.met == [busy, busy]
    api.troubles.append(Trouble("POST", "pods", 429, "TooManyRequests", "slow down"))
    with pytest.raises(Unavailable, match="429: slow down"):
        await driver(api, "pod").order("t-far-2")
    api.troubles.append(Trouble("POST", "pods", 409, "Conflict", "the quota was changed meanwhile"))
    with pytest.raises(Unavailable, match="409: the quota was changed"):
        await driver(api, "pod").order("t-far-2")
    assert set(api.objects) == {("pods", "t-far-1")}


async def test_lists_are_read_in_pages_and_anew_when_a_page_is_too_old(api: FakeApi) -> None:
    api.page = 2
    machines = driver(api, "pod")
    names = {f"t-far-{number}" for number in range(5)}
    for name in names:
        await machines.order(name)
    api.objects["pods", "u-far-9"] = {"metadata": {"name": "u-far-9", "labels": {"dmsc/mesh": "u"}}}
    assert await machines.machines() == names
    asked = api.requests["GET", "pods"]
    assert asked == 3
    gone = Trouble("GET", "pods", 410, "Expired", "The provided continue parameter is too old")
    api.troubles.append(gone)
    assert await machines.machines() == names
    assert api.met == [gone]
    api.troubles += [gone, gone]
    with pytest.raises(Unavailable, match="410"):
        await machines.machines()


async def test_an_expired_token_is_read_again_and_a_wrong_one_is_told(api: FakeApi) -> None:
    machines = driver(api)
    await machines.order("t-far-1")
    api.token = "second"
    with pytest.raises(Unavailable, match="401: Unauthorized"):
        await machines.machines()
    api.write_token()
    assert await machines.machines() == {"t-far-1"}


async def test_a_server_that_does_not_answer_in_time_leaves_doubt(api: FakeApi) -> None:
    machines = driver(api, "pod", timeout_s=0.3)
    await machines.machines()
    api.troubles.append(Trouble("POST", "pods", HANGS))
    with pytest.raises(Unavailable, match=r"the API server has not answered within 0\.3 s"):
        await machines.order("t-far-1")
    api.troubles.append(Trouble("POST", "pods", 429, message="later", headers={"Retry-After": "3600"}))
    with pytest.raises(Unavailable, match="429: later"):
        await machines.order("t-far-1")
    assert len(api.met) == 2


async def test_one_line_without_credentials_and_without_a_server(tmp_path: Path, api: FakeApi) -> None:
    rules = KubernetesMachines(image="dmsc:test")
    pods = MachinePods(mesh="t", pool="far", rules=rules, bus="nats://bus:4222")
    nothing = KubernetesDriver(KubernetesApi(str(tmp_path / "none")), pods)
    with pytest.raises(Unavailable, match="no credentials for an API server") as caught:
        await nothing.machines()
    assert "\n" not in caught.value.text
    api.url = "http://127.0.0.1:1"
    api.write_token()
    with pytest.raises(Unavailable, match="the API server can't be reached"):
        await driver(api).machines()


async def test_what_ended_is_no_machine_and_goes_after_a_while(api: FakeApi) -> None:
    machines = driver(api, "job", keep_s=10**8)
    await machines.order("t-far-1")
    await machines.order("t-far-2")
    ended = {"type": "Failed", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    api.objects["jobs", "t-far-1"]["status"] = {"conditions": [ended]}
    assert await machines.machines() == {"t-far-2"}
    assert ("jobs", "t-far-1") in api.objects
    assert await driver(api, "job", keep_s=60).machines() == {"t-far-2"}
    assert ("jobs", "t-far-1") not in api.objects


async def test_machines_belong_to_the_object_with_whose_end_they_end(api: FakeApi) -> None:
    machines = driver(api, owner="dmsc-machines")
    with pytest.raises(Unavailable, match="the ConfigMap dmsc-machines, the machines' owner: 404"):
        await machines.order("t-far-1")
    api.objects["configmaps", "dmsc-machines"] = {"metadata": {"name": "dmsc-machines", "uid": "u-1"}}
    await machines.order("t-far-1")
    (owner,) = api.objects["jobs", "t-far-1"]["metadata"]["ownerReferences"]
    assert (owner["name"], owner["uid"]) == ("dmsc-machines", "u-1")


async def test_why_a_pod_does_not_run_is_told_once(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    machines = driver(api, "pod")
    await machines.order("t-far-1")
    why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    api.objects["pods", "t-far-1"]["status"] = {"phase": "Pending", "conditions": [why]}
    await machines.machines()
    await machines.machines()
    said = capsys.readouterr()
    assert (said.out + said.err).count("Unschedulable: 0/3 nodes") == 1


def test_without_kr8s_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kr8s.asyncio", None)
    with pytest.raises(BadInput, match=r"pip install 'dmsc\[kubernetes\]'"):
        KubernetesApi()
