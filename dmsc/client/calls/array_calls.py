"""Arrays of jobs: submitting one, and orders to all its jobs at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from dmsc.authoring.code_folder import PackedCode
from dmsc.client import http_protocol
from dmsc.client.calls.access_calls import segment
from dmsc.client.calls.code_calls import CodeCalls
from schemas.arrays import JobArray, member_specs
from schemas.job import JobSpec


class ArrayCalls(CodeCalls):
    """A part of `AsyncClient`."""

    async def submit_array(
        self,
        job: str | Path | dict[str, Any] | JobSpec,
        *,
        idempotency_key: str | None = None,
        code: PackedCode | None = None,
    ) -> JobArray:
        """Queue all jobs of a job file with `array`, or none; return them with their ids.

        Each is a job like any other: `job`, `events`, `weights` and so on take its id. Submitted again with
        your own `idempotency_key`, it is the same array. `code`: see `submit`.

        Raises:
            BadJob: a member is no valid job; one line per problem.
        """
        document = http_protocol.as_spec(job)
        await asyncio.to_thread(member_specs, JobSpec.model_validate(document))
        return await self._submit_with_code(JobArray, "/v1/arrays", document, idempotency_key, code)

    async def array(self, array: str) -> JobArray:
        """An array with its jobs by index. Raises `NotFound`."""
        return await self._gateways.ask_for(JobArray, "GET", f"/v1/arrays/{segment(array)}")

    async def cancel_array(self, array: str, *, reason: str = "") -> JobArray:
        """Cancel all jobs of an array that have not ended."""
        return await self._order(array, "cancel", reason=reason)

    async def park_array(self, array: str, *, reason: str = "") -> JobArray:
        """Park the running jobs of an array and hold the waiting ones, until `resume_array`."""
        return await self._order(array, "park", reason=reason)

    async def resume_array(
        self, array: str, *, stages: int | None = None, replicas: int | None = None
    ) -> JobArray:
        """Have all parked and held jobs of an array go on; with another shape, to the same bits."""
        return await self._order(array, "resume", stages=stages, replicas=replicas)

    async def prioritise_array(self, array: str, priority: int) -> JobArray:
        """Give all jobs of an array that have not ended another class of priority in the queue."""
        return await self._order(array, "prioritise", priority=priority)

    async def wait_array(self, array: str, *, poll_s: float = 1.0) -> JobArray:
        """Wait until all jobs of an array have ended. Failed jobs raise nothing: see `states`."""
        while True:
            found = await self.array(array)
            if found.over:
                return found
            await asyncio.sleep(poll_s)

    async def _order(self, array: str, order: str, **query: Any) -> JobArray:
        params = {key: value for key, value in query.items() if value not in (None, "")}
        path = f"/v1/arrays/{segment(array)}/{order}"
        return await self._gateways.ask_for(JobArray, "POST", path, params=params)
