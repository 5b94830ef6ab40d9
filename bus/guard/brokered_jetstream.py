"""The asker's side of a broker: `bus.nats.jetstream` calls it below the control plane, not the server."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nats.aio.msg import Msg

from bus.guard.broker_caller import BELOW, CONSUMER_BYTES, BrokerCaller, callers_of_role
from bus.guard.call_rights import may_read
from bus.nats.reply_subjects import BROKER, inbox_of_token
from bus.security.identity import Identity, is_credential, is_root
from bus.wire import codec
from schemas.broker import BrokerRequest
from schemas.envelope import EntityKind, Sender
from schemas.errors import NoResponders, Unavailable
from schemas.signals import Role

if TYPE_CHECKING:
    from bus.nats.client import NatsConnection
    from bus.nats.dialer import Token


class BrokeredJetStream:
    """One connection's access to the brokers; each request uses the first of `callers` that may make it."""

    def __init__(
        self,
        connection: NatsConnection,
        sender: Sender,
        next_id: Callable[[], str],
        callers: Sequence[BrokerCaller],
    ) -> None:
        self.callers = tuple(callers)
        self._connection = connection
        self._sender = codec.sender_map(sender)
        self._next_id = next_id

    @property
    def asker(self) -> BrokerCaller:
        """The asker with the least rights; the only one unless the token is a user's."""
        return self.callers[0]

    @property
    def scope(self) -> str:
        """The prefix of the names of our objects' chunks."""
        return self.asker.scope

    def consumer(self, stream: str, subjects: str) -> str:
        """A name for a new consumer that will read these subjects of the stream."""
        return f"{self._reader(stream, subjects).consumers}{secrets.token_hex(CONSUMER_BYTES)}"

    def _reader(self, stream: str, subjects: str) -> BrokerCaller:
        """The first asker that may read the subjects; else the last, which the broker will refuse."""
        return next(
            (caller for caller in self.callers if may_read(caller, stream, subjects)), self.callers[-1]
        )

    async def ask(
        self,
        call: str,
        body: bytes,
        *,
        timeout_s: float,
        headers: dict[str, str] | None = None,
        repeatable: bool = False,
        owner: str = "",
    ) -> Msg:
        """JetStream's answer to this call, or a broker's answer that it was not made.

        `owner` is set for a query to an instance's store: the user to whom the job belongs. The answer is
        then the instance's.

        Raises:
            Unavailable: no broker is there.
            NoResponders, DeadlineExceeded, BusUnreachable, Refused: as for `NatsConnection.ask`.
        """
        subject, data = self._encoded_call(call, body, headers, owner)
        loop, times = asyncio.get_running_loop(), self._connection.times
        until = loop.time() + min(times.broker_away_s, timeout_s)
        while True:
            try:
                return await self._connection.ask(
                    subject,
                    data,
                    timeout_s=timeout_s,
                    repeat_s=times.broker_repeat_s if repeatable else None,
                    answerer=BROKER,
                )
            except NoResponders:
                if loop.time() >= until:
                    raise Unavailable("no broker answers: does the mesh's control plane run?") from None
            await asyncio.sleep(times.broker_pause_s)
            await self._connection.wait_online()

    async def send(self, call: str, body: bytes, reply: str = "") -> None:
        """Sends a call without waiting; answers go to `reply`, an inbox of ours."""
        subject, data = self._encoded_call(call, body, None)
        await self._connection.send(subject, data, reply=reply)

    def _encoded_call(
        self, call: str, body: bytes, headers: dict[str, str] | None, owner: str = ""
    ) -> tuple[str, bytes]:
        request = BrokerRequest.model_construct(call=call, headers=headers or {}, body=body)
        asker = BrokerCaller.of_owner(owner, self.asker.inbox) if owner else self._asker(call, body)
        return asker.subject, codec.encode(request, self._sender, self._next_id())

    def _asker(self, call: str, body: bytes) -> BrokerCaller:
        if len(self.callers) == 1:
            return self.asker
        tokens = call.split(".")
        if call.startswith("$JS.API.DIRECT.GET."):
            return self._reader(tokens[4], ".".join(tokens[5:]))
        if call.startswith("$JS.API.CONSUMER."):
            last = tokens[-1] if tokens[3] != "CREATE" else tokens[5]
            return next(
                (asker for asker in self.callers if last.startswith(asker.consumers)), self.callers[-1]
            )
        if call.startswith(("$JS.API.STREAM.INFO.", "$JS.API.STREAM.MSG.GET.")):
            return self._reader(tokens[-1], _subjects_in(body))
        return self.callers[-1] if call.startswith("$JS.API.") else self.asker


def _subjects_in(body: bytes) -> str:
    """The subjects that a call of ours is about; empty for the stream itself."""
    fields = json.loads(body) if body else {}
    subjects = (fields.get(key) for key in ("subjects_filter", "last_by_subj", "next_by_subj"))
    return next((str(subject) for subject in subjects if subject), "")


def callers(token: Token | None, name: str, kind: EntityKind, nonce: bool) -> tuple[BrokerCaller, ...]:
    """The askers as which a connection asks brokers; none if it calls the server itself.

    `nonce` says that the server wants a nonce signed, as guarded servers do; only those know users.
    """
    if callable(token):
        token = token()
    if not isinstance(token, str) or ":" in token:
        return ()
    if is_root(token) or is_credential(token):
        identity = _identity(token, name, kind)
        return (BrokerCaller.of_identity(identity),) if identity.kind in BELOW else ()
    return callers_of_role(Role.ADMIN, inbox_of_token(token)) if nonce else ()


def _identity(token: str, name: str, kind: EntityKind) -> Identity:
    from bus.security.credentials import shown_identity  # cryptography takes 50 ms to import

    return shown_identity(token, name, kind)
