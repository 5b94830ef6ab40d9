"""`dmsc store`: shows the content of an instance's local store."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

from dmsc.console.command_app import argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import BusQuery
from dmsc.console.options import JobArgument
from dmsc.console.running import run_async

if TYPE_CHECKING:
    from dmsc.state.settings import BusAddress
    from schemas.store import Scalar, StoreQuery, StoreRows


def store(
    job: JobArgument,
    sid: Annotated[str, argument("SID", "The instance; see `dmsc status`. The short form s0-r0 works, too.")],
    table: Annotated[
        str, option("--table -t", "The table: configuration, metrics, events, versions, snapshots or audit.")
    ] = "events",
    column: Annotated[list[str] | None, option("--column -c NAME", "Only this column; repeatable.")] = None,
    where: Annotated[
        list[str] | None, option("--where -w COLUMN=VALUE", "Only rows with this value; repeatable.")
    ] = None,
    after: Annotated[
        int | None,
        option(
            "--after ID",
            "Show the first rows after the row with this id, instead of the last rows.",
            min=0,
            max=(1 << 63) - 1,
        ),
    ] = None,
    last: Annotated[int, option("--last -n N", "The maximal number of rows.", min=1, max=1000)] = 50,
    bus: BusQuery = BusQuery(),
) -> None:
    """Show what an instance recorded in its local store, oldest first, over all incarnations on its node.

    Example: dmsc store stdlib-gpt-1 s0-r0 --table audit --where outcome=refused
    """
    query = _query(job, table, column or [], where or [], after, last)
    name = sid if sid.startswith(f"{job}-") else f"{job}-{sid}"
    answer = run_async(_ask(bus.address(), name, query))
    rows = [tuple(_text(key, value) for key, value in row.items()) for row in answer.records()]
    bus.show_table(answer.records(), answer.columns, rows)
    if answer.truncated:
        more = (
            f"newer: --after {answer.last_id}"
            if after is not None
            else "older: --last up to 1000, or --after 0"
        )
        print(f"dmsc: there are more rows ({more})", file=sys.stderr)


def _query(
    job: str, table: str, columns: list[str], where: list[str], after: int | None, last: int
) -> StoreQuery:
    from typing import get_args

    from schemas.base import is_token
    from schemas.store import StoreQuery, StoreTable

    if not is_token(job):
        raise bad_input(f"JOB {job!r}: use letters, digits, - and _ only; `dmsc jobs` lists them")
    if table not in get_args(StoreTable):
        raise bad_input(f"--table {table}: {', '.join(get_args(StoreTable))}")
    equal: dict[str, Scalar] = {}
    for condition in where:
        name, sign, value = condition.partition("=")
        if not sign:
            raise bad_input(f"--where {condition}: write it as COLUMN=VALUE, for example outcome=refused")
        equal[name] = value
    return StoreQuery.model_validate(
        {
            "job": job,
            "table": table,
            "columns": tuple(columns),
            "where": equal,
            "after_id": after or 0,
            "limit": last,
            "newest": after is None,
        }
    )


async def _ask(address: BusAddress, sid: str, query: StoreQuery) -> StoreRows:
    from bus.connection import Bus
    from policies.kit.instance_store import InstanceStore
    from schemas.envelope import EntityKind

    async with Bus.connect(address.servers, name="store", kind=EntityKind.CLIENT, token=address.token) as bus:
        return await InstanceStore(bus, job=query.job, sid=sid).ask(query)


def _text(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column == "at":
        return time.strftime("%H:%M:%S", time.localtime(value)) + f".{int(value % 1 * 1000):03d}"
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
