"""The OpenAPI document against the gateway that gives it: requests made up by schemathesis, valid and not.

Behind the gateway stand real registries, an authorizer and an orchestrator on a real server; no node, so
that whatever is submitted waits in the queue.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator

import httpx
import pytest
import structlog

from entities.accountant import Accountant
from entities.authorizer import Authorizer
from entities.gateway import Gateway, GatewayConfig
from entities.gateway.http.config import HttpConfig
from entities.gateway.http.problems import OPENAI
from entities.gateway.http.rate_limit import RequestRate
from entities.model_registry import ModelRegistry
from entities.orchestrator import Orchestrator, OrchestratorConfig
from entities.provisioner import Provisioner, ProvisionerConfig
from schemas.envelope import EntityKind
from schemas.machines.pools import MachinePool, PoolsFile
from tests.integration.entities.conftest import Dial, Start
from tests.integration.entities.test_provisioner import LIST, Fleet
from tests.waiting import eventually

NO_LIMIT = RequestRate(per_s=1e6, burst=10**6)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Thousands of requests are logged, and a failure is to be found among them."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.configure(**before)


@pytest.fixture
async def gateway(quiet: None, dial: Dial, start: Start, authorizer: Authorizer) -> Gateway:
    await start(Orchestrator(await dial("orchestrator", EntityKind.ORCHESTRATOR), OrchestratorConfig()))
    config = GatewayConfig(
        cluster="east",
        http_port=0,
        door=HttpConfig(rate=NO_LIMIT, unknown_rate=NO_LIMIT, burst_s=60.0, standing_s=60.0),
    )
    await start(Accountant(await dial("accountant", EntityKind.ACCOUNTANT)))
    await start(ModelRegistry(await dial("model-registry", EntityKind.MODEL_REGISTRY)))
    pools = {"far": MachinePool.model_validate({"driver": "command", "commands": LIST, "most": 1})}
    machines = ProvisionerConfig(
        file=PoolsFile(name="t", pools=pools), make_driver=lambda name, pool: Fleet()
    )
    await start(Provisioner(await dial("provisioner", EntityKind.PROVISIONER), machines))
    service = Gateway(await dial("gateway-east", EntityKind.GATEWAY), config)
    await start(service)
    return service


async def test_every_answer_is_as_documented(gateway: Gateway) -> None:
    # brings schemathesis, which would take each process that collects this file a second
    from tests.integration.entities.api_requests import attack

    assert gateway.url is not None
    url, chosen = gateway.url, random.SystemRandom().randrange(1 << 32)
    print(f"seed {chosen}")
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        document = (await http.get("/v1/openapi.json")).json()

        async def ready() -> bool:
            return (await http.get("/readyz")).status_code == 200

        await eventually(ready)
    assert await asyncio.to_thread(attack, document, url, chosen) > 30


async def test_all_operations_tell_of_their_problems_in_one_form(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url or "", trust_env=False) as http:
        document = (await http.get("/v1/openapi.json")).json()
    seen = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation.get("summary") or operation.get("description"), f"{method} {path} says nothing"
            assert operation["operationId"] not in seen
            seen.add(operation["operationId"])
            if path in ("/healthz", "/readyz"):
                continue
            assert operation["security"], f"{method} {path} asks for no token"
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    kind = "OpenaiFailure" if path.startswith(OPENAI) else "Problem"
                    assert response == {"$ref": f"#/components/responses/{kind}{status}"}
            assert {"401", "403", "422", "429", "503"} <= operation["responses"].keys()
    for name, response in document["components"]["responses"].items():
        media_type = "application/json" if name.startswith("OpenaiFailure") else "application/problem+json"
        assert list(response["content"]) == [media_type]
