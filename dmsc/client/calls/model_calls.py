"""Requests to the model registry: versions, aliases, lineage, files."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from dmsc.client import http_protocol
from dmsc.client.calls.access_calls import segment
from dmsc.client.gateway_requests import Gateways, OnProgress
from dmsc.client.model_folder import check_files, read_folder
from schemas.model_pages import (
    AliasHistory,
    EvaluateBody,
    ModelLine,
    ModelPage,
    ModelSummary,
    MoveBody,
    RegisterBody,
    RuleBody,
    VersionPage,
)
from schemas.models.commands import MESH_RULE, ModelKeys, ModelRegistered, ModelSource
from schemas.models.reference import split_model
from schemas.models.version import (
    AliasMove,
    ModelEvaluation,
    ModelSignature,
    ModelVersion,
    NamedModel,
)

MODELS = "/v1/registry/models"


class ModelCalls:
    """A part of `AsyncClient`. A version is named as in a job file: `NAME`, `NAME@4`, `NAME@production`."""

    _gateways: Gateways

    # --- reads ----------------------------------------------------------------------------------------------
    async def models(self) -> list[ModelSummary]:
        """The models by name, with their newest versions and what their aliases name."""
        pages = self._gateways.pages(MODELS, ModelPage)
        return [model async for page in pages for model in page.models]

    async def model_versions(self, name: str, *, removed: bool = False) -> list[ModelVersion]:
        """A model's versions by number. Raises `NotFound` with near names."""
        params = {"removed": "true"} if removed else {}
        pages = self._gateways.pages(f"{MODELS}/{segment(name)}", VersionPage, params)
        return [version async for page in pages for version in page.versions]

    async def model(self, what: str) -> ModelVersion:
        """One version; the newest where only the name is given. Raises `NotFound`."""
        name, reference = split_model(what)
        if not reference:
            summary = next((each for each in await self.models() if each.name == name), None)
            if summary is None or summary.newest is None:
                return (await self.model_versions(name))[-1]
            reference = str(summary.newest)
        return await self._gateways.ask_for(ModelVersion, "GET", _version(name, reference))

    async def model_lineage(self, what: str) -> ModelLine:
        """A version and those that it descends from, the nearest first."""
        version = await self.model(what)
        path = f"{_version(version.name, str(version.version))}/lineage"
        return await self._gateways.ask_for(ModelLine, "GET", path)

    async def model_history(
        self, name: str, alias: str | None = None, *, at: float | None = None
    ) -> list[AliasMove]:
        """Each move of the model's aliases, oldest first; with `at`, those in force at that time."""
        params = {"alias": alias, "at": None if at is None else repr(at)}
        pages = self._gateways.pages(f"{MODELS}/{segment(name)}/aliases", AliasHistory, params)
        return [move async for page in pages for move in page.moves]

    async def model_keys(self) -> tuple[str, ...]:
        """The mesh's public keys, with which versions are signed; the present one first."""
        return (await self._gateways.ask_for(ModelKeys, "GET", "/v1/registry/keys")).keys

    # --- versions -------------------------------------------------------------------------------------------
    async def register_model(
        self,
        name: str,
        *,
        job: str | None = None,
        folder: str | Path | None = None,
        signature: ModelSignature | None = None,
        tokenizer_sha256: str | None = None,
        notes: str = "",
        idempotency_key: str | None = None,
        progress: OnProgress | None = None,
    ) -> ModelRegistered:
        """Make a version of a finished job's weights, or of a folder's, which is uploaded first.

        `folder` may also be a URL that the mesh reads (`bus://…`, `s3://…`); then it is not uploaded. Weights
        that are a version of the model already give that version.
        """
        source = ModelSource(job=job) if folder is None else await self._source(folder, progress)
        body = RegisterBody(
            source=source, signature=signature, tokenizer_sha256=tokenizer_sha256, notes=notes
        )
        path = f"{MODELS}/{segment(name)}/versions"
        document = body.model_dump(mode="json")
        return await self._gateways.ask_for(ModelRegistered, "POST", path, document, key=idempotency_key)

    async def _source(self, folder: str | Path, progress: OnProgress | None) -> ModelSource:
        url = str(folder)
        if "://" in url:
            return ModelSource(store=url, origin=url)
        read = await asyncio.to_thread(read_folder, Path(folder))
        store = ""
        for file in read.files:
            path = f"/v1/registry/files/{read.sha256}/{segment(file)}"
            store = str((await self._gateways.send(path, read.path / file, file, progress))["store"])
        origin = str(read.path.absolute())
        return ModelSource(store=store, files=read.files, sha256=read.sha256, origin=origin)

    async def evaluate_model(
        self, what: str, figures: Mapping[str, float], *, data: str = ""
    ) -> ModelVersion:
        """Record figures of a version, measured on `data`; yours of the same metric and data are replaced."""
        version = await self.model(what)
        found = tuple(
            ModelEvaluation(metric=metric, value=value, data=data) for metric, value in figures.items()
        )
        path = f"{_version(version.name, str(version.version))}/evaluations"
        document = EvaluateBody(evaluations=found).model_dump(mode="json")
        return await self._gateways.ask_for(ModelVersion, "POST", path, document)

    async def approve_model(self, what: str, *, note: str = "") -> ModelVersion:
        """Approve a version."""
        version = await self.model(what)
        path = f"{_version(version.name, str(version.version))}/approve"
        return await self._gateways.ask_for(ModelVersion, "POST", path, params={"note": note})

    async def remove_model(self, what: str) -> str:
        """Remove a version that no alias names. Raises `Conflict` while one does."""
        name, reference = split_model(what)
        answer = await self._gateways.ask("DELETE", _version(name, reference))
        return str(answer["note"])

    async def download_model(
        self, what: str, folder: Path, *, progress: OnProgress | None = None
    ) -> ModelVersion:
        """Fetch a version's files into a folder, and compare them with their digests."""
        version = await self.model(what)
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        base = f"{_version(version.name, str(version.version))}/files"
        for file in version.files:
            with http_protocol.partial_file(folder / file.name) as partial:
                await self._gateways.fetch(f"{base}/{segment(file.name)}", partial, file.name, progress)
        await asyncio.to_thread(check_files, folder, version.files)
        return version

    # --- aliases --------------------------------------------------------------------------------------------
    async def move_alias(
        self,
        name: str,
        alias: str,
        to: int | str | None,
        *,
        expect: int | str | None = None,
        other_tokenizer: bool = False,
        reason: str = "",
        idempotency_key: str | None = None,
    ) -> AliasMove:
        """Have an alias name a version, or with None nothing.

        With `expect`, only if it names that version now ("": nothing). Raises `Conflict` if somebody else was
        first, `Refused` if approvals are missing.
        """
        body = MoveBody(
            to="" if to is None else str(to),
            expect=None if expect is None else str(expect),
            other_tokenizer=other_tokenizer,
            reason=reason,
        )
        path = f"{MODELS}/{segment(name)}/aliases/{segment(alias)}"
        document = body.model_dump(mode="json")
        return await self._gateways.ask_for(AliasMove, "POST", path, document, key=idempotency_key)

    async def rule_model(self, name: str | None, approvals: Mapping[str, int]) -> NamedModel:
        """Say how many approvals aliases of a model want, or with None, of all models; for operators."""
        path = f"/v1/registry/rules/{segment(name or MESH_RULE)}"
        document = RuleBody(approvals=dict(approvals)).model_dump(mode="json")
        return await self._gateways.ask_for(NamedModel, "PUT", path, document)


def _version(name: str, reference: str) -> str:
    return f"{MODELS}/{segment(name)}/versions/{segment(reference)}"
