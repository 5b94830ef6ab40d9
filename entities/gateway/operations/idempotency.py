"""`Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header): a repeated POST does nothing twice.

All gateways share the bucket of keys. The first gateway claims the key, acts, and stores its answer there; a
repetition, at any gateway, gets that answer. If the claiming gateway has gone meanwhile, another one takes
the claim over: commands to the orchestrator are idempotent, and a submission is recognised by its cause,
which is derived from the key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import KeyValueEntry
from schemas.errors import BadInput, Conflict, DmscError, InProgress, Unavailable, UnreadableRecord
from schemas.gateway_api import KeptAnswer
from schemas.registry import InstanceState, ServiceRecord


@dataclass(frozen=True, kw_only=True)
class IdempotencyConfig:
    """How long answers and claims last, and which answers are stored."""

    answer_s: float = 86_400.0  # a day, as is usual
    claim_s: float = 60.0  # without an answer, while its gateway lives: longer than any command's deadline
    most_bytes: int = 512 << 10  # of a stored answer (messages end at 1 MiB); else a repetition is refused


class KeyReused(BadInput):
    """The key came with another request before."""

    code = "idempotency_key_reused"


def key_reused() -> KeyReused:
    return KeyReused("Idempotency-Key: it came with another request before; take a new one")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a POST: a JSON object, its status, and the URL of what was created."""

    body: str
    status: int = HTTPStatus.OK
    location: str = ""


def key_token(user: str, key: str) -> str:
    """The bucket's key, hashed with the user, so that nobody reads another's answers by guessing keys."""
    return hashlib.sha256(f"{user}\0{key}".encode()).hexdigest()[:48]


def request_digest(method: str, path: str, query: str, body: bytes) -> str:
    """A digest that is equal for equal requests."""
    head = f"{method} {path}?{query}\n".encode("utf-8", "surrogatepass")
    return hashlib.sha256(head + body).hexdigest()


Step = Literal["act", "take over", "repeat", "in progress", "other request"]


def next_step(
    stored: KeptAnswer | None, digest: str, claimant: ServiceRecord | None, *, registry_known: bool
) -> Step:
    """What to do with a request whose key holds `stored`. `claimant`: the record of the claiming gateway."""
    if stored is None:
        return "act"
    if stored.request != digest:
        return "other request"
    if stored.status:
        return "repeat"
    if not registry_known:
        return "in progress"
    over = (InstanceState.FAULTED, InstanceState.GONE)
    lives = claimant is not None and claimant.incarnation == stored.incarnation and claimant.state not in over
    return "in progress" if lives else "take over"


class IdempotencyStore:
    """Stores answers by key. `records` returns the registry's records by SID, None while none are known."""

    def __init__(
        self,
        bus: Bus,
        records: Callable[[], Mapping[str, ServiceRecord] | None],
        config: IdempotencyConfig = IdempotencyConfig(),
    ) -> None:
        self._config = config
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
        """The answer of `act`: from this call, or from an earlier one with the same key.

        Args:
            always: `act` may run twice; it then also runs when the bus can store nothing (its disk is full).

        Raises:
            KeyReused: the key came with another request before.
            InProgress: the request is being answered at this moment.
            DmscError: what `act` raises; then nothing is stored, and a repetition acts again.
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
        """The revision of a new claim, or the stored answer."""
        try:
            entry = await self._bucket.get(leader=True, key=token)
        except UnreadableRecord:  # treated as expired: acting again is idempotent
            entry = None
        step = self._step(entry, claim.request)
        if step == "repeat":
            assert entry is not None
            return _answer(entry)
        try:
            if step == "act":
                return await self._bucket.create(claim, ttl_s=self._config.claim_s, key=token)
            assert entry is not None
            return await self._bucket.update(
                claim, revision=entry.revision, ttl_s=self._config.claim_s, key=token
            )
        except Conflict:
            raise _in_progress() from None

    def _step(self, entry: KeyValueEntry | None, digest: str) -> Step:
        stored = entry.message if entry is not None and isinstance(entry.message, KeptAnswer) else None
        records = self._records()
        claimant = None if records is None or stored is None else records.get(stored.gateway)
        step = next_step(stored, digest, claimant, registry_known=records is not None)
        if step == "other request":
            raise key_reused()
        if step == "in progress":
            raise _in_progress()
        return step

    async def _keep(self, claim: KeptAnswer, answer: Answer, revision: int, token: str) -> None:
        if len(answer.body) > self._config.most_bytes:
            return  # the claim expires; until then a repetition is answered that it is in progress
        stored = claim.model_copy(
            update={
                "status": int(answer.status),
                "location": answer.location,
                "body": json.loads(answer.body),
            }
        )
        with suppress(DmscError):  # the claim expires, and a repetition then acts again, which is idempotent
            await self._bucket.update(stored, revision=revision, ttl_s=self._config.answer_s, key=token)

    async def _release(self, token: str, revision: int) -> None:
        with suppress(DmscError):  # the claim expires, or another gateway has taken it over
            await self._bucket.delete(revision=revision, key=token)


def _answer(entry: KeyValueEntry) -> Answer:
    stored = entry.message
    assert isinstance(stored, KeptAnswer)
    return Answer(json.dumps(stored.body), stored.status, stored.location)


def _in_progress() -> InProgress:
    return InProgress(
        "Idempotency-Key: a request with it is being answered at this moment; ask again in a second",
        retry_after_s=1.0,
    )
