"""TLS on the bus: clients, servers among themselves, and who is not believed (ADR-0024)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bus import subjects
from bus.connection import Bus
from bus.nats import tls_trust
from bus.server.embedded import EmbeddedServer, Tls
from bus.server.embedded_cluster import EmbeddedCluster
from dmsc.state.certificates import make_certificates, still_good
from schemas.envelope import EntityKind
from schemas.errors import BadInput, BusUnreachable, NoResponders, Refused
from schemas.registry import Resolve, Resolved
from tests.patience import PATIENCE_S

HOSTS = ["localhost", "127.0.0.1"]


def certify(folder: Path, hosts: list[str] | None = None) -> Tls:
    files = make_certificates(folder, hosts or HOSTS)
    return Tls(certificate=files.server, key=files.server_key, ca=files.ca)


async def ask_around(one: Bus, other: Bus) -> None:
    async def answer(message: Resolve, envelope: object) -> Resolved:
        return Resolved(revision=7, records=())

    if not other._subscriptions:
        await other.serve(subjects.RESOLVE, answer)
    assert (await one.request(subjects.RESOLVE, Resolve(), timeout_s=PATIENCE_S)).revision == 7


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tls:
    made = certify(tmp_path / "tls")
    monkeypatch.setenv(tls_trust.VARIABLE, str(made.ca))
    return made


async def test_clients_speak_tls_and_come_back_after_a_restart(tls: Tls, tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "nats", token="s3cret", tls=tls) as server:
        assert server.url.startswith("tls://")
        async with (
            Bus.connect(server.url, name="one", kind=EntityKind.CLIENT, token="s3cret") as one,
            Bus.connect(server.url, name="two", kind=EntityKind.SERVICE_REGISTRY, token="s3cret") as two,
        ):
            await ask_around(one, two)
            back = asyncio.Event()

            async def heard() -> None:
                back.set()

            one.on_reconnect(heard)
            await server.restart()
            async with asyncio.timeout(PATIENCE_S):
                await back.wait()


async def test_a_server_of_another_ca_is_refused_with_one_line(
    tls: Tls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = certify(tmp_path / "other")
    async with EmbeddedServer(tmp_path / "nats", token="s3cret", tls=other) as server:
        with pytest.raises(Refused) as caught:
            async with Bus.connect(server.url, name="one", kind=EntityKind.CLIENT, token="s3cret"):
                pass
        assert "shows a certificate that is not accepted" in caught.value.text
        assert str(tls.ca) in caught.value.text
        assert "\n" not in caught.value.text
        assert "s3cret" not in caught.value.text
        monkeypatch.setenv(tls_trust.VARIABLE, str(other.ca))
        async with Bus.connect(server.url, name="one", kind=EntityKind.CLIENT, token="s3cret"):
            pass


async def test_a_certificate_for_another_name_is_refused(tls: Tls, tmp_path: Path) -> None:
    elsewhere = certify(tmp_path / "tls", ["mesh.example.org"])  # the same CA
    async with EmbeddedServer(tmp_path / "nats", token="s3cret", tls=elsewhere) as server:
        with pytest.raises(Refused, match="not accepted"):
            async with Bus.connect(server.url, name="one", kind=EntityKind.CLIENT, token="s3cret"):
                pass


async def test_nobody_between_talks_a_client_out_of_tls(tls: Tls, tmp_path: Path) -> None:
    """A server (or somebody in between) that offers no encryption gets no token."""
    heard = bytearray()

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b'INFO {"server_id":"x","version":"2.12.0","max_payload":1048576,"tls_required":false}\r\n'
        )
        while data := await reader.read(4096):
            heard.extend(data)
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises((BusUnreachable, Refused)):
            async with Bus.connect(
                f"tls://127.0.0.1:{port}",
                name="one",
                kind=EntityKind.CLIENT,
                token="s3cret",
                connect_timeout_s=1.0,
            ):
                pass
    assert b"s3cret" not in heard
    assert b"CONNECT" not in heard


async def test_servers_of_a_cluster_speak_tls_to_each_other(tls: Tls, tmp_path: Path) -> None:
    async with (
        EmbeddedCluster(tmp_path / "nats", size=3, token="s3cret", tls=tls) as cluster,
        Bus.connect(cluster.urls[0], name="one", kind=EntityKind.CLIENT, token="s3cret") as one,
        Bus.connect(cluster.urls[1], name="two", kind=EntityKind.SERVICE_REGISTRY, token="s3cret") as two,
    ):
        async with asyncio.timeout(PATIENCE_S):
            while True:  # the routes come up within moments
                try:
                    await ask_around(one, two)
                    break
                except NoResponders:
                    await asyncio.sleep(0.05)


def test_a_ca_that_is_none_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = tmp_path / "ca.pem"
    monkeypatch.setenv(tls_trust.VARIABLE, str(nothing))
    with pytest.raises(BadInput, match=r"ca\.pem: No such file"):
        tls_trust.context()
    nothing.write_text("not a certificate")
    with pytest.raises(BadInput, match="see `dmsc cert`"):
        tls_trust.context()


def test_keys_are_private_and_a_ca_stays(tmp_path: Path) -> None:
    files = make_certificates(tmp_path, HOSTS)
    ca, server = files.ca.read_bytes(), files.server.read_bytes()
    assert {path.stat().st_mode & 0o777 for path in (files.ca_key, files.server_key)} == {0o600}
    assert still_good(files, HOSTS)
    assert not still_good(files, [*HOSTS, "10.0.0.5"])
    make_certificates(tmp_path, [*HOSTS, "10.0.0.5"])
    assert files.ca.read_bytes() == ca
    assert files.server.read_bytes() != server
    assert still_good(files, [*HOSTS, "10.0.0.5"])
    files.ca_key.write_text("broken")
    with pytest.raises(BadInput, match="belong together"):
        make_certificates(tmp_path, HOSTS)
    with pytest.raises(BadInput, match="name each"):
        make_certificates(tmp_path / "b", [])
