"""Machines as pods of a Kubernetes cluster, by kr8s (`pip install 'dmsc[kubernetes]'`).

A machine's name is its object's name, so a second order is the same order: the API server answers 409.
What a refusal means is looked up. Quota and admission come before the name is compared: a second order of a
machine that is there may be refused because of that very machine. So after each refusal it is asked whether
there is one of that name, and only if there is none the order is refused for certain.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from bus.logs import get_logger
from entities.provisioner.drivers.kubernetes_manifest import (
    MACHINE_LABEL,
    MachinePods,
    Manifest,
    ended_at,
    obstacle,
)
from schemas.errors import BadInput, Refused, Unavailable

if TYPE_CHECKING:
    from kr8s.asyncio import Api

log = get_logger("provisioner")

INSTALL = "install dmsc with the extra kubernetes: pip install 'dmsc[kubernetes]'"
PAGE = 100
"""Objects of one answer."""
SHOWN = 300
"""Characters of what the API server says that are told on."""
UNCERTAIN = frozenset({401, 408, 409, 429})
"""Answers below 500 that are not about the order."""
BUSY = frozenset({429, 503})
NO_CREDENTIALS = (
    OSError,
    ValueError,
    LookupError,
    RuntimeError,
    subprocess.SubprocessError,
    httpx.InvalidURL,
)
"""What kr8s raises where it finds none, or a file that it can't read."""
OWN_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


@dataclass(frozen=True, slots=True)
class ApiAnswer:
    """What the API server answered."""

    status: int
    body: Mapping[str, Any] = field(default_factory=dict)
    retry_s: float | None = None
    """After how many seconds it asks to be asked again."""

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """What it says, in one line."""
        said = " ".join(str(self.body.get("message", "")).split())
        return f"{self.status}: {said[:SHOWN]}" if said else str(self.status)


class KubernetesApi:
    """Questions to one API server. Each ends in time; an expired token is read again.

    Args:
        kubeconfig: a file; empty: the pod's service account, or what kubectl would use.
        context: of the kubeconfig; empty: its current one.
        namespace: empty: the pod's own, or the context's.
        timeout_s: for each question, with all its attempts.
    """

    def __init__(
        self, kubeconfig: str = "", context: str = "", namespace: str = "", *, timeout_s: float = 15.0
    ) -> None:
        try:
            import kr8s.asyncio
        except ImportError:
            raise BadInput(f"driver kubernetes: there is no kr8s: {INSTALL}") from None
        self._kr8s = kr8s
        self._kubeconfig = kubeconfig
        self._context = context
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._api: Api | None = None
        self._connecting = asyncio.Lock()

    async def ask(
        self,
        method: str,
        path: str,
        *,
        version: str = "v1",
        body: Manifest | None = None,
        params: Mapping[str, str] | None = None,
    ) -> ApiAnswer:
        """Asks about objects of the namespace, and returns whatever is answered.

        Raises:
            Unavailable: nobody knows whether it was heard.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._asked(method, path, version, body, params)
        except (TimeoutError, self._kr8s.APITimeoutError):
            raise Unavailable(f"the API server has not answered within {self._timeout_s:g} s") from None
        except self._kr8s.ServerError as error:
            raise Unavailable(f"the API server does not say its version: {_why(error)}") from None
        except httpx.HTTPError as error:
            raise Unavailable(f"the API server can't be reached: {_why(error)}") from None
        except NO_CREDENTIALS as error:
            raise Unavailable(f"no credentials for an API server: {_why(error)}") from None

    async def _asked(
        self,
        method: str,
        path: str,
        version: str,
        body: Manifest | None,
        params: Mapping[str, str] | None,
    ) -> ApiAnswer:
        anew = False
        async with self._connecting:
            api = await self._connected()
        while True:
            token = api.auth.token  # kr8s keeps the one with which its session began
            async with api.call_api(
                method,
                version=version,
                namespace=self._namespace,
                url=path,
                raise_for_status=False,  # else it asks four times about each 403
                headers={"Authorization": f"Bearer {token}"} if token else {},
                content=None if body is None else json.dumps(body),
                params=dict(params or {}),
            ) as response:
                answer = _read(response)
            if answer.status == 401 and not anew:  # the token has expired: it is read again, once
                anew = True
                await api.reauthenticate()
            elif answer.retry_s is not None and answer.retry_s < self._timeout_s and answer.status in BUSY:
                await asyncio.sleep(answer.retry_s)  # the time limit of the question ends it
            else:
                return answer

    async def _connected(self) -> Api:
        if self._api is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about versions: what is asked for is as old as v1
                api = await self._kr8s.asyncio.api(
                    kubeconfig=self._kubeconfig or None, context=self._context or None
                )
            api.timeout = self._timeout_s
            if not self._namespace:
                own = "" if self._kubeconfig else await asyncio.to_thread(_own_namespace)
                self._namespace = own or api.namespace
            self._api = api
        return self._api


def _own_namespace() -> str:
    try:
        with open(OWN_NAMESPACE, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def _why(error: BaseException) -> str:
    return " ".join(str(error).split())[:SHOWN] or type(error).__name__


def _read(response: httpx.Response) -> ApiAnswer:
    try:
        body = response.json()
    except ValueError:
        body = {"message": response.text}
    try:
        retry_s = float(response.headers["Retry-After"])
    except (KeyError, ValueError):
        retry_s = None
    return ApiAnswer(response.status_code, body if isinstance(body, Mapping) else {}, retry_s)


class KubernetesDriver:
    """The machines of one pool, as Jobs of one pod each, or as pods.

    Args:
        api: the API server.
        pods: what a machine is there.

    Raises:
        BadInput: kr8s is not installed.
    """

    def __init__(self, api: KubernetesApi, pods: MachinePods) -> None:
        self._api = api
        self._pods = pods
        self._form = pods.rules.form
        self._kind, self._version = ("jobs", "batch/v1") if self._form == "job" else ("pods", "v1")
        self._owner: Manifest | None = None
        self._waits: dict[str, str] = {}
        """Why pods don't run yet, as the log has it."""

    @property
    def idempotent(self) -> bool:
        return True

    async def order(self, machine: str) -> None:
        await self._order(machine, None)

    async def order_in_gang(self, machine: str, gang: str, size: int) -> None:
        """As `order`; Kueue admits the pods of a gang together, where the pool names a queue."""
        await self._order(machine, (gang, size))

    async def _order(self, machine: str, gang: tuple[str, int] | None) -> None:
        owner = await self._owner_reference()
        answer = ApiAnswer(200)
        if self._form == "job":  # what a Job's pod is refused for, nobody would hear of
            pod = self._pods.pod(machine)
            answer = await self._api.ask("POST", "pods", body=pod, params={"dryRun": "All"})
        is_pod_fine = answer.is_ok or (answer.status == 409 and _is_taken(answer))
        if is_pod_fine:
            body = self._pods.machine(machine, owner, gang)
            answer = await self._api.ask("POST", self._kind, version=self._version, body=body)
            if answer.is_ok:
                return
        is_refused = 400 <= answer.status < 500 and answer.status not in UNCERTAIN
        if not is_refused and not _is_taken(answer):
            raise Unavailable(answer.text)
        present = await self._api.ask("GET", f"{self._kind}/{machine}", version=self._version)
        if present.is_ok:
            if self._pods.is_own(present.body):
                return
            raise Refused(f"there is a {self._form} {machine} already, which is not of this pool")
        if present.status != 404 or not is_refused:
            raise Unavailable(f"{answer.text}; is it there? {present.text}")
        raise Refused(answer.text)

    async def release(self, machine: str) -> None:
        """Deletes it; it is listed until its pod has ended, which has its grace for that."""
        params = {"propagationPolicy": "Foreground"}
        path = f"{self._kind}/{machine}"
        answer = await self._api.ask("DELETE", path, version=self._version, params=params)
        if not answer.is_ok and answer.status != 404:
            raise Unavailable(answer.text)

    async def machines(self) -> frozenset[str]:
        found = await self._listed(self._kind, self._version, {})
        ended = {each["metadata"]["name"]: ended_at(each) for each in found}
        there = frozenset(name for name, at in ended.items() if at is None)
        for name, at in ended.items():
            if at is not None and at + self._pods.rules.keep_s < time.time():
                await self.release(name)
        pods = found
        if self._form == "job":
            pods = await self._listed("pods", "v1", {"fieldSelector": "status.phase=Pending"})
        self._tell_waits(pods, there)
        return there

    async def _listed(self, kind: str, version: str, params: Mapping[str, str]) -> list[Mapping[str, Any]]:
        """All objects of the pool, as the store has them: no copy of the API server's is older."""
        found: list[Mapping[str, Any]] = []
        more, anew = "", False
        while True:
            page = {**params, "labelSelector": self._pods.selector, "limit": str(PAGE)}
            if more:
                page["continue"] = more
            answer = await self._api.ask("GET", kind, version=version, params=page)
            if answer.status == 410 and not anew:  # the first page is too old by now
                found, more, anew = [], "", True
                continue
            if not answer.is_ok:
                raise Unavailable(answer.text)
            found += answer.body.get("items") or ()
            more = answer.body.get("metadata", {}).get("continue") or ""
            if not more:
                return found

    def _tell_waits(self, pods: list[Mapping[str, Any]], there: frozenset[str]) -> None:
        """Logs why pods don't run yet: there is no node for them, or no image."""
        waits = {}
        for pod in pods:
            metadata = pod["metadata"]
            machine = (metadata.get("labels") or {}).get(MACHINE_LABEL, "")
            if machine in there and (why := obstacle(pod)):
                waits[machine] = why
                if self._waits.get(machine) != why:
                    log.info("a pod waits", machine=machine, reason=why)
        self._waits = waits

    async def _owner_reference(self) -> Manifest | None:
        """The reference to the owner of all machines, which is asked for once.

        Raises:
            Unavailable: nobody knows it.
        """
        name = self._pods.rules.owner
        if not name or self._owner is not None:
            return self._owner
        answer = await self._api.ask("GET", f"configmaps/{name}")
        if not answer.is_ok:
            raise Unavailable(f"the ConfigMap {name}, the machines' owner: {answer.text}")
        uid = answer.body["metadata"]["uid"]
        self._owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": uid}
        return self._owner


def _is_taken(answer: ApiAnswer) -> bool:
    return answer.status == 409 and answer.body.get("reason") == "AlreadyExists"
