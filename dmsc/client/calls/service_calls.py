"""Requests about model services: deploying versions, their traffic, their replicas, their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from dmsc.authoring.code_folder import PackedCode
from dmsc.client import http_protocol
from dmsc.client.calls.access_calls import segment
from dmsc.client.calls.code_calls import CodeCalls
from schemas.errors import BadJob, LastingConflict, NotFound
from schemas.pages import ServicePage
from schemas.services.model_service import DEPLOYED, ModelService, ServedVersion, VersionState

SERVICES = "/v1/services"
ENDED = frozenset({VersionState.REFUSED, VersionState.RETIRED})


class ServiceCalls(CodeCalls):
    """A part of `AsyncClient`."""

    async def deploy(
        self, version: Any, *, idempotency_key: str | None = None, code: PackedCode | None = None
    ) -> ModelService:
        """Deploy a version of a service, and return the service: it is ready once its state says so.

        `version`: a job file with `serve`, as its path, a mapping, or a `JobSpec`. Its `initial_weights` may
        be `job:ID`: what that job has trained.

        Raises:
            BadJob: the file has no `serve`, or is wrong.
            Conflict: the service has a version of this name.
        """
        document = http_protocol.as_spec(version)
        if document["serve"] is None:
            raise BadJob("serve: is missing: it names the service, as serve: {service: chat}")
        return await self._submit_with_code(ModelService, SERVICES, document, idempotency_key, code)

    async def services(self) -> list[ModelService]:
        """The mesh's model services, by name."""
        pages = self._gateways.pages(SERVICES, ServicePage)
        return [service async for page in pages for service in page.services]

    async def service(self, service: str) -> ModelService:
        """One service with its versions. Raises `NotFound`."""
        return await self._gateways.ask_for(ModelService, "GET", f"{SERVICES}/{segment(service)}")

    async def wait_for_version(
        self,
        service: str,
        version: str | None = None,
        *,
        replicas: int = 0,
        poll_s: float = 0.3,
        progress: Callable[[ServedVersion], None] = lambda _: None,
    ) -> ServedVersion:
        """Wait until a version is deployed: it is ready, or idle, and starts with the next request.

        Args:
            service: The service's name.
            version: The version's; None: the one that a rollback goes back to, or the first.
            replicas: Wait until each stage has at least so many; an idle version has none.
            poll_s: Seconds between two looks.
            progress: Gets the version at each look.

        Raises:
            NotFound: There is no such service, or it has no such version.
            LastingConflict: The version is refused or stopped; the text says why.
        """
        while True:
            record = await self.service(service)
            first = record.versions[0].version if record.versions else ""
            name = version or record.stable or first
            found = record.version(name)
            if found is None:
                names = ", ".join(each.version for each in record.versions) or "none"
                raise NotFound(f"service {service} has no version {name or 'yet'}; it has {names}")
            progress(found)
            if found.state in ENDED:
                raise LastingConflict(
                    f"{service}@{found.version} is {found.state}: {found.reason or 'no reason was given'}"
                )
            if found.state in DEPLOYED and min(found.replicas, default=0) >= replicas:
                return found
            await asyncio.sleep(poll_s)

    async def set_traffic(
        self, service: str, weights: Mapping[str, int], *, expected: int | None = None, why: str = ""
    ) -> ModelService:
        """Share a service's traffic: version → ten-thousandths, 10,000 in all.

        `expected`: the revision of the record that you have seen; of another one it is refused.

        Raises:
            Conflict: a version is not ready, or the record is another one by now; nothing has changed.
        """
        body = {"weights": dict(weights), "expected": expected, "why": why}
        path = f"{SERVICES}/{segment(service)}/traffic"
        return await self._gateways.ask_for(ModelService, "POST", path, body)

    async def promote_version(self, service: str, version: str, *, why: str = "") -> ModelService:
        """Give a version all traffic; the former one stays, for `roll_back_service`."""
        return await self._order_service(service, "promote", version=version, why=why)

    async def roll_back_service(self, service: str, *, why: str = "") -> ModelService:
        """Give all traffic back to the stable version. Raises `Conflict` if that is not ready."""
        return await self._order_service(service, "rollback", why=why)

    async def shadow_version(
        self, service: str, version: str, *, shadow: bool = True, why: str = ""
    ) -> ModelService:
        """Have a version answer copies of requests, which are thrown away; or not any more."""
        action = "shadow" if shadow else "unshadow"
        return await self._order_service(service, action, version=version, why=why)

    async def scale_version(
        self, service: str, version: str, replicas: int, *, why: str = ""
    ) -> ModelService:
        """Set the number of replicas of each stage; with 0 it gives its slots back until it gets some."""
        return await self._order_service(service, "scale", version=version, replicas=replicas, why=why)

    async def stop_service(self, service: str, version: str | None = None, *, why: str = "") -> ModelService:
        """Stop a version, or the service with all of them. Raises `Conflict` if the version gets traffic."""
        return await self._order_service(service, "stop", version=version, why=why)

    async def _order_service(self, service: str, action: str, **params: str | int | None) -> ModelService:
        path = f"{SERVICES}/{segment(service)}/{action}"
        return await self._gateways.ask_for(ModelService, "POST", path, params=params)
