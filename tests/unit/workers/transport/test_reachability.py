"""What answers, and what is silence."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from workers.transport import reachability


async def test_a_refusal_is_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert await reachability.reaches("127.0.0.1", port)
    assert await reachability.reaches("127.0.0.1", port)


async def test_a_name_that_nobody_knows_says_nothing() -> None:
    assert await reachability.reaches("no-such-host.invalid", 1)


async def test_silence_is_none() -> None:
    """A listener whose queue is full takes no SYN, and refuses none."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            waiting.connect(listener.getsockname())
        await asyncio.sleep(0)
        assert not await reachability.reaches(*listener.getsockname())


def test_only_new_connections_are_given_up_when_silent() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as old,
    ):
        known = reachability.connections()
        with socket.create_connection(listener.getsockname()) as new:
            reachability.give_up_silent(known, 4.0)
            found = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for one in (old, new)]
    assert found == [0, 4000]


def test_where_this_process_listens() -> None:
    before = reachability.listening()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert reachability.listening() - before == {listener.getsockname()[1]}
