"""`Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header): a repeated POST does nothing twice.

The bucket of keys is shared by all gateways: the first claims the key, acts, and keeps its answer there; a
repetition, at whichever gateway, gets that answer. A claim of a gateway that has gone meanwhile is taken
over: commands to the orchestrator are idempotent, and a submission is recognised by its cause, which is
derived from the key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import KeyValueEntry
from schemas.door import KeptAnswer
from schemas.errors import BadInput, Conflict, DmscError, InProgress, Unavailable, UnreadableRecord
from schemas.registry import InstanceState, ServiceRecord

KEPT_S = 86_400.0
"""How long an answer is kept: a day, as is usual."""
CLAIM_S = 60.0
"""How long a claim holds whose gateway neither answered nor went: longer than any command's deadline."""
MOST_BYTES = 512 << 10
"""An answer above this is not kept (messages end at 1 MiB); the repetition is then refused."""


class KeyReused(BadInput):
    """The key came with another request before."""

    code = "idempotency_key_reused"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a POST answers: a JSON object, its status, and where what was made is."""

    body: str
    status: int = HTTPStatus.OK
    location: str = ""


def key_token(user: str, key: str) -> str:
    """The bucket's key: of one user, so that nobody reads another's answers by guessing keys."""
    return hashlib.sha256(f"{user}\0{key}".encode()).hexdigest()[:48]


def request_digest(method: str, path: str, query: str, body: bytes) -> str:
    """What makes two requests the same."""
    head = f"{method} {path}?{query}\n".encode("utf-8", "surrogatepass")
    return hashlib.sha256(head + body).hexdigest()


Step = Literal["act", "take over", "repeat", "in progress", "other request"]


def next_step(
    kept: KeptAnswer | None, digest: str, claimant: ServiceRecord | None, *, registry_known: bool
) -> Step:
    """What to do with a request whose key has `kept`. `claimant`: the registry's record of who claimed it."""
    if kept is None:
        return "act"
    if kept.request != digest:
        return "other request"
    if kept.status:
        return "repeat"
    if not registry_known:
        return "in progress"
    over = (InstanceState.FAULTED, InstanceState.GONE)
    lives = claimant is not None and claimant.incarnation == kept.incarnation and claimant.state not in over
    return "in progress" if lives else "take over"


class IdempotencyStore:
    """The shell. `records` gives the registry's records by SID as far as they are known, None before that."""

    def __init__(self, bus: Bus, records: Callable[[], Mapping[str, ServiceRecord] | None]) -> None:
        self._bus = bus
        self._bucket = bus.bucket(subjects.KEPT_ANSWER)
        self._records = records

    async def once(
        self,
        user: str,
        key: str,
        digest: str,
        act: Callable[[], Awaitable[Answer]],
        *,
        always: bool = False,
    ) -> Answer:
        """The answer to this request: `act`'s, now or at an earlier time.

        Args:
            always: `act` may be done twice, and is done also where the bus keeps nothing (its disk is full).

        Raises:
            KeyReused: the key came with another request before.
            InProgress: it is being answered at this moment.
            DmscError: what `act` raises; then nothing is kept, and a repetition acts again.
        """
        token = key_token(user, key)
        claim = KeptAnswer(
            request=digest, gateway=self._bus.sender.name, incarnation=self._bus.sender.incarnation
        )
        try:
            found = await self._claimed(claim, token)
        except Unavailable:
            if not always:
                raise
            return await act()
        if isinstance(found, Answer):
            return found
        try:
            answer = await act()
        except BaseException:
            await self._release(token, found)
            raise
        await self._keep(claim, answer, found, token)
        return answer

    async def _claimed(self, claim: KeptAnswer, token: str) -> int | Answer:
        """The claim's revision, or what was answered before."""
        try:
            entry = await self._bucket.get(leader=True, key=token)
        except UnreadableRecord:  # as if it had expired: acting again is idempotent
            entry = None
        step = self._step(entry, claim.request)
        if step == "repeat":
            assert entry is not None
            return _answer(entry)
        try:
            if step == "act":
                return await self._bucket.create(claim, ttl_s=CLAIM_S, key=token)
            assert entry is not None
            return await self._bucket.update(claim, revision=entry.revision, ttl_s=CLAIM_S, key=token)
        except Conflict:
            raise _in_progress() from None

    def _step(self, entry: KeyValueEntry | None, digest: str) -> Step:
        kept = entry.message if entry is not None and isinstance(entry.message, KeptAnswer) else None
        records = self._records()
        claimant = None if records is None or kept is None else records.get(kept.gateway)
        step = next_step(kept, digest, claimant, registry_known=records is not None)
        if step == "other request":
            raise KeyReused("Idempotency-Key: it came with another request before; take a new one")
        if step == "in progress":
            raise _in_progress()
        return step

    async def _keep(self, claim: KeptAnswer, answer: Answer, revision: int, token: str) -> None:
        if len(answer.body) > MOST_BYTES:
            return  # the claim goes by itself; until then the repetition hears that it is in progress
        kept = claim.model_copy(
            update={
                "status": int(answer.status),
                "location": answer.location,
                "body": json.loads(answer.body),
            }
        )
        try:
            await self._bucket.update(kept, revision=revision, ttl_s=KEPT_S, key=token)
        except DmscError:  # done is done: the claim expires, and a repetition acts again, which is idempotent
            return

    async def _release(self, token: str, revision: int) -> None:
        try:
            await self._bucket.delete(revision=revision, key=token)
        except DmscError:  # it expires, or is another gateway's by now
            return


def _answer(entry: KeyValueEntry) -> Answer:
    kept = entry.message
    assert isinstance(kept, KeptAnswer)
    return Answer(json.dumps(kept.body), kept.status, kept.location)


def _in_progress() -> InProgress:
    return InProgress(
        "Idempotency-Key: a request with it is being answered at this moment; ask again in a second",
        retry_after_s=1.0,
    )
