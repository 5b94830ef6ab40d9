"""Workers of units: each a child of the fork server, confined like the workers of a job's model."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from typing import Any

from pydantic import ValidationError

from bus import subjects
from bus.logs import get_logger
from bus.tasks import cancel
from entities.cluster.cache_folders import cache_owner
from entities.cluster.context import NodeContext
from entities.cluster.model_tasks import CodeSource, Failure, read_result, wait_for_exit
from schemas.data_set.commands import PrepareUnit, UnitPrepared
from schemas.data_set.units import UnitResult
from schemas.errors import Ack, DmscError, Unavailable

log = get_logger("cluster")

LOWEST_PRIORITY = 19
"""Units run beside training, and take the processor time that it leaves."""
RESULTS = 512
"""Results that an agent keeps, in case that its message was lost: the orchestrator asks again."""

Key = tuple[str, str, int]
"""Build, unit, repetition."""


class UnitWorkers:
    """Runs the units that the orchestrator orders; each is a process of its own, with the lowest priority."""

    def __init__(self, context: NodeContext, code: CodeSource) -> None:
        self._context = context
        self._code = code
        self._config = context.config
        self._node = context.config.node
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._results: OrderedDict[Key, UnitPrepared] = OrderedDict()
        self._numbers = itertools.count(1)

    def prepare(self, order: PrepareUnit) -> Ack:
        """Accepts an order; a repetition starts no second worker, and a known result is sent again."""
        key = (order.build, order.unit, order.repetition)
        if key in self._running:
            return Ack(note="under way")
        if (known := self._results.get(key)) is not None:
            self._context.start_task(self._send(known))
            return Ack(note="known already")
        task = self._running[key] = self._context.start_task(self._prepare(key, order))
        task.add_done_callback(lambda _: self._running.pop(key, None))
        return Ack()

    async def forget(self, build: str) -> None:
        """Ends the workers of a build, and drops its results; returns once they are gone."""
        await cancel(*[task for key, task in self._running.items() if key[0] == build])
        for key in [key for key in self._results if key[0] == build]:
            del self._results[key]

    async def _prepare(self, key: Key, order: PrepareUnit) -> None:
        begun = time.monotonic()
        try:
            outcome = self._read(await self._run(order))
        except DmscError as error:
            outcome = Failure(error.code, error.text)
        message = UnitPrepared(build=key[0], unit=key[1], repetition=key[2])
        if isinstance(outcome, Failure):
            await self._send(message.model_copy(update={"code": outcome.code, "text": outcome.text[:4096]}))
            return
        seconds = time.monotonic() - begun
        message = message.model_copy(update={"result": outcome, "seconds": seconds})
        self._results[key] = message
        while len(self._results) > RESULTS:
            self._results.popitem(last=False)
        await self._send(message)

    async def _send(self, message: UnitPrepared) -> None:
        try:
            await self._context.send(
                subjects.UNIT_PREPARED, message, agent=self._config.sid, build=message.build
            )
        except DmscError as error:
            log.warning("result of a unit refused", node=self._node, build=message.build, error=error.text)

    def _read(self, answer: dict[str, Any] | Failure) -> UnitResult | Failure:
        if isinstance(answer, Failure):
            return answer
        try:
            return UnitResult.model_validate(answer["result"])
        except (KeyError, ValidationError) as error:
            log.error("a unit gave an unusable result", node=self._node, error=str(error))
            return Failure(
                "internal", f"a unit's process on {self._node} gave an unusable result; see its log"
            )

    async def _run(self, order: PrepareUnit) -> dict[str, Any] | Failure:
        """Runs one worker; its answer, or why there is none.

        Raises:
            Unavailable: it can't be started now.
            DmscError: its code is not there.
        """
        build, spec, phase = order.build, order.spec, order.order.phase
        number = next(self._numbers)
        name, sid = f"unit-{number}", f"{build}-{phase}-{number}"
        async with self._context.worker_folder(name, self._config.times.worker_ready_s) as folder:
            result = folder / "result.json"
            code = await self._code.folder(build, spec.code)
            reach = self._context.files.of_build(spec)
            with self._context.caches.opened(name, cache_owner(order.user, build)) as cache:
                payload = {
                    **self._context.payload,
                    "sid": sid,
                    "job": build,
                    "token": self._context.credential(sid, build),
                    "spec": spec.model_dump(mode="json"),
                    "order": order.order.model_dump(mode="json"),
                    "secrets": order.secrets,
                    "cache": None if cache is None else str(cache),
                }
                child = await self._context.processes.spawn(
                    f"{sid}-{order.order.index}",
                    f"{self._config.worker_package}.tasks.prepare",
                    payload,
                    log_path=self._config.logs / f"{build}-{phase}.log",
                    title=f"{build} {phase} {order.order.index}",
                    threads=1,
                    priority=LOWEST_PRIORITY,
                    result=result,
                    read=reach.read,
                    write=(str(folder), *reach.write, *([] if cache is None else [str(cache)])),
                    code=code,
                )
                where = f"its process on {self._node}"
                exit = await wait_for_exit(
                    self._context.processes, child, self._config.analysis_timeout_s, self._node
                )
                if exit is None:
                    timeout_s = self._config.analysis_timeout_s
                    return Failure(
                        "no_progress", f"{where} made no progress for {timeout_s:.0f} s and was ended"
                    )
                if exit.signal is not None and exit.code is None:
                    return Failure(Unavailable.code, f"{where} was ended by {exit.signal}")
                return await asyncio.to_thread(read_result, result, exit, where)
