"""Numbers beyond their bounds are refused at a gateway before anything is asked of anybody."""

from __future__ import annotations

import json
from typing import Any

import httpx

from entities.gateway import Gateway
from entities.gateway.http.problems import OPENAI
from tests.integration.entities.conftest import bearer
from tests.integration.entities.stand_in_orchestrator import StandInOrchestrator

BAD = ("nan", "inf", "-inf", "1e999", "-1e999", "1" + "0" * 40, "-" + "9" * 40, "-1001")
JOB = {"name": "tiny", "model": {"factory": "models:build"}, "training": {"steps": 2}}


async def test_each_number_of_a_query(http: httpx.AsyncClient, gateway: Gateway) -> None:
    paths: dict[str, dict[str, Any]] = (await http.get("/v1/openapi.json")).json()["paths"]
    assert (await http.get("/v1/whoami", headers=bearer("olga"))).status_code == 200  # not a stranger's rate
    tried = 0
    for path, operations in paths.items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] != "query" or not _is_number(parameter["schema"]):
                    continue
                others = {
                    one["name"]: "1" if _is_number(one["schema"]) else "x"
                    for one in operation["parameters"]
                    if one["in"] == "query" and one.get("required") and one is not parameter
                }
                for value in BAD:
                    target = path.format_map(_Any())
                    answer = await http.request(
                        method, target, params=others | {parameter["name"]: value}, headers=bearer("olga")
                    )
                    tried += 1
                    place = (method, path, parameter["name"], value, answer.text)
                    is_openai = path.startswith(OPENAI)
                    assert answer.status_code == (400 if is_openai else 422), place
                    told = answer.json()
                    detail = told["error"]["message"] if is_openai else told["detail"]
                    assert parameter["name"] in detail, place
                    assert "\n" not in detail, place
    assert tried >= 10 * len(BAD)


async def test_a_jobs_numbers_as_text_that_python_writes(
    http: httpx.AsyncClient, smo: StandInOrchestrator
) -> None:
    optimizers: list[dict[str, Any]] = [
        {"lr": float("inf")},
        {"lr": float("nan")},
        {"betas": [5, -3]},
        {"eps": 0},
        {"weight_decay": 1e300},
    ]
    for optimizer in optimizers:
        body = {**JOB, "training": {"steps": 2, "optimizer": optimizer}}
        answer = await http.post("/v1/jobs", content=json.dumps(body), headers=bearer("ruth"))
        assert answer.status_code == 422, answer.text
        assert f"training.optimizer.{next(iter(optimizer))}" in answer.json()["detail"]
        assert "; give " in answer.json()["detail"]
    digits = '{"name":"x","model":{"factory":"a:b"},"training":{"steps":1' + "0" * 100_000 + "}}"
    assert (await http.post("/v1/jobs", content=digits, headers=bearer("ruth"))).status_code == 422
    args = {**JOB, "model": {"factory": "models:build", "args": {"width": 10**30}}}
    answer = await http.post("/v1/jobs", json=args, headers=bearer("ruth"))
    assert answer.status_code == 400, "beyond 64 bits nothing travels"
    assert "\n" not in answer.json()["detail"]
    assert (await http.get("/v1/jobs", headers=bearer("ruth"))).json()["jobs"] == []


class _Any(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "x"


def _is_number(schema: dict[str, Any]) -> bool:
    several = schema.get("anyOf", [schema])
    return any(each.get("type") in ("integer", "number") for each in several)
