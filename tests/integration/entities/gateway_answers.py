"""What tests of a gateway send, and what they expect of its answers."""

from __future__ import annotations

from typing import Any

import httpx

from tests.integration.entities.conftest import bearer

JOB = {"name": "tiny", "model": {"factory": "models:build"}, "training": {"steps": 2}}


async def submit(http: httpx.AsyncClient, user: str = "ruth") -> str:
    response = await http.post("/v1/jobs", json=JOB, headers=bearer(user))
    assert response.status_code == 201, response.text
    job: str = response.json()["job"]
    return job


def check_problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert (body["status"], body["code"]) == (status, code)
    assert "\n" not in body["detail"]
    assert "Traceback" not in response.text
    return body
