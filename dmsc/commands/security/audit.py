"""`dmsc audit …`: lists and exports audit records, and verifies that their chain is unbroken."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import CommandApp, argument, option
from dmsc.console.exit_codes import ExitCode, bad_input
from dmsc.console.option_groups import GatewayOptions, GatewayQuery
from dmsc.console.options import print_json
from dmsc.console.running import leave

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from schemas.audit import AuditEntry, AuditHead

NOT_COMPARED = "compared with no head kept off the bus (the authorizer keeps them; --archive, --head)"

app = CommandApp(
    help="Audit records (refusals and privileged actions): list them, verify their chain, export them.",
    no_args_is_help=True,
)


@app.command("list")
def list_(
    limit: Annotated[int, option("--limit -n", "The maximal number of records.", min=1, max=1000)] = 50,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """List the latest audit records.

    Example: dmsc audit list -n 20
    """
    from dmsc.commands.security.user import when

    entries = mesh.ask(lambda client: client.latest_audit(limit))
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
    mesh.show_table({"entries": entries}, ("no", "time", "kind", "user", "action", "resource", "why"), rows)


@app.command()
def verify(
    file: Annotated[Path | None, argument("[FILE]", "An exported file (the mesh's records).")] = None,
    head: Annotated[
        str | None, option("--head HASH", "A head printed earlier; it must still be in the chain.")
    ] = None,
    archive: Annotated[
        Path | None,
        option(
            "--archive DIR",
            "The folder of the authorizer's own records, to compare with (the state folder's).",
        ),
    ] = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Check that no audit record was changed, removed or inserted; the exit code is 1 if the chain breaks.

    The chain is compared with the head that the authorizer keeps off the bus. A chain that was truncated,
    rolled back or rewritten does not contain that head. On other machines, use --head with a head that this
    command printed earlier.

    Example: dmsc audit verify audit.ndjson
    """
    from dataclasses import asdict

    from schemas.audit import verify

    folder = archive or (None if file is not None else _own_archive(mesh.state))
    heads, older = _archived(folder, mesh.state)  # read before the stream, which may grow meanwhile
    entries = mesh.ask(_all) if file is None else list(_read(file))
    begins = entries[0].record.number if entries else 0
    entries = [entry for entry in older if entry.record.number < begins] + entries
    result = verify(entries, head=head, heads=heads)
    if mesh.json:
        print_json(asdict(result))
    elif result.broken is None:
        from_where = "" if result.first <= 1 else f" (the {result.first - 1} before are not there any more)"
        archived = sum(entry.record.number < begins for entry in older)
        files = f", {archived} of them in {folder} alone" if archived else ""
        if heads:
            checked = f"; as {heads[-1].authorizer} kept it up to {heads[-1].number}"
        else:
            checked = "" if head else f"; {NOT_COMPARED}"
        if result.records:
            records = f"{result.records} records, {result.first} to {result.last}, hold{from_where}{files}"
            print(f"{records}{checked}; head {result.head}")
        else:
            print(f"there are no records{checked}")
    else:
        place = f"at sequence {result.broken}: " if result.broken else ""
        print(f"the chain breaks {place}{result.why}; {result.records} records before hold", file=sys.stderr)
    if result.broken is not None:
        leave(ExitCode.FAILED)


@app.command()
def export(
    file: Annotated[Path, argument("FILE", "The file to write; - for standard output.")],
    start: Annotated[int, option("--start", "The number of the first record.", min=1)] = 1,
    mesh: GatewayOptions = GatewayOptions(),
) -> None:
    """Write all audit records as lines of JSON, which `dmsc audit verify FILE` can check.

    Example: dmsc audit export audit.ndjson
    """
    entries = mesh.ask(lambda client: _all(client, start))
    text = "".join(entry.model_dump_json() + "\n" for entry in entries)
    if str(file) == "-":
        print(text, end="")
        return
    file.write_text(text, encoding="utf-8")
    print(f"{len(entries)} records in {file}")


def _own_archive(state: Path | None) -> Path | None:
    """The archive folder of this machine's authorizer, if it has one."""
    from dmsc.launch import layout
    from dmsc.state.state_folder import StateFolder

    folder = StateFolder(state).path / layout.AUDIT
    archives = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return archives[0] if archives else None


def _archived(folder: Path | None, state: Path | None) -> tuple[list[AuditHead], list[AuditEntry]]:
    """The heads in an archive, and the records of its last chain.

    The heads' signatures are checked if the state folder has the key.
    """
    if folder is None:
        return [], []
    from dmsc.launch import layout
    from dmsc.state.state_folder import StateFolder
    from entities.authorizer.access.user_tokens import load_key
    from entities.authorizer.audit.audit_archive import entries_of, heads_of, segments_of

    if not folder.is_dir():
        raise bad_input(f"{folder}: there is no such folder")
    key = StateFolder(state).path / layout.USER_KEY
    heads = heads_of(folder, load_key(key).verify_key if key.exists() else None)
    segments = segments_of(folder)
    latest = [segment for segment in segments if segment.chain == segments[-1].chain]
    return heads, list(entries_of(latest))


def _read(file: Path) -> Iterator[AuditEntry]:
    from pydantic import ValidationError

    from schemas.audit import AuditEntry

    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise bad_input(f"{file}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield AuditEntry.model_validate_json(line)
        except ValidationError:
            raise bad_input(
                f"{file} line {number}: is no audit record; `dmsc audit export` writes them"
            ) from None


async def _all(client: AsyncClient, start: int = 1) -> list[AuditEntry]:
    return [entry async for entry in client.audit(start=start)]
