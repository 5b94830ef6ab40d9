"""Makes versions of weights: reads them, compares digests, and writes what was found (ADR-0120)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.files.artifacts import ReadableArtifacts, open_on_bus
from bus.logs import get_logger
from bus.mesh.discovery import resolve
from entities.job_files.node_files import agents_of, files_of
from entities.model_records.weights_reading import SHARD, WeightsRead, read_weights
from entities.model_registry import version_facts
from entities.model_registry.version_writer import VersionWriter
from schemas.errors import BadData, BadInput, Conflict, NotFound, Refused
from schemas.job import JobRecord, JobState
from schemas.models.commands import ModelRegistered, ModelSource, RegisterModel
from schemas.models.version import ModelLineage, ModelVersion
from schemas.registry import Resolve
from schemas.urls import BUS, SECRET
from schemas.weights_digest import BESIDE, INDEX_NAME, weights_sha256

log = get_logger("models")


@dataclass(frozen=True, slots=True)
class _Found:
    """What weights turned out to be: their files, their digest, and the job that they are from."""

    read: WeightsRead
    sha256: str
    store: str
    job: JobRecord | None


class WeightsRegistration:
    """Registers weights. Equal requests at the same time are one.

    Those that differ in anything are not: whoever states another digest, or has other rights, gets an answer
    to that. Versions of equal weights are one all the same (`VersionWriter.create`).
    """

    def __init__(self, bus: Bus, writer: VersionWriter) -> None:
        self._bus = bus
        self._writer = writer
        self._jobs = bus.bucket(subjects.JOB_RECORD)
        self._under_way: dict[str, asyncio.Task[ModelRegistered]] = {}

    async def register(self, asked: RegisterModel, job: JobRecord | None = None) -> ModelRegistered:
        """The version of these weights; it is made if the model has none with their digest.

        `job`: the record of the job that the request names, where it is known; else it is read.

        Raises:
            NotFound: there is no such job, or no such file.
            Conflict: the job is not done, or the version was removed.
            Refused: the model is another user's.
            BadData, BadInput: the files are not what they should be; one line.
        """
        key = asked.model_dump_json()
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(self._register(asked, job))
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Ends what is under way; a repeated request begins it again."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _register(self, asked: RegisterModel, job: JobRecord | None) -> ModelRegistered:
        await self._writer.require_owner(asked.name, asked.user, over_others=asked.over_others)
        source = asked.source
        if source.job is not None and job is None:
            job = await self._job(source.job)
        if job is not None:
            assert job.weights is not None
            known = self._writer.index.with_digest(asked.name, job.weights.sha256)
            if known is not None:
                return ModelRegistered(version=_living(known), new=False)
        found = await self._read(source, job)
        tokenizer, tokenizer_sha256 = version_facts.tokenizer_of(
            {file.name: file.sha256 for file in found.read.files}, job
        )
        if asked.tokenizer_sha256 is not None and asked.tokenizer_sha256 != tokenizer_sha256:
            raise BadInput(
                f"the tokenizer beside the weights is {tokenizer_sha256[:12] or tokenizer or 'none'}, not "
                f"{asked.tokenizer_sha256[:12]}: nothing is registered"
            )
        content = self._content(asked, found) | {
            "tokenizer": tokenizer,
            "tokenizer_sha256": tokenizer_sha256,
        }
        version, new = await self._writer.create(asked.name, asked.user, content)
        if new:
            log.info("model registered", model=version.reference, sha256=version.sha256, user=asked.user)
        return ModelRegistered(version=_living(version), new=new)

    async def _job(self, name: str) -> JobRecord:
        entry = await self._jobs.get(job=name)
        if entry is None or not isinstance(entry.message, JobRecord):
            raise NotFound(f"there is no job {name}; list them to see which there are", job=name)
        record = entry.message
        if record.state is not JobState.DONE or record.weights is None:
            raise Conflict(
                f"{name} is {record.state} and has no weights; they come when it is done", job=name
            )
        return record

    async def _read(self, source: ModelSource, job: JobRecord | None) -> _Found:
        if job is None:
            if not source.store:
                raise BadInput("source: name a job, or a folder")
            store, names = source.store, source.files
        else:
            assert job.weights is not None
            store, names = job.weights.url, job.weights.shards
        folder = await self._folder(store)
        try:
            read = await read_weights(folder, names or await _model_files(folder))
        except (BadData, BadInput, NotFound) as error:
            raise type(error)(f"{store}: {error.text}: nothing is registered", **error.fields) from None
        if job is None:
            sha256, expected = weights_sha256(read.tensors), source.sha256
        else:
            assert job.weights is not None
            sha256, expected = version_facts.digest_of_job(job.weights, read.tensors), job.weights.sha256
        if expected is not None and expected != sha256:
            whose = "the manifest of" if job is not None else "stated for"
            raise BadData(
                f"the digest of the weights is {sha256[:12]}, {whose} {source.job or store} is "
                f"{expected[:12]}: they were changed, and nothing is registered"
            )
        return _Found(read, sha256, store, job)

    async def _folder(self, url: str) -> ReadableArtifacts:
        if url.startswith(SECRET):
            raise BadInput(
                f"{url}: only the job's own processes open it; download the weights, and register them --from"
            )
        if url.startswith(BUS):
            return open_on_bus(url, self._bus)
        answer = await resolve(self._bus, Resolve(prefix="entity/cluster"))
        agents = agents_of({record.sid: record for record in answer.records})
        return files_of(url, self._bus, lambda: agents)

    def _content(self, asked: RegisterModel, found: _Found) -> dict[str, Any]:
        now, job, index = time.time(), found.job, self._writer.index
        config = version_facts.config_of(found.read.small)
        arguments = {} if job is None else job.spec.model.args
        if job is None:
            lineage = ModelLineage(source=asked.source.origin or found.store)
        else:
            lineage = version_facts.lineage_of_job(job, index)
        return {
            "sha256": found.sha256,
            "bytes": found.read.weights_bytes,
            "tensors": len(found.read.tensors),
            "store": found.store,
            "files": found.read.files,
            "factory": "" if job is None else job.spec.model.factory,
            "signature": asked.signature or version_facts.signature_of(config, arguments),
            "lineage": lineage,
            "evaluations": () if job is None else version_facts.evaluations_of(job, now),
            "notes": asked.notes,
            "registered_at": now,
            "registered_by": asked.user,
        } | ({} if job is None else {"cost": version_facts.cost_of(job)})


async def _model_files(folder: ReadableArtifacts) -> list[str]:
    """The files of a folder that make a version: safetensors, and what loaders look for beside them."""
    names = await folder.list()
    return [name for name in names if name.endswith(SHARD) and "/" not in name] + [
        name for name in names if name in BESIDE or name == INDEX_NAME
    ]


def _living(version: ModelVersion) -> ModelVersion:
    """The version. Raises `Conflict` if it was removed, and so is not to be there again."""
    if version.removed_at is not None:
        raise Conflict(
            f"these weights are {version.reference}, which {version.removed_by or 'somebody'} removed: "
            "a removed version does not come back"
        )
    return version


def refused_for_good(error: Exception) -> bool:
    """Whether another attempt would end the same way."""
    return isinstance(error, BadInput | Refused | Conflict | NotFound)
