"""The OpenAPI document against the gateway that gives it: requests made up by schemathesis, valid and not.

Behind the gateway stand a real registry, authorizer and orchestrator on a real server; no node, so that
whatever is submitted waits in the queue.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
import structlog
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from entities.authorizer import Authorizer
from entities.gateway import Gateway, GatewayConfig
from entities.gateway.http.config import HttpConfig
from entities.gateway.http.rate_limit import RequestRate
from entities.orchestrator import Orchestrator, OrchestratorConfig
from schemas.envelope import EntityKind
from tests.integration.entities.conftest import Dial, Start
from tests.patience import PATIENCE_S
from tests.waiting import eventually

EXAMPLES = int(os.environ.get("DMSC_API_EXAMPLES", "2"))
"""Valid requests of each operation, and one invalid one less; more of them find more, and take longer."""
ENDING = "/v1/jobs/{job}/events"
"""The one event stream that is tried: of a job that does not exist. The others' answers have no end."""
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
    service = Gateway(await dial("gateway-east", EntityKind.GATEWAY), config)
    await start(service)
    return service


async def test_every_answer_is_as_documented(gateway: Gateway) -> None:
    assert gateway.url is not None
    url, chosen = gateway.url, random.SystemRandom().randrange(1 << 32)
    print(f"seed {chosen}")
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        document = (await http.get("/v1/openapi.json")).json()

        async def ready() -> bool:
            return (await http.get("/readyz")).status_code == 200

        await eventually(ready)
    assert await asyncio.to_thread(attack, document, url, chosen) > 30


def attack(document: dict[str, Any], url: str, chosen: int) -> int:
    """How many operations were tried."""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    tried = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        answers = operation.definition.raw["responses"]["200"] if operation.method == "get" else {}
        if "text/event-stream" in answers.get("content", {}) and operation.path != ENDING:
            continue
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and "security" not in operation.definition.raw:
                continue  # the probes have no parameters to get wrong

            @seed(chosen)
            @settings(
                max_examples=EXAMPLES if mode is GenerationMode.POSITIVE else EXAMPLES - 1,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def try_it(case: Case) -> None:
                # An operator: whatever is asked for in the right way is done.
                case.call_and_validate(
                    headers={"Authorization": "Bearer olga"},
                    timeout=PATIENCE_S,
                    excluded_checks=beyond_schemas(case),
                )

            try_it()
        tried += 1
    return tried


def beyond_schemas(case: Case) -> list[Any]:
    """The keys of a job, or a build, must fit each other, a feed's fields and records have rules of their
    own, a cursor is one that a list gave, a key goes with one body: JSON Schema can't say that. Nor that
    unknown query parameters are ignored: newer clients may send them."""
    if set(case.query or {}) - {one.name for one in case.operation.query}:
        return [negative_data_rejection, positive_data_acceptance]
    fitting = (
        ("POST", "/v1/jobs"),
        ("POST", "/v1/data/builds"),
        ("PUT", "/v1/feeds/{name}"),
        ("POST", "/v1/feeds/{name}/records"),
    )
    of_a_job = (case.method, case.path) in fitting
    known = "cursor" in (case.query or {}) or "idempotency-key" in (case.headers or {})
    return [positive_data_acceptance] if of_a_job or known else []


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
                    assert response == {"$ref": f"#/components/responses/Problem{status}"}
            assert {"401", "403", "422", "429", "503"} <= operation["responses"].keys()
    for response in document["components"]["responses"].values():
        assert list(response["content"]) == ["application/problem+json"]
