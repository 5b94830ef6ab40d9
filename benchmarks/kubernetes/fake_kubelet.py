"""Nodes of a real API server whose pods run as processes of this machine.

There are no images, no networks and no mounts: the image of every container is this checkout, an address
is always loopback, and a volume is a folder whose path stands where the container's mount path would. A pod
that is deleted gets SIGTERM, and SIGKILL when its grace is over; so does one that a taint evicts. Whoever is
given a token of the API server finds it in a kubeconfig. Probes are not asked: what runs is ready.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import httpx
import yaml

Object = dict[str, Any]
MERGE = {"Content-Type": "application/strategic-merge-patch+json"}
OWN_PATHS = ("/run/dmsc", "/var/lib/dmsc", "/etc/dmsc")
"""Mount paths that are replaced; others, as /tmp, are this machine's."""


class ApiFailure(Exception):
    """The API server has answered with an error."""


class PodProcess(Protocol):
    """What is used of a pod's process."""

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


StartsPod = Callable[[Sequence[str], Mapping[str, str], Path], PodProcess]
"""Starts `dmsc` with these words and this environment; its output is appended to the file."""


def start_dmsc(words: Sequence[str], environment: Mapping[str, str], log: Path) -> PodProcess:
    """`python -m dmsc WORDS`, as a new interpreter."""
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "dmsc", *words], env=environment, stdout=out, stderr=out
        )


class ApiClient:
    """The administrator's questions to the API server."""

    def __init__(self, kubeconfig: Path) -> None:
        self.document = yaml.safe_load(kubeconfig.read_text())
        server = self.document["clusters"][0]["cluster"]["server"]
        token = self.document["users"][0]["user"]["token"]
        self.http = httpx.AsyncClient(
            base_url=server, verify=False, headers={"Authorization": f"Bearer {token}"}, timeout=60
        )

    async def ask(self, method: str, path: str, body: Object | None = None, **more: Any) -> Object:
        """What is answered.

        Raises:
            ApiFailure: an error.
        """
        answer = await self.http.request(method, path, json=body, **more)
        if not answer.is_success:
            raise ApiFailure(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        found = answer.json()
        assert isinstance(found, dict)
        return found

    async def patch(self, path: str, body: Object) -> int:
        """A strategic merge; the answer's status."""
        answer = await self.http.patch(path, content=json.dumps(body), headers=MERGE)
        return answer.status_code

    async def items(self, path: str, **parameters: str) -> list[Object]:
        """The objects of a list."""
        found = (await self.ask("GET", path, params=parameters))["items"]
        assert isinstance(found, list)
        return found


@dataclass
class FakeKubelet:
    """Runs the pods that the scheduler gave to its nodes.

    Args:
        nodes: name → labels.
        capacity: of each node: cpu, memory, pods, nvidia.com/gpu.
        environment: of all pods, beside this process's.
        start: starts a pod's process.
    """

    api: ApiClient
    folder: Path
    nodes: Mapping[str, Mapping[str, str]]
    capacity: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)
    start: StartsPod = start_dmsc
    began: list[str] = field(default_factory=list)
    """Names of pods whose process was started, in this order."""
    signalled: list[str] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    """Exit codes by pod."""
    _processes: dict[str, PodProcess] = field(default_factory=dict)
    _tasks: dict[tuple[str, str], asyncio.Task[None]] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeKubelet]:
        """Its nodes are ready until the end of the block, which no process outlives."""
        for name, labels in self.nodes.items():
            await self._register(name, labels)
        watching = asyncio.create_task(self._watch())
        try:
            yield self
        finally:
            watching.cancel()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.wait({watching, *self._tasks.values()})
            for process in self._processes.values():
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
                await asyncio.to_thread(process.wait)

    async def _register(self, name: str, labels: Mapping[str, str]) -> None:
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}}
        await self.api.ask("POST", "/api/v1/nodes", {"metadata": metadata, "spec": {}})
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Test",
            "message": "",
            **_times("lastHeartbeat"),
        }
        resources = {"pods": "100", **self.capacity}
        status = {"capacity": resources, "allocatable": resources, "conditions": [ready]}
        code = await self.api.patch(f"/api/v1/nodes/{name}/status", {"status": status})
        if code != 200:
            raise ApiFailure(f"node {name}: its status is answered with {code}")
        # new nodes are tainted until the controllers have seen that they are ready
        await self.api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": []}})

    async def _watch(self) -> None:
        version = ""
        while True:
            try:
                if not version:
                    found = await self.api.ask("GET", "/api/v1/pods")
                    version = found["metadata"]["resourceVersion"]
                    for pod in found["items"]:
                        self._heard(pod)
                parameters = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "300"}
                watch = self.api.http.stream("GET", "/api/v1/pods", params=parameters, timeout=None)
                async with watch as lines:
                    async for line in lines.aiter_lines():
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            version = ""
                            break
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "DELETED":
                            self._heard(event["object"])
            except (httpx.HTTPError, ApiFailure):  # the API server is away, and comes back
                version = ""
                await asyncio.sleep(0.2)

    def _heard(self, pod: Object) -> None:
        metadata = pod["metadata"]
        if pod["spec"].get("nodeName") not in self.nodes:
            return
        if "deletionTimestamp" in metadata:
            self._begin("stop", pod)
        elif pod["status"].get("phase") == "Pending":
            self._begin("run", pod)

    def _begin(self, what: str, pod: Object) -> None:
        key = (what, pod["metadata"]["uid"])
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._run(pod) if what == "run" else self._stop(pod))

    # --- one pod ------------------------------------------------------------------------------------------
    async def _run(self, pod: Object) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        (container,) = pod["spec"]["containers"]
        paths = await self._volumes(pod, container)
        environment = {**os.environ, **self.environment, **await self._account(pod)}
        for each in container.get("env", ()):
            environment[each["name"]] = _placed(await self._value(pod, each), paths)
        words = [*container.get("command", ())[1:], *container.get("args", ())]
        words = [_placed(word, paths) for word in words]
        log = self.folder / f"{name}.log"
        self.began.append(name)
        while True:
            process = self.start(words, environment, log)
            self._processes[uid] = process
            await self._tell(pod, "Running", {"running": {"startedAt": _now()}})
            code = await asyncio.to_thread(process.wait)
            if pod["spec"]["restartPolicy"] != "Always" or ("stop", uid) in self._tasks:
                break
            await asyncio.sleep(1)
        self.ended[name] = code
        over = {"exitCode": abs(code), "startedAt": _now(), "finishedAt": _now(), "reason": "Ended"}
        await self._tell(pod, "Failed" if code else "Succeeded", {"terminated": over})

    async def _account(self, pod: Object) -> dict[str, str]:
        """Where a pod finds the API server and the token of its service account, if it is given one."""
        if not pod["spec"].get("automountServiceAccountToken", True):
            return {}
        name, namespace = pod["spec"]["serviceAccountName"], pod["metadata"]["namespace"]
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}}
        token = (await self.api.ask("POST", path, asked))["status"]["token"]
        document = self.api.document
        user, context = document["users"][0]["name"], document["contexts"][0]["context"]
        document = {
            **document,
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [
                {
                    "name": document["contexts"][0]["name"],
                    "context": {**context, "namespace": namespace},
                }
            ],
        }
        file = self.folder / f"{pod['metadata']['name']}.kubeconfig"
        file.write_text(yaml.safe_dump(document))
        return {"KUBECONFIG": str(file)}

    async def _stop(self, pod: Object) -> None:
        metadata = pod["metadata"]
        uid, process = metadata["uid"], self._processes.get(metadata["uid"])
        if process is not None and process.poll() is None:
            self.signalled.append(metadata["name"])
            process.send_signal(signal.SIGTERM)
            grace_s = metadata.get("deletionGracePeriodSeconds", 30)
            running = self._tasks["run", uid]
            _, late = await asyncio.wait({running}, timeout=grace_s)
            if late:
                process.send_signal(signal.SIGKILL)
                await asyncio.wait({running})
        path = f"{_path(pod)}"
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = await self.api.http.request("DELETE", path, json=body)
                if answer.is_success or answer.status_code in (404, 409):
                    return
            await asyncio.sleep(0.2)

    async def _tell(self, pod: Object, phase: str, state: Object) -> None:
        ready = str(phase == "Running")
        kinds = {"Ready": ready, "ContainersReady": ready, "Initialized": "True", "PodScheduled": "True"}
        container = pod["spec"]["containers"][0]
        told = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
        status = {
            "phase": phase,
            "podIP": "127.0.0.1",
            "conditions": [{"type": kind, "status": is_so} for kind, is_so in kinds.items()],
            "containerStatuses": [{**told, "ready": phase == "Running", "state": state}],
        }
        while True:
            with contextlib.suppress(httpx.HTTPError):
                code = await self.api.patch(f"{_path(pod)}/status", {"status": status})
                if code in (200, 404, 409):
                    return
            await asyncio.sleep(0.2)

    async def _volumes(self, pod: Object, container: Object) -> dict[str, str]:
        """Mount paths of the container, and the folders that stand for them."""
        folders: dict[str, Path] = {}
        namespace = pod["metadata"]["namespace"]
        for volume in pod["spec"].get("volumes", ()):
            folder = self.folder / "volumes" / pod["metadata"]["uid"] / volume["name"]
            folder.mkdir(parents=True)
            folders[volume["name"]] = folder
            if "secret" in volume:
                name = volume["secret"]["secretName"]
                found = await self.api.ask("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}")
                for key, value in found.get("data", {}).items():
                    (folder / key).write_bytes(base64.b64decode(value))
                    (folder / key).chmod(0o600)
            elif "configMap" in volume:
                name = volume["configMap"]["name"]
                found = await self.api.ask("GET", f"/api/v1/namespaces/{namespace}/configmaps/{name}")
                for key, value in found.get("data", {}).items():
                    (folder / key).write_text(value)
        mounts = container.get("volumeMounts", ())
        return {
            each["mountPath"]: str(folders[each["name"]])
            for each in sorted(mounts, key=lambda each: -len(each["mountPath"]))
            if each["mountPath"].startswith(OWN_PATHS)
        }

    async def _value(self, pod: Object, entry: Object) -> str:
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            fields = {
                "metadata.name": pod["metadata"]["name"],
                "metadata.namespace": pod["metadata"]["namespace"],
                "spec.nodeName": pod["spec"]["nodeName"],
                "status.podIP": "127.0.0.1",
            }
            return str(fields[source["fieldRef"]["fieldPath"]])
        if "secretKeyRef" in source:
            name, key = source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]
            path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/secrets/{name}"
            return base64.b64decode((await self.api.ask("GET", path))["data"][key]).decode().strip()
        value = entry.get("value", "")
        assert isinstance(value, str)
        return value


def _placed(text: str, paths: Mapping[str, str]) -> str:
    """The text with each mount path replaced by the folder that stands for it, and loopback for anywhere."""
    text = text.replace("0.0.0.0", "127.0.0.1")
    for mount, folder in paths.items():
        text = text.replace(mount, folder)
    return text


def _path(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _times(name: str) -> dict[str, str]:
    return {f"{name}Time": _now(), "lastTransitionTime": _now()}
