"""The registry's writes: each is a compare-and-set, repeated or refused where another writer was first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.security.signing import MeshSigner
from entities.model_records.model_index import ModelIndex
from entities.model_registry.alias_rules import next_move
from schemas.envelope import EntityKind
from schemas.errors import BadInput, Conflict, NotFound, Refused, Unavailable
from schemas.models.commands import (
    MESH_RULE,
    ApproveModel,
    EvaluateModel,
    MoveAlias,
    RemoveModel,
    RuleModel,
)
from schemas.models.reference import refuse_name
from schemas.models.version import (
    MOST_NOTES,
    AliasMove,
    ModelApproval,
    ModelVersion,
    NamedModel,
    signed_bytes,
)

ATTEMPTS = 64
"""Attempts at a write that others make at the same time; each of theirs that succeeds costs one."""
MOST_APPROVALS = 64

Clock = Callable[[], float]


class VersionWriter:
    """Writes names, versions and moves. `index` is this process's copy; decisions read through the leader.

    `clock`: seconds since the epoch.
    """

    def __init__(self, bus: Bus, index: ModelIndex, clock: Clock = time.time) -> None:
        self.index = index
        self.signer = MeshSigner(bus.keyring, EntityKind.MODEL_REGISTRY)
        self._names = bus.bucket(subjects.NAMED_MODEL)
        self._versions = bus.bucket(subjects.MODEL_VERSION)
        self._moves = bus.bucket(subjects.ALIAS_MOVE)
        self._clock = clock

    # --- names ----------------------------------------------------------------------------------------------
    async def require_owner(self, name: str, user: str, *, over_others: bool) -> None:
        """Raises `Refused` if the model is another user's, `BadInput` if none may be called so."""
        refuse_name(name)
        named = await self._named(name)
        if named is not None and named.owner not in ("", user) and not over_others:
            raise Refused(f"model {name} is {named.owner}'s; register yours under another name", user=user)

    async def _named(self, name: str) -> NamedModel | None:
        entry = await self._names.get(leader=True, name=name)
        if entry is None or not isinstance(entry.message, NamedModel):
            return None
        self.index.take(entry.message)
        return entry.message

    async def rule(self, asked: RuleModel) -> NamedModel:
        """Sets how many approvals aliases want. Raises `NotFound`, `BadInput`."""
        if asked.name != MESH_RULE:
            self.index.require(asked.name)
        if wrong := [alias for alias, count in asked.approvals.items() if not 0 <= count <= MOST_APPROVALS]:
            raise BadInput(f"approvals of {wrong[0]}: a number from 0 to {MOST_APPROVALS}; 0 lifts the rule")
        for _ in range(ATTEMPTS):
            entry = await self._names.get(leader=True, name=asked.name)
            before = None if entry is None else entry.message
            if before is None:
                before = NamedModel(name=asked.name, created_at=self._clock())
            rules = {**before.approvals, **asked.approvals}
            # A model's own 0 counts: the mesh's rule does not apply to that alias of it.
            kept = (
                rules
                if asked.name != MESH_RULE
                else {alias: count for alias, count in rules.items() if count}
            )
            after = before.model_copy(update={"approvals": kept, "changed_by": asked.user})
            try:
                if entry is None:
                    await self._names.create(after, name=asked.name)
                else:
                    await self._names.update(after, revision=entry.revision, name=asked.name)
            except Conflict:
                continue
            self.index.take(after)
            return after
        raise _busy(asked.name)

    # --- versions -------------------------------------------------------------------------------------------
    async def create(self, name: str, user: str, content: dict[str, Any]) -> tuple[ModelVersion, bool]:
        """The version with this content, and whether it was made now: each digest is one version of a model.

        Numbers have no gap: whoever writes the next one has seen all before it, so two can't be made of the
        same weights.

        Raises:
            Refused: the name became another user's meanwhile.
        """
        if await self._named(name) is None:
            named = NamedModel(name=name, owner=user, created_at=self._clock())
            try:
                await self._names.create(named, name=name)
                self.index.take(named)
            except Conflict:
                await self.require_owner(name, user, over_others=False)
        for _ in range(ATTEMPTS):
            known = self.index.with_digest(name, content["sha256"])
            if known is not None:
                return known, False
            number = self.index.newest_number(name) + 1
            version = self._signed(ModelVersion(name=name, version=number, **content))
            try:
                await self._versions.create(version, name=name, version=number)
            except Conflict:
                await self._read(name, number)
                continue
            self.index.take(version)
            return version, True
        raise _busy(name)

    def _signed(self, version: ModelVersion) -> ModelVersion:
        key, signature = self.signer.sign(signed_bytes(version))
        return version.model_copy(update={"signed_by": key, "signed": signature})

    async def _read(self, name: str, number: int) -> tuple[ModelVersion, int]:
        """A version as it is now, and its revision. Raises `NotFound`."""
        entry = await self._versions.get(leader=True, name=name, version=number)
        if entry is None or not isinstance(entry.message, ModelVersion):
            self.index.find(name, str(number))  # says which there are
            raise NotFound(f"there is no version {name}@{number}")
        self.index.take(entry.message)
        return entry.message, entry.revision

    async def approve(self, asked: ApproveModel) -> ModelVersion:
        """Adds a user's approval; a second one of the same user takes the first one's place."""

        def approved(version: ModelVersion) -> ModelVersion:
            approval = ModelApproval(by=asked.user, role=asked.role, at=self._clock(), note=asked.note)
            others = tuple(each for each in version.approvals if each.by != asked.user)
            return version.model_copy(update={"approvals": (*others, approval)[-MOST_NOTES:]})

        return await self._change(asked.name, asked.version, approved)

    async def evaluate(self, asked: EvaluateModel) -> ModelVersion:
        """Adds figures; those of the same metric, data and user take the place of earlier ones."""

        def evaluated(version: ModelVersion) -> ModelVersion:
            now = self._clock()
            new = {
                (each.metric, each.data): each.model_copy(update={"by": asked.user, "at": now})
                for each in asked.evaluations
            }
            others = tuple(
                each
                for each in version.evaluations
                if each.by != asked.user or (each.metric, each.data) not in new
            )
            return version.model_copy(update={"evaluations": (*others, *new.values())[-MOST_NOTES:]})

        return await self._change(asked.name, asked.version, evaluated)

    async def remove(self, asked: RemoveModel) -> ModelVersion:
        """Marks a version as removed. Raises `Conflict` while an alias names it."""
        for alias in {**self.index.aliases(asked.name)}:
            await self._catch_up(asked.name, alias)
        if naming := self.index.naming(asked.name, asked.version):
            raise Conflict(
                f"{asked.name}@{asked.version} is {', '.join(naming)}: move that alias first, with "
                f"dmsc model alias {asked.name} {naming[0]} VERSION"
            )

        def removed(version: ModelVersion) -> ModelVersion:
            if version.removed_at is not None:
                return version
            return version.model_copy(update={"removed_at": self._clock(), "removed_by": asked.user})

        return await self._change(asked.name, asked.version, removed, of_removed=True)

    async def _change(
        self,
        name: str,
        number: int,
        change: Callable[[ModelVersion], ModelVersion],
        *,
        of_removed: bool = False,
    ) -> ModelVersion:
        for _ in range(ATTEMPTS):
            version, revision = await self._read(name, number)
            if version.removed_at is not None and not of_removed:
                raise NotFound(f"{version.reference} was removed by {version.removed_by}")
            after = change(version)
            if after == version:
                return version
            try:
                await self._versions.update(after, revision=revision, name=name, version=number)
            except Conflict:
                continue
            self.index.take(after)
            return after
        raise _busy(f"{name}@{number}")

    # --- aliases --------------------------------------------------------------------------------------------
    async def move(self, asked: MoveAlias, command: str) -> AliasMove:
        """Moves an alias. Of two movers at the same time one wins, and the other is told.

        Raises:
            Conflict, NotFound, Refused: see `next_move`.
        """
        self.index.require(asked.name)
        last = await self._catch_up(asked.name, asked.alias)
        if last is not None and last.command == command:
            return last  # the answer to it was lost
        version = await self._read_for_move(asked, None if last is None else last.version)
        move = next_move(self.index, asked, version, self._clock(), command)
        try:
            await self._moves.create(move, name=move.name, alias=move.alias, number=move.number)
        except Conflict:
            other = await self._catch_up(asked.name, asked.alias)
            if other is not None and other.command == command:
                return other
            by, version_now = (
                ("somebody", "") if other is None else (other.by, str(other.version or "nothing"))
            )
            raise Conflict(
                f"{asked.name}@{asked.alias} names {version_now} now: {by} moved it at the same time; look "
                "again, and move it if you still want to"
            ) from None
        self.index.take(move)
        return move

    async def _read_for_move(self, asked: MoveAlias, before: int | None) -> ModelVersion | None:
        """Reads what decides about a move, at once: the rules, and the versions to and from."""
        numbers = sorted({number for number in (asked.version, before) if number is not None})
        found, *_ = await asyncio.gather(
            asyncio.gather(*(self._read(asked.name, number) for number in numbers)),
            self._named(MESH_RULE),
            self._named(asked.name),
        )
        return next((version for version, _ in found if version.version == asked.version), None)

    async def _catch_up(self, name: str, alias: str) -> AliasMove | None:
        """The last move of an alias, through the leader: the copy may lag behind another registry."""
        last = self.index.last_move(name, alias)
        while True:
            number = 1 if last is None else last.number + 1
            entry = await self._moves.get(leader=True, name=name, alias=alias, number=number)
            if entry is None or not isinstance(entry.message, AliasMove):
                return last
            self.index.take(entry.message)
            last = entry.message

    def was_moved_by(self, name: str, alias: str, command: str) -> bool:
        """Whether this command has moved the alias before."""
        if self.index.last_move(name, alias) is None:
            return False
        return any(move.command == command for move in self.index.moves(name, alias))


def _busy(what: str) -> Unavailable:
    return Unavailable(f"{what} is being changed by others all the time: ask again in a moment")
