"""Operations on code that travels with jobs: archives by SHA-256, each user's apart (ADR-0051).

To bring code is a right of its own (`code.run`), beside that to submit jobs. An archive is never replaced.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

from bus.connection import Bus
from bus.messaging.object_store import ObjectInfo
from entities.gateway.operations.access_client import Bearer
from entities.gateway.operations.operation import Operation
from schemas.base import is_token
from schemas.data_set.build_file import DataBuildSpec
from schemas.errors import Ack, BadInput, BadJob, Conflict, NotFound, Refused
from schemas.job import ENDED, JobRecord, JobSpec
from schemas.job_file.code import CODE, archive_name, runs_foreign_code
from schemas.pages import CodeArchive
from schemas.signals import AccessDecision
from schemas.urls import BUS

WithCode = TypeVar("WithCode", JobSpec, DataBuildSpec)
"""The file of a job or of a build, which may bring code."""
REMEDY = "an administrator allows it in the access rules; modules that lie on the nodes need no such right"


class CodeOperations:
    """A user's own archives: nobody lists, runs or removes another user's. `records`: all known jobs."""

    def __init__(self, bus: Bus, records: Callable[[], Iterable[JobRecord]]) -> None:
        self._bus = bus
        self._records = records

    async def admit(self, bearer: Bearer, spec: WithCode, user: str) -> WithCode:
        """The job or build with the place of its code, if its user may bring code, and has stored this.

        Raises:
            Refused: the user may not bring code.
            BadJob: the job names a folder of the client's.
            NotFound: its archive is not there.
        """
        foreign = runs_foreign_code(spec.model_dump())
        if spec.code is None and not foreign:
            return spec
        digest = "" if spec.code is None else spec.code.sha256
        if digest is None:
            raise BadJob(
                "code.folder: it is a folder of the client's: `dmsc` and `dmsc.Client` upload it; "
                "others store the archive with PUT /v1/code/SHA256 first, and name code.sha256"
            )
        for resource, key in ((foreign, foreign), (digest, "code")):
            if resource:
                await may_bring(bearer, "code.run", resource, key)
        if spec.code is None:
            return spec
        info = await self.find(user, digest)
        place = f"{BUS}{archive_name(owner_of_code(user), digest)}"
        code = spec.code.model_copy(update={"url": place, "bytes": info.size})
        return spec.model_copy(update={"code": code})

    async def find(self, user: str, sha256: str) -> ObjectInfo:
        """A user's archive. Raises `NotFound`."""
        try:
            return await self._bus.objects.info(archive_name(owner_of_code(user), sha256))
        except NotFound:
            raise NotFound(f"code {sha256[:12]}… of {user} is not on the bus: upload it first") from None

    def show(self, sha256: str) -> Operation[CodeArchive]:
        async def act(access: AccessDecision) -> CodeArchive:
            return archive(await self.find(access.user, sha256))

        return Operation("code.read", sha256, act)

    async def each(self, user: str) -> list[CodeArchive]:
        """A user's archives, by their digests."""
        return [archive(info) for info in await self._bus.objects.list(f"{CODE}/{owner_of_code(user)}/")]

    def remove(self, sha256: str) -> Operation[Ack]:
        """Removes an archive of the user's own, unless a job needs it.

        Raises:
            NotFound: there is none.
            Conflict: a job that has not ended refers to it.
        """

        async def act(access: AccessDecision) -> Ack:
            name = archive_name(owner_of_code(access.user), sha256)
            for record in self._records():
                code = record.spec.code
                if code is not None and code.url == f"{BUS}{name}" and record.state not in ENDED:
                    raise Conflict(f"job {record.job} needs it: it goes with the job's end")
            if not await self._bus.objects.delete(name):
                raise NotFound(f"you have no code {sha256[:12]}… on the bus")
            return Ack(note=f"{sha256[:12]}… removed")

        return Operation("code.write", sha256, act)


async def may_bring(bearer: Bearer, action: str, resource: str, key: str) -> AccessDecision:
    """The decision on bringing code. Raises `Refused`, with the job's key and the remedy."""
    try:
        return await bearer.check(action, resource)
    except Refused as error:
        raise Refused(f"{key}: {error.text}; {REMEDY}", **error.fields) from None


async def with_digest(pieces: AsyncIterator[bytes], sha256: str) -> AsyncIterator[bytes]:
    """The pieces of an archive; fails after the last one if their digest is another: nothing is stored then.

    Raises:
        Conflict: the archive is not the one that its name says.
    """
    digest = hashlib.sha256()
    async for piece in pieces:
        digest.update(piece)
        yield piece
    if digest.hexdigest() != sha256:
        raise Conflict(f"the body's SHA-256 is {digest.hexdigest()}, not the one in the path: send it again")


def archive(info: ObjectInfo) -> CodeArchive:
    return CodeArchive(sha256=info.name.rpartition("/")[2], bytes=info.size, modified=info.modified)


def owner_of_code(user: str) -> str:
    """The user's name as a part of an archive's name.

    Raises:
        BadInput: the name has other characters than a token.
    """
    if not is_token(user):
        raise BadInput(f"user {user!r} can't bring code: the name has more than letters, digits, - and _")
    return user
