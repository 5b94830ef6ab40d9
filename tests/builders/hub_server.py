"""A stand-in for the Hugging Face hub on loopback: one data set, whose branch can be moved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

from tests.builders.range_server import served


class HubServer:
    """The data set `org/name`: commit → files; `main` is the commit that the branch names."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.main = ""
        self.url = ""
        self.requests: list[str] = []

    def commit(self, files: dict[str, bytes]) -> str:
        """A new commit, to which the branch moves."""
        name = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[name], self.main = files, name
        return name

    def files(self, revision: str) -> tuple[str, dict[str, bytes]]:
        commit = self.main if revision == "main" else revision
        return commit, self.commits[commit]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(request.path.partition("?")[0])
        self.requests.append(f"{request.command} {path} {request.headers.get('Range', '')}")
        api = "/api/datasets/org/name"
        if path == api or path.startswith(f"{api}/revision/"):
            commit, files = self.files(path.partition("/revision/")[2] or "main")
            siblings = [{"rfilename": name} for name in files]
            self.json(request, {"id": "org/name", "sha": commit, "siblings": siblings, "private": False})
        elif path.startswith((f"{api}/paths-info/", f"{api}/tree/")):
            revision, _, below = path.split("/", 6)[6].partition("/")
            _, files = self.files(revision)
            wanted = set(files)
            if "/paths-info/" in path:
                body = request.rfile.read(int(request.headers["Content-Length"])).decode()
                sent = (
                    json.loads(body) if body.startswith("{") else {"paths": [unquote(body.split("=", 1)[1])]}
                )
                wanted &= set(sent["paths"])
            self.json(
                request,
                [
                    {"type": "file", "path": name, "size": len(files[name]), "oid": "0" * 40}
                    for name in sorted(wanted)
                    if name.startswith(below)
                ],
            )
        elif path.startswith("/datasets/org/name/resolve/"):
            revision, _, name = path.removeprefix("/datasets/org/name/resolve/").partition("/")
            commit, files = self.files(revision)
            self.file(request, commit, files.get(name))
        else:
            request.send_error(404)

    def json(self, request: BaseHTTPRequestHandler, value: Any) -> None:
        data = json.dumps(value).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def file(self, request: BaseHTTPRequestHandler, commit: str, data: bytes | None) -> None:
        if data is None:
            request.send_error(404)
            return
        span = request.headers.get("Range")
        first, last = (
            (int(each) for each in span.removeprefix("bytes=").split("-")) if span else (0, len(data))
        )
        part = data[first : last + 1]
        request.send_response(206 if span else 200)
        request.send_header("ETag", f'"{hashlib.md5(data).hexdigest()}"')
        request.send_header("X-Repo-Commit", commit)
        request.send_header("Content-Length", str(len(part)))
        if span:
            request.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(part)


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A hub until the end of the block."""
    state = HubServer()
    with served(state.answer, "GET", "HEAD", "POST") as state.url:
        yield state
