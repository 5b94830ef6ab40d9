"""Encodes requests and seals the secrets in them (`bus.security.sealing`)."""

from __future__ import annotations

import asyncio
import time

from bus import subjects
from bus.messaging.port import BusPort
from bus.nats.dialer import Token
from bus.security import renewal
from bus.security.sealing import Keyring, secrets_of
from bus.subject_row import Subject
from bus.wire import codec
from bus.wire.packed import Sendable
from schemas.base import Message
from schemas.envelope import Envelope
from schemas.errors import BadInput, BusUnreachable, NoResponders
from schemas.gateway_api import DOOR_KEY, DoorKey, DoorRequest


class RequestSealer:
    """Seals requests for one connection, which was opened with `token`."""

    def __init__(self, bus: BusPort, token: Token | None) -> None:
        self._bus = bus
        self._token = token
        self._keyring: Keyring | None = None
        self._present_token: str | None = None
        self._door_key: str | None = None

    @property
    def keyring(self) -> Keyring:
        """The keys of this connection; made when first needed, because few messages have secrets."""
        token = self._token() if callable(self._token) else self._token
        present_token = renewal.present_of(token) if isinstance(token, str) else None
        if self._keyring is None:
            self._keyring = Keyring.of_token(present_token or token, self._bus.sender.name)
        elif present_token != self._present_token and present_token is not None:
            self._keyring.renew(present_token, self._bus.sender.name)
        self._present_token = present_token
        return self._keyring

    async def encode(
        self, row: Subject, message: Message, cause: Envelope | str | None, seal_to: str, patience_s: float
    ) -> bytes:
        """Encodes a request under a new envelope, with its secrets sealed.

        They are sealed to the key `seal_to`, or to the row's receivers if that is empty.

        Raises:
            NoResponders, BusUnreachable: no gateway named its key within `patience_s` seconds.
        """
        bus = self._bus
        envelope_id = bus.next_id()
        sendable: Sendable = message
        if secrets_of(type(message)):
            key = seal_to or await self._key_of(row, patience_s)
            if key:
                sendable = self.keyring.sealed(row, message, envelope_id, key)
        return codec.encode(sendable, bus.sender_map, envelope_id, bus.cause_id(cause))

    async def _key_of(self, row: Subject, patience_s: float) -> str:
        """The key of the kind that receives the row's messages; empty on an unguarded bus."""
        keys = [key for kind in row.receivers if (key := self.keyring.of_kind(kind))]
        if keys or row is not subjects.DOOR or not isinstance(self._token, str):
            return keys[0] if keys else ""
        if self._door_key is None:  # a user's token, or one of an unguarded bus: a gateway knows which
            self._door_key = await self._ask_door_key(patience_s)
        return self._door_key

    async def _ask_door_key(self, patience_s: float) -> str:
        bus = self._bus
        question = codec.encode(DoorRequest(token="", action=DOOR_KEY), bus.sender_map, bus.next_id())
        subject, deadline = subjects.DOOR(action="key"), time.monotonic() + patience_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                gateways = subjects.DOOR.answerer({})
                reply = await bus.connection.ask(
                    subject, question, timeout_s=max(left_s, 0.05), answerer=gateways
                )
                answer = await bus.answer_of(subjects.DOOR, subject, reply.data)
                return answer.key if isinstance(answer, DoorKey) else ""
            except (NoResponders, BusUnreachable):
                if left_s < bus.times.key_pause_s:
                    raise
            except BadInput:  # an older gateway does not know the action and can't open sealed secrets
                return ""
            await asyncio.sleep(bus.times.key_pause_s)
