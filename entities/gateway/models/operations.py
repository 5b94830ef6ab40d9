"""Operations on models: reads from this gateway's copy, and requests to a registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bus import subjects
from bus.subject_row import Reply, Request, Subject
from entities.gateway.operations.access_client import Bearer, check_each
from entities.gateway.operations.backends import Backends
from entities.gateway.operations.code import owner_of_code
from entities.gateway.operations.idempotency import key_token
from entities.gateway.operations.job_urls import READ_ARTIFACT, among_folders, refuse_each, things_among
from entities.gateway.operations.jobs import JobOperations
from entities.gateway.operations.operation import Operation
from entities.model_records.model_follower import ModelFollower
from entities.model_records.model_index import ModelIndex
from schemas.errors import Ack, BadInput, NoResponders, NotFound, Refused, Unavailable
from schemas.model_pages import (
    EvaluateBody,
    ModelLine,
    ModelSummary,
    MoveBody,
    RegisterBody,
    RuleBody,
)
from schemas.models.commands import (
    MESH_RULE,
    ApproveModel,
    EvaluateModel,
    ModelKeys,
    ModelKeysQuery,
    ModelRegistered,
    ModelSource,
    MoveAlias,
    RegisterModel,
    RemoveModel,
    RuleModel,
)
from schemas.models.reference import is_digest, is_number, misnamed_alias, refuse_name
from schemas.models.version import AliasMove, ModelVersion, NamedModel
from schemas.secrets import has_credentials
from schemas.signals import AccessDecision, Role
from schemas.urls import BUS, MODELS_FOLDER

READ, USE = "model.read", "model.use"
"""To see versions; to begin jobs with their weights and to fetch their files."""
_ALL = "models"
_OVER_OTHERS = (Role.OPERATOR, Role.ADMIN)
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class ModelTimes:
    """Deadlines, in seconds."""

    complete_s: float = 5.0  # until this gateway's copy is read after a start
    command_s: float = 15.0  # one request to a registry, repeated until answered
    register_s: float = 600.0  # reading weights; a client that asks again meanwhile joins in


class ModelOperations:
    """What users ask about models."""

    def __init__(
        self,
        follower: ModelFollower,
        backends: Backends,
        jobs: JobOperations,
        times: ModelTimes = ModelTimes(),
    ) -> None:
        self._follower = follower
        self._backends = backends
        self._jobs = jobs
        self._times = times

    async def index(self) -> ModelIndex:
        """This gateway's copy. Raises `Unavailable` until it is complete."""
        return await self._follower.complete(self._times.complete_s)

    def _reading(
        self, name: str, read: Callable[[ModelIndex], Value], action: str = READ
    ) -> Operation[Value]:
        async def act(_: AccessDecision) -> Value:
            return read(await self.index())

        return Operation(action, name, act)

    # --- reads ----------------------------------------------------------------------------------------------
    def models(self) -> Operation[list[ModelSummary]]:
        return self._reading(_ALL, lambda index: index.summaries())

    def versions(self, name: str, removed: bool = False) -> Operation[list[ModelVersion]]:
        """The versions of a model. Raises `NotFound` with near names."""
        return self._reading(name, lambda index: index.versions(name, removed=removed))

    def version(self, name: str, reference: str, action: str = READ) -> Operation[ModelVersion]:
        """One version; with `USE`, for one who fetches its files, it must not be removed.

        Raises `NotFound`.
        """
        removed = action == READ and (is_number(reference) or is_digest(reference))
        return self._reading(name, lambda index: index.find(name, reference, removed=removed), action)

    def history(
        self, name: str, alias: str | None = None, at: float | None = None
    ) -> Operation[list[AliasMove]]:
        """The moves of a model's aliases; with `at`, what each named then. Raises `NotFound`."""

        def read(index: ModelIndex) -> list[AliasMove]:
            moves = index.moves(name, alias)
            if at is None:
                return moves
            then = (index.named_at(name, each, at) for each in sorted({move.alias for move in moves}))
            return [move for move in then if move is not None]

        return self._reading(name, read)

    def line(self, name: str, reference: str) -> Operation[ModelLine]:
        """A version with its ancestors. Raises `NotFound`."""
        return self._reading(name, lambda index: index.line(index.find(name, reference, removed=True)))

    def keys(self) -> Operation[ModelKeys]:
        """The keys that versions are signed with."""
        return self._asking(READ, _ALL, subjects.MODEL_KEYS, lambda _: ModelKeysQuery())

    # --- changes --------------------------------------------------------------------------------------------
    def _asking(
        self,
        action: str,
        name: str,
        row: Subject[Request, Reply],
        message: Callable[[AccessDecision], Request],
    ) -> Operation[Reply]:
        async def act(access: AccessDecision) -> Reply:
            return await self._ask(row, message(access))

        return Operation(action, name, act)

    async def _ask(
        self,
        row: Subject[Request, Reply],
        message: Request,
        deadline_s: float | None = None,
        cause: str | None = None,
    ) -> Reply:
        """Asks a registry, and takes over what it answers, so that the next read here shows it."""
        try:
            answer = await self._backends.command(
                row, message, deadline_s=deadline_s or self._times.command_s, cause=cause
            )
        except NoResponders:
            raise Unavailable("no model registry runs: dmsc run model-registry starts one") from None
        self._follower.index.take(answer.version if isinstance(answer, ModelRegistered) else answer)
        return answer

    def register(
        self, bearer: Bearer, name: str, body: RegisterBody, key: str | None = None
    ) -> Operation[ModelRegistered]:
        """Registers weights that the bearer may read."""
        refuse_name(name)

        async def act(access: AccessDecision) -> ModelRegistered:
            await self._let_read(bearer, body.source, access)
            message = RegisterModel(
                name=name,
                source=body.source,
                signature=body.signature,
                tokenizer_sha256=body.tokenizer_sha256,
                notes=body.notes,
                user=access.user,
                over_others=access.role in _OVER_OTHERS,
            )
            cause = None if key is None else f"key.{key_token(access.user, key)}"
            return await self._ask(subjects.REGISTER_MODEL, message, self._times.register_s, cause)

        return Operation("model.register", name, act)

    async def _let_read(self, bearer: Bearer, source: ModelSource, access: AccessDecision) -> None:
        """Checks that the bearer may read the weights. Raises `Refused`, `BadInput`."""
        if (source.job is None) == (not source.store):
            raise BadInput("source: give either job, or store with files")
        if source.job is not None:
            await bearer.check(READ_ARTIFACT, source.job)
            return
        if source.store.startswith(f"{BUS}{MODELS_FOLDER}/"):
            if not source.store.startswith(f"{upload_folder(access.user)}/"):
                raise Refused(f"{source.store} was uploaded by another user", user=access.user)
            return
        if has_credentials(source.store):
            raise BadInput(
                "source.store: a URL with credentials would stand in the record; upload the folder"
            )
        refuse_each([("source.store", source.store, False)])
        jobs = {}
        if among_folders([source.store]):
            jobs = {record.job: record for record in (await self._jobs.all_records()).jobs}
        await check_each(bearer, things_among([("source.store", source.store)], jobs))

    def move(self, name: str, alias: str, body: MoveBody, key: str | None = None) -> Operation[AliasMove]:
        """Moves an alias to a version, or with `to` empty to nothing."""
        if why := misnamed_alias(alias):
            raise BadInput(why)

        async def act(access: AccessDecision) -> AliasMove:
            index = await self.index()
            message = MoveAlias(
                name=name,
                alias=alias,
                version=self._number(index, name, body.to),
                expected=body.expect is not None,
                expect=None if body.expect is None else self._number(index, name, body.expect),
                other_tokenizer=body.other_tokenizer,
                reason=body.reason,
                user=access.user,
            )
            cause = None if key is None else f"key.{key_token(access.user, key)}"
            return await self._ask(subjects.MOVE_ALIAS, message, cause=cause)

        return Operation("model.alias", name, act)

    @staticmethod
    def _number(index: ModelIndex, name: str, reference: str) -> int | None:
        """The number that is meant; a number itself is the registry's to judge, which may know more."""
        index.require(name)
        if not reference:
            return None
        return int(reference) if is_number(reference) else index.find(name, reference).version

    def approve(self, name: str, reference: str, note: str) -> Operation[ModelVersion]:
        async def act(access: AccessDecision) -> ModelVersion:
            number = (await self.index()).find(name, reference).version
            role = "" if access.role is None else access.role.value
            message = ApproveModel(name=name, version=number, user=access.user, role=role, note=note)
            return await self._ask(subjects.APPROVE_MODEL, message)

        return Operation("model.approve", name, act)

    def evaluate(self, name: str, reference: str, body: EvaluateBody) -> Operation[ModelVersion]:
        async def act(access: AccessDecision) -> ModelVersion:
            number = (await self.index()).find(name, reference).version
            message = EvaluateModel(name=name, version=number, evaluations=body.evaluations, user=access.user)
            return await self._ask(subjects.EVALUATE_MODEL, message)

        return Operation("model.evaluate", name, act)

    def remove(self, name: str, reference: str) -> Operation[Ack]:
        async def act(access: AccessDecision) -> Ack:
            number = (await self.index()).find(name, reference, removed=True).version
            return await self._ask(
                subjects.REMOVE_MODEL, RemoveModel(name=name, version=number, user=access.user)
            )

        return Operation("model.remove", name, act)

    def rule(self, name: str, body: RuleBody) -> Operation[NamedModel]:
        """How many approvals aliases want, of one model or, by `_`, of all."""
        return self._asking(
            "model.rule",
            name,
            subjects.RULE_MODEL,
            lambda access: RuleModel(name=name, approvals=body.approvals, user=access.user),
        )

    def rules(self, name: str) -> Operation[NamedModel]:
        """The rules in force. Raises `NotFound`."""

        def read(index: ModelIndex) -> NamedModel:
            if name != MESH_RULE:
                index.require(name)
            found = index.names.get(name)
            if found is None:
                raise NotFound(f"there is no rule for {'all models' if name == MESH_RULE else name}")
            return found

        return self._reading(name, read)


def upload_folder(user: str) -> str:
    """Below which a user's uploaded weights lie, each under its digest."""
    return f"{BUS}{MODELS_FOLDER}/{owner_of_code(user)}"
