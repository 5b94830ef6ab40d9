"""How much of a mesh one user may take: said when refused, over HTTP and at the NATS door."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from bus import subjects
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from dmsc.client.async_client import AsyncClient
from entities.authorizer.access.access_policy import default_text
from entities.gateway import Gateway, GatewayConfig
from entities.service_registry.service import ServiceRegistry
from schemas.envelope import EntityKind
from schemas.errors import OverQuota, Refused
from schemas.gateway_api import DoorRequest, UploadHold
from schemas.job import JobSpec, JobState
from schemas.quota import GIB
from tests.builders.jobs import job
from tests.integration.entities.conftest import Dial, Start, mesh_without_nodes
from tests.patience import PATIENCE_S
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
QUOTAS = """
quotas:
  - {name: small, roles: [researcher], jobs: 2, slots: 5, stored_gib: 1, datasets: 2}
"""

UPLOADS = """
quotas:
  - {name: tight, roles: [researcher], stored_gib: 1, datasets: 3}
"""


@pytest.fixture
async def url(
    dial: Dial, start: Start, registry: ServiceRegistry, tmp_path: Path, request: pytest.FixtureRequest
) -> str:
    """A mesh without nodes: whatever is submitted waits, and counts."""
    quotas = UPLOADS if "doors" in request.fixturenames else QUOTAS
    access = default_text().partition("\nquotas:")[0] + quotas
    users = {"ruth": "researcher", "rob": "researcher", "olga": "operator"}
    return await mesh_without_nodes(dial, start, tmp_path, access, users)


@pytest.fixture
async def ruth(url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(url, token="ruth") as client:
        yield client


def wide(replicas: int, name: str = "wide") -> JobSpec:
    record = job().spec
    return record.model_copy(
        update={
            "name": name,
            "parallel": record.parallel.model_copy(update={"stages": 1, "replicas": replicas, "standbys": 0}),
        }
    )


async def test_no_more_jobs_or_slots_than_a_user_may_have(url: str, ruth: AsyncClient, dial: Dial) -> None:
    with pytest.raises(OverQuota, match=r"at most 5 \(quota small\).* would add 6; ask for fewer"):
        await ruth.submit(wide(6))
    first = await ruth.submit(wide(4))
    with pytest.raises(OverQuota, match=r"you have 4, this would add 2"):
        await ruth.submit(wide(2))
    await ruth.submit(wide(1))
    with pytest.raises(OverQuota, match=r"not ended: at most 2 .* wait for one of them, or cancel"):
        await ruth.submit(wide(1))
    client: Bus = await dial("a-client")
    request = DoorRequest(token="ruth", action="job.submit", spec=wide(1))
    with pytest.raises(OverQuota, match="at most 2"):
        await client.command(subjects.DOOR, request, deadline_s=PATIENCE_S, action="submit")

    me = await ruth.whoami()
    assert me.quota is not None
    assert (me.quota.jobs, me.quota.slots) == (2, 5)
    assert (me.use.jobs, me.use.slots) == (2, 5)
    async with AsyncClient(url, token="rob") as rob:  # a quota is each user's own
        await rob.submit(wide(5))
    async with AsyncClient(url, token="olga") as olga:  # operators have none
        for _ in range(3):
            await olga.submit(wide(9))
        assert (await olga.whoami()).quota is None
    assert (await ruth.cancel(first.job)).state is not JobState.DONE
    await ruth.wait(first.job)
    await ruth.submit(wide(4))


async def test_submissions_at_once_count_one_after_the_other(ruth: AsyncClient) -> None:
    answers = await asyncio.gather(*(ruth.submit(wide(1)) for _ in range(8)), return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, OverQuota)]
    assert (len(answers) - len(refused), len(refused)) == (2, 6)


async def test_data_sets_and_bytes_have_an_owner_and_an_end(url: str, ruth: AsyncClient) -> None:
    await ruth.upload_dataset("one", b"x" * 1000)
    await ruth.upload_dataset("two.v2", b"y" * 500)
    with pytest.raises(OverQuota, match=r"data sets and feeds: at most 2 .* you have 2"):
        await ruth.upload_dataset("three", b"z")
    await ruth.upload_dataset("one", b"x" * 10)  # one in the place of another is none more
    use = (await ruth.whoami()).use
    assert (use.datasets, use.stored_bytes) == (2, 510)
    async with AsyncClient(url, token="rob") as rob:
        with pytest.raises(Refused, match="data set one is ruth's; store yours under another name"):
            await rob.upload_dataset("one", b"mine now")
        await rob.upload_dataset("three", b"z")
        assert (await rob.whoami()).use.datasets == 1
    async with AsyncClient(url, token="olga") as olga:
        await olga.delete_dataset("two.v2")
    await ruth.upload_dataset("four", b"w")


# --- uploads at once ----------------------------------------------------------------------------------------

THIRD = 350_000_000
"""Bytes: three have room in the GiB that a researcher has, and a fourth has none."""
BODY = b"x"
"""The rest of one that has 10."""
CHILD = """
import asyncio, sys
from bus.connection import Bus
from entities.gateway import Gateway, GatewayConfig
from entities.gateway.http.config import HttpConfig
from schemas.envelope import EntityKind

async def main():
    async with Bus.connect(sys.argv[1], name="gateway-c", kind=EntityKind.GATEWAY) as bus:
        door = HttpConfig(upload_hold_s=2.0)
        gateway = Gateway(bus, GatewayConfig(cluster="c", http_port=0, door=door))
        ready = asyncio.Event()
        running = asyncio.create_task(gateway.run(ready))
        await ready.wait()
        print(gateway.url, file=sys.stderr, flush=True)
        await running

asyncio.run(main())
"""


class HalfUpload:
    """One that has sent its head and a part of its body."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self._writer = writer
        self.answer = asyncio.create_task(reader.readline())

    @classmethod
    async def begin(cls, url: str, name: str, size: int | None, user: str = "ruth") -> HalfUpload:
        place = urlsplit(url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        length = "transfer-encoding: chunked" if size is None else f"content-length: {size}"
        head = f"PUT /v1/datasets/{name} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {user}\r\n"
        head += f"{length}\r\n\r\n"
        writer.write(head.encode() + (b"a\r\n0123456789\r\n" if size is None else b"x" * 9))
        await writer.drain()
        return cls(name, reader, writer)

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    async def status(self) -> int:
        return int((await asyncio.wait_for(self.answer, PATIENCE_S)).split()[1])

    def leave(self) -> None:
        self.answer.cancel()
        self._writer.transport.abort()


@pytest.fixture
async def doors(url: str, dial: Dial, start: Start) -> list[str]:
    """Two gateways; researchers have room for three uploads."""
    gateway = Gateway(await dial("gateway-b", EntityKind.GATEWAY), GatewayConfig(cluster="b", http_port=0))
    await start(gateway)
    assert gateway.url is not None
    for each in (url, gateway.url):
        async with AsyncClient(each, token="ruth") as client:
            quota = (await client.whoami()).quota
            assert quota is not None
            assert quota.rule == "tight"
    return [url, gateway.url]


async def held(bus: Bus) -> tuple[UploadHold, ...]:
    """What is on its way."""
    entries = await bus.bucket(subjects.UPLOADS).entries()
    return tuple(hold for entry in entries for hold in entry.message.holds)


@pytest.mark.parametrize("size", [THIRD, 10], ids=["bytes", "data sets"])
async def test_eight_uploads_at_once_over_two_gateways_never_exceed_a_quota(
    doors: list[str], dial: Dial, size: int
) -> None:
    """Three fit, by either limit."""
    bus = await dial("gateway-look", EntityKind.GATEWAY)
    begun = await asyncio.gather(*(HalfUpload.begin(doors[n % 2], f"d{n}", size) for n in range(8)))
    await eventually(lambda: sum(one.answer.done() for one in begun) == 5)
    assert [await one.status() for one in begun if one.answer.done()] == [403] * 5
    first, *others = (one for one in begun if not one.answer.done())
    first.leave()  # what was kept for it is free again, for one and not for two
    tried = 0

    async def let_in() -> list[HalfUpload]:
        nonlocal tried
        tried += 1
        more = [await HalfUpload.begin(door, f"more{n}-{tried}", size) for n, door in enumerate(doors)]

        async def decided() -> bool:
            kept = {hold.name for hold in await held(bus)}
            return all(one.answer.done() or one.name in kept for one in more)

        await eventually(decided)
        return [one for one in more if not one.answer.done()]

    assert len(await eventually(let_in)) == 1
    for one in others:
        one.leave()


async def test_of_eight_small_ones_at_once_three_are_stored(doors: list[str], ruth: AsyncClient) -> None:
    begun = await asyncio.gather(*(HalfUpload.begin(doors[n % 2], f"d{n}", 10) for n in range(8)))
    await eventually(lambda: sum(one.answer.done() for one in begun) == 5)
    await asyncio.gather(*(one.send(BODY) for one in begun))
    assert sorted([await one.status() for one in begun]) == [201] * 3 + [403] * 5
    use = (await ruth.whoami()).use
    assert (use.stored_bytes, use.datasets) == (30, 3)


async def test_bodies_that_say_no_length_share_what_there_is(doors: list[str], ruth: AsyncClient) -> None:
    bound = await HalfUpload.begin(doors[0], "bound", GIB - 8_000)
    begun = await asyncio.gather(*(HalfUpload.begin(doors[n % 2], f"d{n}", None) for n in range(2)))
    for _ in range(5):
        await asyncio.gather(*(one.send(b"3e8\r\n" + b"x" * 1_000 + b"\r\n") for one in begun))
    await asyncio.gather(*(one.send(b"0\r\n\r\n") for one in begun))
    statuses = [await one.status() for one in begun]
    assert set(statuses) <= {201, 403}
    assert 403 in statuses, "both have 5,010 bytes"
    assert (await ruth.whoami()).use.stored_bytes == 5_010 * statuses.count(201)
    bound.leave()


async def test_a_name_is_of_who_began_first(doors: list[str], dial: Dial) -> None:
    bus = await dial("gateway-look", EntityKind.GATEWAY)
    async with AsyncClient(doors[1], token="rob") as rob:
        mine = await HalfUpload.begin(doors[0], "same", 10)
        await eventually(partial(held, bus))
        with pytest.raises(Refused, match="data set same is ruth's"):
            await rob.upload_dataset("same", b"y")
        await mine.send(BODY)
        assert await mine.status() == 201
        gone = await HalfUpload.begin(doors[0], "other", 10)
        gone.leave()

        async def free() -> bool:
            try:
                await rob.upload_dataset("other", b"y")
            except Refused:
                return False
            return True

        await eventually(free)
        assert (await rob.whoami()).use.datasets == 1


async def test_what_a_killed_gateway_kept_room_for_ends(
    doors: list[str], ruth: AsyncClient, own_server: EmbeddedServer, dial: Dial
) -> None:
    bus = await dial("gateway-look", EntityKind.GATEWAY)
    with subprocess.Popen(  # noqa: ASYNC220  # takes a moment
        [sys.executable, "-c", CHILD, own_server.url],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stderr is not None
            url = (await asyncio.to_thread(child.stderr.readline)).strip()
            upload = await HalfUpload.begin(url, "lost", GIB - 1_000)
            (first,) = await eventually(partial(held, bus))

            async def longer() -> bool:  # than room is kept for one that is not heard of
                return any(hold.until > first.until + 2.0 for hold in await held(bus))

            await eventually(longer)
            with pytest.raises(OverQuota, match="what is stored on the bus: at most"):
                await ruth.upload_dataset("tried", b"x" * 3_000)
            assert not upload.answer.done()
        finally:
            child.kill()

    async def free() -> bool:
        try:
            await ruth.upload_dataset("tried", b"x" * 3_000)
        except OverQuota:
            return False
        return True

    await eventually(free)
    assert (await ruth.whoami()).use.stored_bytes == 3_000
    assert await held(bus) == ()


async def test_a_body_that_says_no_length_ends_where_the_quota_does(url: str, tmp_path: Path) -> None:
    rules = default_text().partition("\nquotas:")[0]
    rules += "\nquotas:\n  - {name: none, roles: [researcher], stored_gib: 0}\n"
    (tmp_path / "access.yaml").write_text(rules)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * 100

    async with httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer ruth"}) as http:
        async with asyncio.timeout(PATIENCE_S):
            while True:  # until the authorizer has read its file again
                answer = await http.put("/v1/datasets/endless", content=pieces())
                if answer.status_code == 403:
                    break
    assert answer.json()["code"] == "over_quota"
    assert "at most 0 GiB (quota none)" in answer.json()["detail"]
