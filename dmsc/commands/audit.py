"""`dmsc audit …`: what was refused, who did what only few may do, and whether the chain of records holds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmsc.exit_codes import ExitCode
from dmsc.options import GatewayOption, JsonOption, StateOption, TokenOption, print_json, print_table
from dmsc.running import ask_gateway, leave

if TYPE_CHECKING:
    from dmsc.async_client import AsyncClient
    from schemas.audit import AuditEntry

app = typer.Typer(
    help="Refusals and privileged acts: list them, verify the chain, export it.", no_args_is_help=True
)


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="The latest so many.")] = 50,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """List the latest records.

    Example: dmsc audit list -n 20
    """
    from dmsc.commands.user import when

    entries = ask_gateway(gateway, token, state, lambda client: client.latest_audit(limit))
    if json:
        print_json({"entries": entries})
        return
    rows = []
    for entry in entries:
        record = entry.record
        times = f" ×{record.count}" if record.count > 1 else ""
        rows.append(
            (
                str(record.number),
                when(record.at),
                record.kind + times,
                record.user or "?",
                record.action,
                record.resource,
                record.reason,
            )
        )
    print_table(("no", "time", "kind", "user", "action", "resource", "why"), rows)


@app.command()
def verify(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="An export; default: the mesh.", show_default=False),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option("--head", metavar="HASH", help="A hash noted earlier: it must still be in the chain."),
    ] = None,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Check that no record was changed, removed or put in; exit code 1 where the chain breaks.

    What was cut off at the end shows with --head: note the hash that this prints elsewhere.

    Example: dmsc audit verify audit.ndjson
    """
    from dataclasses import asdict

    from schemas.audit import verify

    entries = ask_gateway(gateway, token, state, _all) if file is None else list(_read(file))
    found = verify(entries, head=head)
    if json:
        print_json(asdict(found))
    elif found.broken is None:
        from_where = "" if found.first <= 1 else f" (the {found.first - 1} before are not there any more)"
        print(f"{found.records} records, {found.first} to {found.last}, hold{from_where}; head {found.head}")
    else:
        place = f"at sequence {found.broken}: " if found.broken else ""
        print(f"the chain breaks {place}{found.why}; {found.records} records before hold", file=sys.stderr)
    if found.broken is not None:
        leave(ExitCode.FAILED)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; - for standard output.")],
    start: Annotated[int, typer.Option("--start", min=1, help="The first sequence.")] = 1,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
) -> None:
    """Write all records as lines of JSON, as `dmsc audit verify FILE` reads them.

    Example: dmsc audit export audit.ndjson
    """
    entries = ask_gateway(gateway, token, state, lambda client: _all(client, start))
    text = "".join(entry.model_dump_json() + "\n" for entry in entries)
    if str(file) == "-":
        print(text, end="")
        return
    file.write_text(text, encoding="utf-8")
    print(f"{len(entries)} records in {file}")


def _read(file: Path) -> Iterator[AuditEntry]:
    from pydantic import ValidationError

    from schemas.audit import AuditEntry
    from schemas.errors import BadInput

    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield AuditEntry.model_validate_json(line)
        except ValidationError:
            raise BadInput(
                f"{file} line {number}: is no audit record; `dmsc audit export` writes them"
            ) from None


async def _all(client: AsyncClient, start: int = 1) -> list[AuditEntry]:
    return [entry async for entry in client.audit(start=start)]
