"""Requests of a plain NATS client, in the form in which services answer them (`bus.nats.reply_subjects`)."""

from __future__ import annotations

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError

from bus.nats import reply_subjects
from bus.subjects import lookup


def reply_to(subject: str, payload: bytes, prefix: str = "_INBOX.user.raw") -> str:
    """A reply subject below `prefix` for the answer to this; where no row has the subject, just an inbox."""
    found = lookup(subject)
    answerer = found[0].answerer_on(subject) if found else reply_subjects.JETSTREAM
    connection = reply_subjects.of_connection(prefix)
    return f"{connection}.{answerer}.{reply_subjects.question(subject, payload, answerer)}"


async def raw_request(client: Client, subject: str, payload: bytes, *, timeout_s: float) -> Msg:
    """
    Raises:
        NoRespondersError: nobody listens.
    """
    reply = reply_to(subject, payload)
    subscription = await client.subscribe(reply)
    try:
        await client.publish(subject, payload, reply=reply)
        answer = await subscription.next_msg(timeout=timeout_s)
    finally:
        await subscription.unsubscribe()
    if answer.headers and answer.headers.get("Status") == "503":
        raise NoRespondersError
    return answer
