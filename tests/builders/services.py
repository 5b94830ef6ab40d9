"""Services, and how their requests ended."""

from __future__ import annotations

from typing import Any

from schemas.services.model_service import ModelService, ServedVersion, ServiceState, VersionState
from schemas.services.outcomes import AnsweredRequest, ServiceOutcomes


def served_by(*names: str, **fields: Any) -> ModelService:
    """A service `chat` with ready versions, v1 and v2 unless others are named; `j-v1` is the job of v1."""
    versions = tuple(
        ServedVersion(version=name, job=f"j-{name}", weights="bus://w", state=VersionState.READY)
        for name in names or ("v1", "v2")
    )
    usual = {"service": "chat", "user": "ruth", "state": ServiceState.SERVING, "versions": versions}
    return ModelService(**{**usual, **fields})


def told_of(service: ModelService, *requests: AnsweredRequest, **fields: Any) -> ServiceOutcomes:
    """What a gateway tells of this service."""
    usual = {
        "gateway": "gateway-a",
        "service": service.service,
        "revision": service.revision,
        "weights": service.weights,
        "shadow": service.shadow,
        "stable": service.stable,
        "jobs": {each.version: each.job for each in service.versions},
        "requests": requests,
    }
    return ServiceOutcomes(**{**usual, **fields})


def ended(version: str, **fields: Any) -> AnsweredRequest:
    """A request that went well, unless `ok` says otherwise."""
    return AnsweredRequest(**{"version": version, "ok": True, **fields})
