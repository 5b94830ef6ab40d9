"""The model registry's service: serves gateways, and registers the weights of jobs that ask for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.subject_row import Subject
from bus.tasks import background
from entities.metrics import MODEL_MOVES, MODEL_REFUSED, MODEL_VERSIONS, MetricReading
from entities.model_records.model_follower import ModelFollower
from entities.model_registry.finished_jobs import FinishedJobs
from entities.model_registry.registration import WeightsRegistration
from entities.model_registry.version_writer import VersionWriter
from entities.presence.entity_record import entity_record, stay_registered
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, DmscError
from schemas.models.commands import (
    ApproveModel,
    EvaluateModel,
    ModelKeys,
    ModelKeysQuery,
    ModelRegistered,
    MoveAlias,
    RegisterModel,
    RemoveModel,
    RuleModel,
)
from schemas.models.version import AliasMove, ModelVersion, NamedModel
from schemas.urls import BUS, MODELS_FOLDER

log = get_logger("models")

QUEUE_GROUP = "model-registry"
NODE = "mesh"


@dataclass(frozen=True, kw_only=True)
class ModelRegistryConfig:
    """Settings of a model registry, in seconds."""

    complete_s: float = 10.0  # how long a request waits until the records are read after a start
    retry_s: float = 0.5  # between attempts to register, or to read records, while the bus is away
    job_retry_s: float = 2.0  # between attempts to register a job's weights


class ModelRegistry:
    """One registry; any number of them share the requests, and each write is a compare-and-set."""

    def __init__(self, bus: Bus, config: ModelRegistryConfig = ModelRegistryConfig()) -> None:
        self._bus = bus
        self._config = config
        self._follower = ModelFollower(bus, guards=True)
        self._writer = VersionWriter(bus, self._follower.index)
        self._registration = WeightsRegistration(bus, self._writer)
        self._moves = 0
        self._refused = 0

    def readings(self) -> Iterator[MetricReading]:
        """The metrics of this registry."""
        yield MODEL_VERSIONS(sum(1 for _ in self._follower.index.each()))
        yield MODEL_MOVES(self._moves)
        yield MODEL_REFUSED(self._refused)

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Serve until cancelled. What is asked before the records are read waits for them."""
        sender = self._bus.sender
        record = entity_record(EntityKind.MODEL_REGISTRY, sender.name, sender.incarnation, node=NODE)
        registration = stay_registered(self._bus, record, log.info, retry_s=self._config.retry_s)
        async with (
            self._follower.following(),
            background(self._register_jobs(), name="register jobs' weights"),
            background(registration, name=f"presence of {sender.name}"),
        ):
            try:
                await self._serve()
                log.info("model registry ready", service=sender.name)
                if ready is not None:
                    ready.set()
                await asyncio.get_running_loop().create_future()
            finally:
                await self._registration.close()

    async def _serve(self) -> None:
        served: tuple[tuple[Subject, object], ...] = (
            (subjects.REGISTER_MODEL, self._on_register),
            (subjects.MOVE_ALIAS, self._on_move),
            (subjects.APPROVE_MODEL, self._on_approve),
            (subjects.EVALUATE_MODEL, self._on_evaluate),
            (subjects.REMOVE_MODEL, self._on_remove),
            (subjects.RULE_MODEL, self._on_rule),
            (subjects.MODEL_KEYS, self._on_keys),
        )
        for row, handler in served:
            await self._bus.serve(row, handler, queue_group=QUEUE_GROUP)  # type: ignore[arg-type]

    async def _register_jobs(self) -> None:
        finished = FinishedJobs(self._bus, self._registration, self._writer, retry_s=self._config.job_retry_s)
        while True:
            with contextlib.suppress(DmscError):
                await self._follower.complete(self._config.complete_s)
                await finished.run()
            await asyncio.sleep(self._config.retry_s)

    # --- requests -------------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def _decided(self) -> AsyncIterator[None]:
        """Waits until the records are read, and counts refusals."""
        await self._follower.complete(self._config.complete_s)
        try:
            yield
        except DmscError:
            self._refused += 1
            raise

    async def _on_register(self, message: RegisterModel, envelope: Envelope) -> ModelRegistered:
        async with self._decided():
            return await self._registration.register(message)

    async def _on_move(self, message: MoveAlias, envelope: Envelope) -> AliasMove:
        async with self._decided():
            move = await self._writer.move(message, envelope.id)
        self._moves += 1
        log.info(
            "alias moved",
            alias=f"{move.name}@{move.alias}",
            version=move.version,
            before=move.before,
            user=move.by,
            reason=move.reason,
        )
        return move

    async def _on_approve(self, message: ApproveModel, envelope: Envelope) -> ModelVersion:
        async with self._decided():
            return await self._writer.approve(message)

    async def _on_evaluate(self, message: EvaluateModel, envelope: Envelope) -> ModelVersion:
        async with self._decided():
            return await self._writer.evaluate(message)

    async def _on_rule(self, message: RuleModel, envelope: Envelope) -> NamedModel:
        async with self._decided():
            return await self._writer.rule(message)

    async def _on_remove(self, message: RemoveModel, envelope: Envelope) -> Ack:
        async with self._decided():
            version = await self._writer.remove(message)
            freed = await self._free(version)
        return Ack(note=f"{version.reference} removed{freed}")

    async def _free(self, version: ModelVersion) -> str:
        """Deletes files that were uploaded for this version alone; a job's weights stay the job's."""
        own = version.store.startswith(f"{BUS}{MODELS_FOLDER}/")
        if not own or self._follower.index.is_in_use(version.store):
            return "; its files stay where they are"
        folder = version.store.removeprefix(BUS)
        for file in version.files:
            await self._bus.objects.delete(f"{folder}/{file.name}")
        return f"; {version.bytes:,} bytes are free"

    async def _on_keys(self, message: ModelKeysQuery, envelope: Envelope) -> ModelKeys:
        return ModelKeys(keys=self._writer.signer.public_keys())
