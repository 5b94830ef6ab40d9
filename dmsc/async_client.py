"""The client of a mesh's outer door for asyncio: what `dmsc.Client` runs on a thread, and the commands use.

Every method raises the errors of `schemas.errors`: `Refused`, `NotFound`, `BadInput`, `Unavailable`…
A gateway that does not answer is passed over for the next one, if the mesh has several.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar
from urllib.parse import quote, urlencode

import httpx

from dmsc import door
from dmsc.access_calls import AccessCalls
from dmsc.settings import find_gateway
from dmsc.sse import EventParser
from dmsc.weights_check import check_file, check_weights
from schemas.base import Message
from schemas.checkpoint import MANIFEST_NAME, CheckpointList, CheckpointManifest
from schemas.door import Cordons, FaultList, JobLoad, MeshStatus, TapScope
from schemas.errors import NotFound, Unavailable
from schemas.fault import FaultRecord
from schemas.job import ENDED, JobEvent, JobRecord, JobSpec, WeightsManifest
from schemas.module_status import ModuleAnswer, ModuleList, ModuleStatus
from schemas.observation import Observation
from schemas.policy import ModuleLifecycle, PolicySwitch

M = TypeVar("M", bound=Message)

Job = str | Path | Mapping[str, Any] | JobSpec
"""A job: a file's path, a mapping, or the model itself."""

_chunk = 1 << 20
_first_pause_s, _longest_pause_s = 0.2, 2.0


class AsyncClient(AccessCalls):
    """Talks to a mesh's gateways from a coroutine; use it with `async with`.

    Args:
        url: one gateway or several; default: `$DMSC_GATEWAY`, then the mesh of the state folder.
        token: the user's token; default: `$DMSC_TOKEN`, then the state folder's.
        state: the state folder to look into; default: `$DMSC_STATE` or `.dmsc`.
        timeout_s: how long one request may take.
        patience_s: how long a broken event stream is reconnected before `Unavailable` is raised.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        token: str | None = None,
        state: Path | None = None,
        timeout_s: float = 10.0,
        patience_s: float = 30.0,
    ) -> None:
        address = find_gateway(url, token, state)
        self._urls = [each.rstrip("/") for each in address.urls]
        self._patience_s = patience_s
        self._http = httpx.AsyncClient(
            headers=door.headers(address.token),
            timeout=door.timeout(timeout_s),
            verify=door.verify(self._urls),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def submit(self, job: Job) -> JobRecord:
        """Queue a job; returns its record with the id that it was given."""
        return JobRecord.model_validate(await self._ask("POST", "/v1/jobs", door.as_spec(job)))

    async def jobs(self) -> list[JobRecord]:
        """All jobs of the mesh, oldest first."""
        return door.as_records(await self._ask("GET", "/v1/jobs"))

    async def job(self, job: str) -> JobRecord:
        """One job's record. Raises `NotFound`."""
        return JobRecord.model_validate(await self._ask("GET", f"/v1/jobs/{job}"))

    async def load(self, job: str) -> JobLoad:
        """How its instances are doing at this moment: queue, milliseconds per microbatch, latency."""
        return JobLoad.model_validate(await self._ask("GET", f"/v1/jobs/{job}/load"))

    async def scale(self, job: str, replicas: int, stage: int | None = None) -> str:
        """Gives one stage, or all, this many working replicas; returns what will happen."""
        where = "" if stage is None else f"&stage={stage}"
        answer = await self._ask("POST", f"/v1/jobs/{job}/scale?replicas={replicas}{where}")
        return str(answer["note"])

    async def move(self, job: str, sid: str, stage: int) -> str:
        """Has an instance change its stage at the end of the open step; returns what will happen."""
        answer = await self._ask("POST", f"/v1/jobs/{job}/move?sid={sid}&stage={stage}")
        return str(answer["note"])

    async def cancel(self, job: str) -> JobRecord:
        """Ask for the end of a job; it is told, and cleaned up after."""
        return JobRecord.model_validate(await self._ask("POST", f"/v1/jobs/{job}/cancel"))

    async def mesh(self) -> MeshStatus:
        """Services, nodes and jobs at a glance."""
        return MeshStatus.model_validate(await self._ask("GET", "/v1/mesh"))

    async def tap_scope(self) -> TapScope:
        """Which messages of the bus this token's user may tap."""
        return TapScope.model_validate(await self._ask("GET", "/v1/tap/scope"))

    async def faults(self, job: str | None = None) -> list[FaultRecord]:
        """Each fault as it stands now, oldest first; of one job, or of the whole mesh."""
        query = f"?job={quote(job, safe='')}" if job is not None else ""
        return list(FaultList.model_validate(await self._ask("GET", f"/v1/faults{query}")).faults)

    async def follow_faults(self, job: str | None = None, *, start: int = 1) -> AsyncIterator[FaultRecord]:
        """Every record of the fault queue from stream position `start`, then live, without an end.

        Reconnects by itself (also to another gateway) where it left off; each record comes once.
        """
        params = {} if job is None else {"job": job}
        async with aclosing(self._follow("/v1/faults/events", FaultRecord, start, params)) as records:
            async for fault in records:
                yield fault

    async def cordon(self, node: str, slot: int | None = None, *, reason: str = "") -> Cordons:
        """No new instances on a node, or in one slot of it. What runs there goes on."""
        return await self._change_node(node, "cordon", slot=slot, reason=reason)

    async def uncordon(self, node: str, slot: int | None = None) -> Cordons:
        """New instances may go there again. Raises `NotFound` where nothing is cordoned."""
        return await self._change_node(node, "uncordon", slot=slot)

    async def drain(self, node: str, *, reason: str = "") -> Cordons:
        """Cordon a node and have its instances move elsewhere; `mesh().cordons` tells how far it is."""
        return await self._change_node(node, "drain", reason=reason)

    async def _change_node(self, node: str, action: str, **query: Any) -> Cordons:
        given = urlencode({key: value for key, value in query.items() if value not in (None, "")})
        path = f"/v1/nodes/{quote(node, safe='')}/{action}"
        return Cordons.model_validate(await self._ask("POST", f"{path}?{given}" if given else path))

    async def promote_policy(self, module: str, version: str, *, reason: str = "") -> PolicySwitch:
        """Make a running version of a module the active one; the one that was goes on in shadow."""
        given = urlencode({"version": version, **({"reason": reason} if reason else {})})
        return await self._switch_policy(module, f"promote?{given}")

    async def roll_back_policy(self, module: str, *, reason: str = "") -> PolicySwitch:
        """Make the version active again that was before. Raises `Conflict` where nothing was promoted."""
        return await self._switch_policy(
            module, f"rollback?{urlencode({'reason': reason})}" if reason else "rollback"
        )

    async def _switch_policy(self, module: str, action: str) -> PolicySwitch:
        path = f"/v1/policies/{quote(module, safe='')}/{action}"
        return PolicySwitch.model_validate(await self._ask("POST", path))

    async def policies(self) -> list[ModuleStatus]:
        """The functional modules that run, and how they fare, by name and version."""
        return list(ModuleList.model_validate(await self._ask("GET", "/v1/policies")).modules)

    async def order_policy(
        self,
        module: str,
        op: str,
        *,
        version: str | None = None,
        jobs: Sequence[str] = (),
        reason: str = "",
    ) -> ModuleLifecycle:
        """Has a module do `op`: activate, shadow, drain, enable or disable (for `jobs`). Repeating is fine.

        Returns what it then is. Raises `NotFound` where it does not run, `Conflict` where it can't.
        """
        body = {"op": op, "version": version, "jobs": list(jobs), "reason": reason}
        answer = await self._ask("POST", f"/v1/policies/{quote(module, safe='')}/orders", body)
        return ModuleLifecycle.model_validate(answer)

    async def ask_policy(
        self,
        module: str,
        job: str,
        *,
        version: str | None = None,
        inputs: Sequence[Observation] = (),
    ) -> ModuleAnswer:
        """What a module suggests for a job at this moment. Nothing of it is adopted."""
        given = [one.model_dump(mode="json") for one in inputs]
        body = {"job": job, "version": version, "inputs": given}
        answer = await self._ask("POST", f"/v1/policies/{quote(module, safe='')}/questions", body)
        return ModuleAnswer.model_validate(answer)

    async def observe(self, *observations: Observation) -> None:
        """Tell functional modules what was seen outside the mesh."""
        given = [one.model_dump(mode="json", exclude={"user"}) for one in observations]
        await self._ask("POST", "/v1/observations", {"observations": given})

    async def weights(self, job: str) -> WeightsManifest:
        """The manifest of a finished job's weights. Raises `NotFound` before that."""
        return WeightsManifest.model_validate(await self._ask("GET", f"/v1/jobs/{job}/weights"))

    async def events(self, job: str, *, start: int = 1) -> AsyncIterator[JobEvent]:
        """What happened to a job from stream position `start`, then live, until it has ended.

        Reconnects by itself (also to another gateway) where it left off; each event comes once.
        """

        async def over() -> bool:
            return (await self.job(job)).state in ENDED

        async with aclosing(self._follow(f"/v1/jobs/{job}/events", JobEvent, start, over=over)) as events:
            async for event in events:
                yield event
                if event.kind == "state" and event.state in ENDED:
                    return

    async def _follow(
        self,
        path: str,
        kind: type[M],
        start: int,
        params: Mapping[str, str] | None = None,
        over: Callable[[], Awaitable[bool]] | None = None,
    ) -> AsyncGenerator[M, None]:
        """Each record of a stream once, from position `start`, over as many gateways as it takes.

        `over`: asked when a gateway ends the stream without a word: whether nothing more will come.
        """
        last, pause_s, broken_since = start - 1, _first_pause_s, None
        while True:
            position = door.position(last)
            position["params"].update(params or {})
            try:
                async with self._http.stream(
                    "GET", self._urls[0] + path, timeout=door.STREAM_TIMEOUT, **position
                ) as response:
                    if response.is_error:
                        await response.aread()
                    door.raise_for(response)
                    parser = EventParser()
                    async for line in response.aiter_lines():
                        found = door.next_record(parser, line, last, kind)
                        if found is not None:
                            last, record = found
                            pause_s, broken_since = _first_pause_s, None
                            yield record
                if over is not None and last >= start and await over():
                    return
            except (httpx.TransportError, Unavailable) as error:
                broken_since = broken_since or time.monotonic()
                self._pass_over()
                if time.monotonic() - broken_since > self._patience_s:
                    raise door.unreachable(self._urls, error) from error
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _longest_pause_s)

    async def wait(self, job: str) -> JobRecord:
        """Until the job has ended; its last record. A failed job is not an error here: see `state`."""
        async for _ in self.events(job):
            pass
        return await self.job(job)

    async def download_weights(self, job: str, folder: Path) -> WeightsManifest:
        """Fetch the safetensors shards and their index (Hugging Face layout) into `folder`.

        Raises `DmscError` if what arrived does not have the job's SHA-256.
        """
        manifest = await self.weights(job)
        for shard in door.shards(manifest):
            target = door.shard_path(folder, shard)
            with door.partial_file(target) as partial:
                try:
                    await self._fetch(f"/v1/jobs/{job}/weights/{shard}", partial)
                except httpx.TransportError as error:
                    raise door.unreachable(self._urls, error) from error
        door.write_index(folder, manifest)
        await asyncio.to_thread(check_weights, folder, manifest)
        return manifest

    async def checkpoints(self, job: str) -> CheckpointList:
        """The job's checkpoints that exist, the newest first."""
        return CheckpointList.model_validate(await self._ask("GET", f"/v1/jobs/{job}/checkpoints"))

    async def download_checkpoint(
        self, job: str, folder: Path, step: int | None = None
    ) -> CheckpointManifest:
        """Fetch a checkpoint (docs/checkpoints.md) into `folder`: that of `step`, or the newest.

        Raises `DmscError` if there is none, or if what arrived does not have the manifest's SHA-256.
        """
        found = (await self.checkpoints(job)).checkpoints
        one = next((each for each in found if step in (None, each.manifest.version)), None)
        if one is None:
            there = ", ".join(str(each.manifest.version) for each in found) or "none"
            raise NotFound(f"{job} has no such checkpoint; those that exist are of step: {there}", job=job)
        for name, file in one.manifest.files.items():
            target = door.file_below(folder, name)
            with door.partial_file(target) as partial:
                try:
                    await self._fetch(f"/v1/jobs/{job}/checkpoints/{one.name}/{name}", partial)
                except httpx.TransportError as error:
                    raise door.unreachable(self._urls, error) from error
            await asyncio.to_thread(check_file, target, file)
        door.file_below(folder, MANIFEST_NAME).write_bytes(one.manifest.to_json())
        return one.manifest

    async def _fetch(self, path: str, file: BinaryIO) -> None:
        async with self._http.stream("GET", self._urls[0] + path, timeout=door.STREAM_TIMEOUT) as response:
            if response.is_error:
                await response.aread()
            door.raise_for(response)
            async for chunk in response.aiter_bytes(_chunk):
                file.write(chunk)

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """One request at the first gateway that answers; JSON in and out."""
        failure: Exception | None = None
        tries = max(2, len(self._urls)) if method == "GET" else len(self._urls)
        for _ in range(tries):  # a kept connection may have been closed at the other end just now
            try:
                response = await self._http.request(method, self._urls[0] + path, json=body)
            except httpx.TransportError as error:
                failure = error
                if not door.may_repeat(method, error):
                    break
                self._pass_over()
                continue
            door.raise_for(response)
            return response.json()
        assert failure is not None
        raise door.unreachable(self._urls, failure) from failure

    def _pass_over(self) -> None:
        self._urls.append(self._urls.pop(0))
