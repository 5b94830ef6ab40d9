"""A small API server for tests of the driver: it stores objects, and answers as it is told to.

It has what the driver meets: a quota that is asked before a name is compared, 409, 410, 429, connections that
end before or after the work is done, tokens that expire, lists in pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Object = dict[str, Any]
HANGS = -1


@dataclass
class Trouble:
    """What happens to the next request of a method about a kind, in place of an answer or after its work."""

    method: str
    kind: str
    status: int = 0
    """0: the connection ends; `HANGS`: nothing is ever answered."""
    reason: str = ""
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    is_done: bool = False
    """The request is carried out all the same."""


@dataclass
class FakeApi:
    """Objects by kind and name."""

    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    troubles: deque[Trouble] = field(default_factory=deque)
    quota: int | None = None
    """Most pods; one that is created dry counts, too."""
    token: str = "first"
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    page: int = 1000
    met: list[Trouble] = field(default_factory=list)
    """Troubles that happened."""

    @contextlib.asynccontextmanager
    async def served(self, folder: Path) -> AsyncIterator[Path]:
        """Serves on a free port; yields a kubeconfig, whose token is the present one."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.kubeconfig = folder / "kubeconfig"
        self.write_token()
        try:
            yield self.kubeconfig
        finally:
            server.close()

    def write_token(self) -> None:
        """Writes the present token into the kubeconfig, as whoever renews it does."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": self.token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "train"}}],
            "current-context": "c",
        }
        self.kubeconfig.write_text(yaml.safe_dump(document))

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, target, _ = head[0].split(" ")
            headers = {
                key.lower(): value.strip() for key, _, value in (line.partition(":") for line in head[1:])
            }
            content = await reader.readexactly(int(headers.get("content-length", 0)))
            status, body, more = self._answer(method, target, headers, json.loads(content) if content else {})
            if status == HANGS:
                await asyncio.Event().wait()
            if status:
                text = json.dumps(body).encode()
                lines = {
                    "Content-Type": "application/json",
                    "Content-Length": str(len(text)),
                    "Connection": "close",
                    **more,
                }
                said = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
                writer.write(f"HTTP/1.1 {status} x\r\n{said}\r\n".encode() + text)
                await writer.drain()
        writer.close()

    def _answer(
        self, method: str, target: str, headers: dict[str, str], body: Object
    ) -> tuple[int, Object, dict[str, str]]:
        url = urlsplit(target)
        if url.path.rstrip("/") == "/version":
            return 200, {"gitVersion": "v1.34.0"}, {}
        kind, _, name = url.path.partition("/namespaces/train/")[2].partition("/")
        self.requests[method, kind] += 1
        if headers.get("authorization") != f"Bearer {self.token}":
            return *failure(401, "Unauthorized", "Unauthorized"), {}
        parameters = {key: values[0] for key, values in parse_qs(url.query).items()}
        trouble = next((each for each in self.troubles if (each.method, each.kind) == (method, kind)), None)
        if trouble is not None:
            self.troubles.remove(trouble)
            self.met.append(trouble)
            if trouble.is_done:
                self._do(method, kind, name, body, parameters)
            return *failure(trouble.status, trouble.reason, trouble.message), trouble.headers
        return *self._do(method, kind, name, body, parameters), {}

    def _do(
        self, method: str, kind: str, name: str, body: Object, parameters: dict[str, str]
    ) -> tuple[int, Object]:
        if method == "POST":
            return self._create(kind, body, dry="dryRun" in parameters)
        if method == "GET" and not name:
            return self._list(kind, parameters)
        found = self.objects.get((kind, name))
        if found is None:
            return failure(404, "NotFound", f'{kind} "{name}" not found')
        if method == "DELETE":
            del self.objects[kind, name]
        return 200, found

    def _create(self, kind: str, body: Object, *, dry: bool) -> tuple[int, Object]:
        name = body["metadata"]["name"]
        if kind == "pods" and self.quota is not None and self._pods() >= self.quota:
            message = f'pods "{name}" is forbidden: exceeded quota: gpus, used: pods={self._pods()}'
            return failure(403, "Forbidden", message)
        if (kind, name) in self.objects:
            return failure(409, "AlreadyExists", f'{kind} "{name}" already exists')
        if not dry:
            self.objects[kind, name] = body
        return 201, body

    def _pods(self) -> int:
        """Pods that there are; each Job has one."""
        return len(self.objects)

    def _list(self, kind: str, parameters: dict[str, str]) -> tuple[int, Object]:
        wanted = dict(each.split("=") for each in parameters["labelSelector"].split(","))
        found = [
            each
            for (its, _), each in sorted(self.objects.items())
            if its == kind and wanted.items() <= each["metadata"].get("labels", {}).items()
        ]
        begin = int(parameters.get("continue", 0))
        end = begin + min(self.page, int(parameters["limit"]))
        more = {"continue": str(end)} if end < len(found) else {}
        return 200, {"metadata": more, "items": found[begin:end]}


def failure(status: int, reason: str, message: str) -> tuple[int, Object]:
    """An answer of kind Status."""
    return status, {"kind": "Status", "reason": reason, "message": message, "code": status}
