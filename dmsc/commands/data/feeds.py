"""`dmsc data create|push|feeds|close|delete`: feeds, whose records jobs take as they are pushed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

from dmsc.console.command_app import CommandApp, argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import GatewayOptions, GatewayQuery

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from schemas.feeds import Pushed

app = CommandApp(
    help="Data at the mesh: data sets that it builds, and feeds, to which records are pushed.",
    no_args_is_help=True,
)

FeedArgument = Annotated[str, argument("FEED", "The feed's name: letters, digits, - and _.")]


@app.command()
def create(
    feed: FeedArgument,
    fields: Annotated[
        tuple[str, ...],
        argument("FIELD=TYPE…", "What each record has: text, int64, float32[3,32,32], …"),
    ],
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Create a feed. Its fields stay as they are; a job names it as data: {kind: feed, feed: FEED}.

    Example: dmsc data create sensor 'inputs=float32[16]' targets=int64
    """
    named = {}
    for text in fields:
        name, equals, kind = text.partition("=")
        if not equals:
            raise bad_input(f"{text}: write NAME=TYPE, such as inputs=float32[16] or text=text")
        named[name.strip()] = kind.strip()
    made = mesh.ask(lambda client: client.create_feed(feed, named))
    mesh.show(made, f"feed {made.name}: {_fields(made.fields)}")


@app.command()
def push(
    feed: FeedArgument,
    file: Annotated[Path, argument("FILE", "JSON lines: one record in each; - is standard input.")] = Path(
        "-"
    ),
    key: Annotated[
        str | None,
        option("--key TEXT", "Repeated with this key, the same lines are stored once (chosen anew)."),
    ] = None,
    mesh: GatewayOptions = GatewayOptions(),
) -> None:
    """Push records to a feed: of a file, or of standard input as lines come.

    Lines that came together are pushed together, and stored all or none; it prints how many the feed has.
    Once some are stored, it outlasts any outage of the mesh: the rest waits.

    Example: sensor | dmsc data push sensor
    """
    is_pipe = str(file) == "-"
    if not is_pipe and not file.is_file():
        raise bad_input(f"{file}: there is no such file; - is standard input")
    with sys.stdin.buffer if is_pipe else file.open("rb") as source:
        print(mesh.ask(lambda client: _push(client, feed, source, key)))


@app.command()
def feeds(
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """List the feeds: their records, pushes and fields, and whether they are closed.

    Example: dmsc data feeds
    """
    found = mesh.ask(lambda client: client.feeds())
    rows = [
        (
            each.name,
            each.user,
            f"{each.records:,}",
            f"{each.pushes:,}",
            f"{each.stored_bytes:,}",
            "closed" if each.closed else "open",
            _fields(each.fields),
        )
        for each in found
    ]
    mesh.show_table({"feeds": found}, ("feed", "user", "records", "pushes", "bytes", "state", "fields"), rows)


@app.command()
def close(
    feed: FeedArgument,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Close a feed: it takes no more records, and jobs that train on it know its end.

    Example: dmsc data close sensor
    """
    closed = mesh.ask(lambda client: client.close_feed(feed))
    mesh.show(closed, f"feed {closed.name} is closed with {closed.records:,} records")


@app.command()
def delete(
    feed: Annotated[str, argument("FEED|NAME@VERSION", "A feed, or a version of a data set.")],
    mesh: GatewayOptions = GatewayOptions(),
) -> None:
    """Delete a feed with its records, as an operator, or a version of a data set of yours.

    A job that trains on the feed fails. A version that a job reads is not deleted; its number is not given
    again.

    Example: dmsc data delete stdlib@2
    """
    if "@" in feed:
        from dmsc.commands.data.versions import delete_version

        delete_version(feed, mesh)
        return
    from schemas.errors import NotFound

    try:
        mesh.ask(lambda client: client.delete_feed(feed))
    except NotFound:
        raise NotFound(f"there is no feed {feed}; a version of a data set is {feed}@VERSION") from None
    print(f"feed {feed} is deleted")


def _fields(fields: object) -> str:
    assert isinstance(fields, dict)
    return ", ".join(f"{name}={kind}" for name, kind in fields.items())


async def _push(client: AsyncClient, feed: str, source: BinaryIO, key: str | None) -> str:
    import asyncio
    import secrets

    from dmsc.commands.data.record_lines import RecordLines

    pushed = total = 0
    key = key or secrets.token_hex(16)
    with RecordLines(source) as lines:
        while batch := await asyncio.to_thread(lines.take):
            answer = await _stored(client, feed, batch, f"{key}-{pushed}", pushed)
            pushed, total = pushed + answer.records, answer.first + answer.records
    return f"{pushed:,} records pushed; feed {feed} has {total:,}" if pushed else "no records"


async def _stored(client: AsyncClient, feed: str, batch: bytes, key: str, pushed: int) -> Pushed:
    """Pushes lines until they are stored; raises what keeps the first ones from it."""
    import asyncio

    from dmsc.client.gateway_requests import RetryTimes
    from schemas.errors import Unavailable

    waits = False
    while True:
        try:
            answer = await client.push(feed, batch, idempotency_key=key)
        except Unavailable as error:
            if not pushed:
                raise
            if not waits:
                print(f"dmsc: {error.text}; {pushed:,} records are stored, the next wait", file=sys.stderr)
            waits = True
            await asyncio.sleep(RetryTimes().longest_pause_s)
        else:
            if waits:
                print("dmsc: it goes on", file=sys.stderr)
            return answer
