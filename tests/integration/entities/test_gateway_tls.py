"""A gateway's HTTP door with TLS: who is believed, and what others are told (ADR-0024)."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.nats import tls_trust
from dmsc.client.async_client import AsyncClient
from dmsc.state.certificates import make_certificates
from entities.authorizer import Authorizer
from entities.gateway import Gateway, GatewayConfig
from schemas.envelope import EntityKind
from schemas.errors import BadInput, Refused
from tests.integration.entities.conftest import Dial, Start


async def test_the_ca_decides_whether_a_gateway_is_believed(
    dial: Dial,
    start: Start,
    authorizer: Authorizer,
    smo: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = make_certificates(tmp_path / "tls", ["127.0.0.1"])
    config = GatewayConfig(cluster="a", http_port=0, tls=(files.server, files.server_key))
    gateway = Gateway(await dial("gateway-a", EntityKind.GATEWAY), config)
    await start(gateway)
    assert gateway.url is not None
    assert gateway.url.startswith("https://127.0.0.1:")
    monkeypatch.setenv(tls_trust.VARIABLE, str(files.ca))
    async with AsyncClient(gateway.url, token="olga") as client:
        assert (await client.whoami()).user == "olga"
    other = make_certificates(tmp_path / "other", ["127.0.0.1"])
    monkeypatch.setenv(tls_trust.VARIABLE, str(other.ca))
    async with AsyncClient(gateway.url, token="olga") as client:
        with pytest.raises(Refused) as caught:
            await client.whoami()
    assert "shows a certificate that is not accepted" in caught.value.text
    assert str(other.ca) in caught.value.text
    assert "\n" not in caught.value.text
    assert "olga" not in caught.value.text


async def test_a_wrong_certificate_is_one_line(
    dial: Dial, authorizer: Authorizer, smo: object, tmp_path: Path
) -> None:
    wrong = tmp_path / "server.pem"
    wrong.write_text("no certificate")
    config = GatewayConfig(cluster="a", http_port=0, tls=(wrong, wrong))
    with pytest.raises(
        BadInput, match=r"HTTPS: .*server\.pem: not a certificate and its key; see `dmsc cert`"
    ):
        await Gateway(await dial("gateway-a", EntityKind.GATEWAY), config).run()
