"""The outgoing messages of one connection: in order, with back-pressure, and bounded while disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import nats.errors
from nats.aio.client import Client

from bus.nats.dialer import BUFFER_BYTES
from bus.nats.nats_internals import write_commands
from schemas.errors import BadMessage, BusUnreachable, DmscError

PRESSURE_BYTES = 1 << 20
"""Pending output at which a publisher waits until it is written. Even with the largest message on top it is
below BUFFER_BYTES, so that nats-py's own forced flush, which swallows cancellation, never happens."""


class WriteBuffer:
    """The write buffer of one connection.

    Args:
        client: Returns the current client; raises if there is none.
        unreachable: Returns the error that says why nothing can be sent now.
        online: Set while connected.
        pause_s: Pause between looks whether pending output was written.
    """

    def __init__(
        self,
        client: Callable[[], Client],
        unreachable: Callable[[], DmscError],
        online: asyncio.Event,
        pause_s: float,
    ) -> None:
        self._client = client
        self._unreachable = unreachable
        self._online = online
        self._pause_s = pause_s
        self._turn = asyncio.Lock()  # orders the publishers that wait for pending output to be written
        self._waiting = 0

    async def send(
        self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Publishes one message, with back-pressure while connected and a bounded buffer while not.

        Order is kept: a publisher that comes while others wait, waits behind them.
        """
        if self._client().pending_data_size > PRESSURE_BYTES or self._waiting:
            await self._in_turn(lambda: self._publish(subject, payload, reply, headers))
        else:
            await self._publish(subject, payload, reply, headers)

    async def write(self, commands: bytes, count: int) -> None:
        """Writes `count` publications at once (`bus.nats.pipelined_publish`); otherwise like `send`."""
        if self._client().pending_data_size > PRESSURE_BYTES or self._waiting:
            await self._in_turn(lambda: self._write(commands, count))
        else:
            await self._write(commands, count)

    async def _in_turn(self, publish: Callable[[], Awaitable[None]]) -> None:
        self._waiting += 1
        try:
            async with self._turn:
                await self._wait_for_pending(self._client())
                await publish()
        finally:
            self._waiting -= 1

    async def _publish(
        self, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None
    ) -> None:
        client = self._client()
        try:
            await client.publish(subject, payload, reply=reply, headers=headers)
        except nats.errors.OutboundBufferLimitError:
            raise self._full() from None
        except nats.errors.MaxPayloadError:
            raise BadMessage(
                f"{len(payload):,} bytes for {subject}: the server takes {client.max_payload:,} at most",
                reason="oversized",
            ) from None
        except nats.errors.BadSubjectError:
            raise BadMessage(f"{subject!r} is not a subject", reason="subject") from None
        except (nats.errors.Error, OSError):
            raise self._unreachable() from None

    async def _write(self, commands: bytes, count: int) -> None:
        client = self._client()
        if client.is_closed or client.is_draining_pubs:
            raise self._unreachable()
        if not client.is_connected and client.pending_data_size + len(commands) > BUFFER_BYTES:
            raise self._full()
        client.stats["out_msgs"] += count
        client.stats["out_bytes"] += len(commands)
        await write_commands(client, commands)

    def _full(self) -> BusUnreachable:
        waiting = f"{BUFFER_BYTES >> 20} MiB wait to be sent, no more is kept"
        return BusUnreachable(f"{self._unreachable()}; {waiting}")

    async def _wait_for_pending(self, client: Client) -> None:
        """Waits until the client has written its pending output, or until the connection is lost."""
        await asyncio.sleep(0)  # usually the writing task only needs its turn
        while client.pending_data_size > PRESSURE_BYTES and self._online.is_set():  # noqa: ASYNC110  # no event for it
            await asyncio.sleep(self._pause_s)
