"""Whoever may reach a gateway's port, and nothing more: they keep nobody out, and learn and run nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import pytest_asyncio

from bus.nats import tls_trust
from dmsc.client.async_client import AsyncClient
from dmsc.metrics.exposition import Exposition
from dmsc.metrics.listener import MetricsOptions, listening
from dmsc.state.certificates import make_certificates
from entities.authorizer import Authorizer
from entities.gateway import Gateway, GatewayConfig
from entities.gateway.http.admission.admission import ONCE
from entities.gateway.http.config import HttpConfig
from entities.gateway.http.rate_limit import RequestRate
from entities.http_server.connection_limits import ConnectionBounds, OpenConnections
from schemas.envelope import EntityKind
from schemas.job import JobSpec
from tests.integration.entities.conftest import Dial, Start, bearer
from tests.integration.entities.stand_in_orchestrator import StandInOrchestrator
from tests.patience import NEVER_S, PATIENCE_S
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
JOB = {"name": "tiny", "model": {"factory": "models:build"}, "training": {"steps": 2}}
SILENT = b""
HALF_HEAD = b"GET /v1/jobs HTTP/1.1\r\nhost: a\r\nx-slow: "
HALF_BODIES = (
    b"POST /v1/users HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\ncontent-type: application/json\r\n\r\n{",
    b"POST /v1/jobs HTTP/1.1\r\nhost: a\r\nauthorization: Bearer guess\r\ncontent-length: 1000\r\n\r\n{",
    b"PUT /v1/datasets/x HTTP/1.1\r\nhost: a\r\nauthorization: Bearer guess\r\n"
    b"transfer-encoding: chunked\r\n\r\n5\r\nab",
)
PATIENT: dict[str, Any] = {"head_s": NEVER_S, "body_s": NEVER_S, "answer_s": NEVER_S}
"""No deadline comes to the help of whoever is kept out."""


@pytest_asyncio.fixture
async def strangers() -> AsyncIterator[Strangers]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8_192)), hard))
    found = Strangers()
    yield found
    found.leave()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Strangers:
    """Connections of nobody in particular, from ten addresses, which stay as they are."""

    def __init__(self) -> None:
        self.open: list[socket.socket] = []
        hosts = [f"127.0.0.{number}" for number in range(2, 12)] if sys.platform == "linux" else [""]
        self._hosts = cycle(hosts)

    async def come(self, url: str | None, count: int, *words: bytes) -> None:
        assert url is not None
        place = urlsplit(url)
        loop = asyncio.get_running_loop()
        for _, said in zip(range(count), cycle(words), strict=False):
            one = socket.socket()
            self.open.append(one)
            one.setblocking(False)
            if host := next(self._hosts):
                one.bind((host, 0))
            await loop.sock_connect(one, (place.hostname, place.port))
            if said:
                with contextlib.suppress(ConnectionError):  # it made room already
                    await loop.sock_sendall(one, said)

    def leave(self) -> None:
        for one in self.open:
            one.close()


async def gateway_with(dial: Dial, start: Start, door: HttpConfig, **more: Any) -> Gateway:
    service = Gateway(
        await dial("gateway-east", EntityKind.GATEWAY),
        GatewayConfig(cluster="east", http_port=0, door=door, **more),
    )
    await start(service)
    return service


@pytest.mark.parametrize("bounds", [{}, {"waiting": 100, "connections": 150}], ids=["default", "few"])
async def test_600_half_open_strangers_keep_nobody_out(
    dial: Dial,
    start: Start,
    authorizer: Authorizer,
    smo: StandInOrchestrator,
    strangers: Strangers,
    bounds: dict[str, Any],
) -> None:
    gateway = await gateway_with(dial, start, HttpConfig(**PATIENT, **bounds))
    await strangers.come(gateway.url, 90, SILENT)
    await strangers.come(gateway.url, 90, HALF_HEAD)
    await strangers.come(gateway.url, 420, *HALF_BODIES)
    assert len(strangers.open) == 600
    assert gateway.http is not None
    assert gateway.http.connections.cut["room"] >= (450 if bounds else 0)
    # of those who were never let in before, too: this gateway has seen no token yet
    async with AsyncClient(gateway.url, token="ruth") as client:
        job = (await client.submit(JobSpec.model_validate(JOB))).job
        assert (await client.job(job)).user == "ruth"
    async with httpx.AsyncClient(base_url=str(gateway.url), timeout=PATIENCE_S, trust_env=False) as plain:
        for path in ("/healthz", "/readyz", "/dashboard/"):
            assert (await plain.get(path)).status_code in (200, 503), path  # of readyz: no registry record


async def test_200_half_open_strangers_keep_no_scraper_out_of_a_processs_own_metrics(
    strangers: Strangers,
) -> None:
    async with listening(MetricsOptions(), Exposition().render) as url:
        await strangers.come(url, 200, SILENT, HALF_HEAD)
        for _ in range(3):
            async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as http:
                assert "dmsc_log_lines_dropped_total" in (await http.get(url)).text


async def test_a_connection_to_metrics_has_deadlines(
    strangers: Strangers, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[OpenConnections] = []

    class Seen(OpenConnections):
        def __init__(self, bounds: ConnectionBounds) -> None:
            super().__init__(bounds)
            rooms.append(self)

    monkeypatch.setattr("dmsc.metrics.listener.OpenConnections", Seen)

    async def endless(accept: str) -> tuple[bytes, str]:
        if accept == "never":
            await asyncio.get_running_loop().create_future()
        return b"x" * (32 << 20), "text/plain"

    async def answer_to(url: str, said: bytes) -> bytes:
        place = urlsplit(url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(said)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        return answer

    bounds = ConnectionBounds(head_s=0.2, answer_s=0.2)
    async with listening(MetricsOptions(), endless, bounds) as url:
        assert await answer_to(url, SILENT) == b""
        assert (await answer_to(url, HALF_HEAD)).startswith(b"HTTP/1.1 408 ")
        assert await answer_to(url, b"GET /metrics HTTP/1.1\r\naccept: never\r\n\r\n") == b""
        await strangers.come(url, 1, b"GET /metrics HTTP/1.1\r\n\r\n")  # and does not read
        await eventually(lambda: rooms[0].cut["answer"] == 2)
        await eventually(lambda: not len(rooms[0]))
    assert rooms[0].cut == {"head": 2, "answer": 2}


async def test_strangers_in_a_tls_handshake_keep_nobody_out(
    dial: Dial,
    start: Start,
    authorizer: Authorizer,
    smo: StandInOrchestrator,
    strangers: Strangers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = make_certificates(tmp_path / "tls", ["127.0.0.1"])
    door = HttpConfig(waiting=8, connections=16, **PATIENT)
    gateway = await gateway_with(dial, start, door, tls=(files.server, files.server_key))
    await strangers.come(gateway.url, 40, SILENT, b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n")
    monkeypatch.setenv(tls_trust.VARIABLE, str(files.ca))
    async with AsyncClient(gateway.url, token="olga") as client:
        assert (await client.whoami()).user == "olga"
    assert gateway.http is not None
    assert gateway.http.connections.cut["room"] > 0


async def test_a_connection_that_owes_something_has_a_deadline(
    dial: Dial, start: Start, authorizer: Authorizer, smo: StandInOrchestrator
) -> None:
    gateway = await gateway_with(dial, start, HttpConfig(head_s=0.2, body_s=0.2, answer_s=0.2))
    place = urlsplit(str(gateway.url))

    async def answer_to(said: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(said)
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.read(), PATIENCE_S)
        return b""

    token = b"authorization: Bearer ruth\r\n"
    half_body = b"POST /v1/jobs HTTP/1.1\r\nhost: a\r\n" + token + b"content-length: 9\r\n\r\n{"
    whole = b"GET /v1/whoami HTTP/1.1\r\nhost: a\r\n" + token + b"\r\n"
    answers = await asyncio.gather(*(answer_to(said) for said in (SILENT, HALF_HEAD, half_body, whole)))
    assert answers[0] == answers[2] == b""
    assert answers[1].startswith(b"HTTP/1.1 408 ")
    assert answers[3].startswith(b"HTTP/1.1 200 ")
    unread = socket.socket()
    unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with unread:
        unread.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(unread, (place.hostname, place.port))
        asking = asyncio.ensure_future(
            loop.sock_sendall(unread, b"GET /v1/openapi.json HTTP/1.1\r\nhost: a\r\n\r\n" * 200)
        )
        assert gateway.http is not None
        cut = gateway.http.connections.cut
        await eventually(lambda: cut["answer"])
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert (cut["body"], cut["answer"]) == (1, 1)
    assert cut["head"] >= 2
    await eventually(lambda: not gateway.http.connections)


async def test_a_head_without_end_is_cut_off(gateway: Gateway) -> None:
    place = urlsplit(str(gateway.url))
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    with contextlib.suppress(ConnectionError):
        writer.write(b"GET / HTTP/1.1\r\n")
        while not reader.at_eof() and not writer.is_closing():
            writer.write(b"x-more: " + b"a" * 4000 + b"\r\n")
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    if not await reader.read(1000):
                        break
    await eventually(lambda: not gateway.http.connections)
    writer.close()


async def test_a_header_that_stands_twice_is_refused(gateway: Gateway) -> None:
    place = urlsplit(str(gateway.url))
    two = {name: b"%b: x\r\n%b: y\r\n" % (name, name.title()) for name in ONCE if name != b"content-length"}
    two[b"authorization"] = b"Authorization: Bearer ruth\r\nauthorization: Bearer olga\r\n"
    two[b"host"] = b"host: b\r\n"
    two[b"content-length"] = b"content-length: 2\r\ncontent-length: 3\r\n"
    for name, lines in two.items():
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(b"POST /v1/jobs HTTP/1.1\r\nhost: a\r\nconnection: close\r\n" + lines + b"\r\n{}")
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400 "), (name, answer)
        if name not in (b"host", b"content-length"):  # these the parser refuses in its own words
            assert b"the header %b stands there 2 times; send it once" % name in answer


@pytest.mark.parametrize("proxies", [(), ("127.0.0.0/8",)])
async def test_only_a_named_proxy_says_who_a_client_is(
    dial: Dial, start: Start, authorizer: Authorizer, smo: StandInOrchestrator, proxies: tuple[str, ...]
) -> None:
    door = HttpConfig(unknown_rate=RequestRate(per_s=1e-3, burst=1))
    gateway = await gateway_with(dial, start, door, proxies=proxies)
    async with httpx.AsyncClient(base_url=str(gateway.url), timeout=PATIENCE_S, trust_env=False) as http:
        found = [
            (await http.get("/v1/jobs", headers={"X-Forwarded-For": f"10.0.0.{number}"})).status_code
            for number in range(3)
        ]
    assert found == ([401, 401, 401] if proxies else [401, 429, 429])


async def test_nothing_of_others_runs_beside_the_dashboard(http: httpx.AsyncClient) -> None:
    paths = [path for path in (await http.get("/v1/openapi.json")).json()["paths"] if "{" not in path]
    for path in ["/", "/docs", "/dashboard/", "/nothing", "/v1/jobs/x/weights/y", *paths]:
        if path in ("/v1/live", "/v1/tap", "/v1/faults/events"):  # streams; the same headers, no end
            continue
        answer = await http.get(path, headers=bearer("olga"))
        policy = answer.headers.get_list("content-security-policy")
        assert len(policy) == 1, path
        assert "default-src 'none'" in policy[0], path
        assert not re.search(r"https?:|\*|unsafe", policy[0]), path
        assert answer.headers["x-content-type-options"] == "nosniff", path
        if answer.headers.get("content-type", "").startswith("text/html"):
            assert not re.search(r'(src|href)="?(https?:)?//', answer.text), path
    docs = (await http.get("/docs")).text
    assert "<script" not in docs
    assert "POST /v1/jobs<" in docs
    assert "JobSpec" in docs


# --- without descriptors ------------------------------------------------------------------------------------

STARVED = """
import asyncio, concurrent.futures.thread, os, resource, sys, traceback
from bus.logs import configure_logging
DOOR

async def main():
    async with door() as port:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        taken = []
        try:
            while True: taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError: pass
        print(port, flush=True)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, sys.stdin.readline)
        for one in taken: os.close(one)
        await loop.run_in_executor(None, sys.stdin.readline)

configure_logging()
asyncio.run(main())
"""
GATEWAY = """
import contextlib
from entities.http_server.connection_limits import OpenConnections
from entities.gateway.http.admission.deadlines import with_deadlines
from entities.gateway.http.config import HttpConfig
from entities.gateway.http.admission.listener import bind, configured, serving

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})

async def drain(): pass

@contextlib.asynccontextmanager
async def door():
    sock = bind("127.0.0.1", 0)
    config = configured(app)
    room = OpenConnections(HttpConfig())
    config.http_protocol_class = with_deadlines(config.http_protocol_class, room)
    async with serving(config, sock, drain, room):
        yield sock.getsockname()[1]
"""
METRICS = """
import contextlib
from urllib.parse import urlsplit
from dmsc.metrics.listener import MetricsOptions, listening

async def render(accept): return b"ok", "text/plain"

@contextlib.asynccontextmanager
async def door():
    async with listening(MetricsOptions(), render) as url:
        yield urlsplit(url).port
"""


@pytest.mark.parametrize("door", [GATEWAY, METRICS], ids=["gateway", "metrics"])
async def test_without_descriptors_it_waits_says_so_now_and_then_and_goes_on(door: str) -> None:
    with subprocess.Popen(  # noqa: ASYNC220  # takes a moment
        [sys.executable, "-c", STARVED.replace("DOOR", door, 1)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            port = int(await asyncio.to_thread(server.stdout.readline))
            answers = [asyncio.create_task(_get(port)) for _ in range(5)]
            said = [await asyncio.to_thread(server.stdout.readline) for _ in range(3)]
            assert all("no connection can be taken: Too many open files" in line for line in said), said
            tries = [json.loads(line)["times"] for line in said]
            assert tries[0] == 1
            assert max(tries) <= 12, "ten a second at the most, told once"
            assert not any(answer.done() for answer in answers)
            server.stdin.write("\n")
            server.stdin.flush()
            assert set(await asyncio.gather(*answers)) == {200}
            server.stdin.write("\n")
            server.stdin.close()
            rest = (await asyncio.to_thread(server.stdout.read)).splitlines()
            assert not [line for line in rest if "Traceback" in line]
        finally:
            server.kill()


async def _get(port: int) -> int:
    async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as http:
        return (await http.get(f"http://127.0.0.1:{port}/metrics")).status_code
