"""`dmsc data list|show|diff|check`: data sets' versions, and builds of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from dmsc.console.command_app import argument
from dmsc.console.option_groups import GatewayOptions, GatewayQuery
from dmsc.console.options import print_text
from dmsc.console.running import leave

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from schemas.data_set.builds import BuildRecord
    from schemas.data_set.manifest import DataSetManifest

VersionArgument = Annotated[str, argument("NAME[@VERSION]", "A version of a data set; default: its newest.")]


def list_(mesh: GatewayQuery = GatewayQuery()) -> None:
    """List the data sets that the mesh has built, and builds that are under way or ended without a version.

    Example: dmsc data list
    """
    from dmsc.commands.security.user import when
    from schemas.data_set.builds import BuildState

    async def both(client: AsyncClient) -> tuple[list[Any], list[BuildRecord]]:
        return await client.data_sets(), await client.builds()

    versions, builds = mesh.ask(both)
    others = [record for record in builds if record.state is not BuildState.DONE]
    rows = [
        (
            row.reference,
            row.content,
            ", ".join(f"{split} {count:,}" for split, count in row.samples.items()),
            f"{sum(row.tokens.values()):,}",
            row.digest[:12],
            row.built_by,
            when(row.built_at),
        )
        for row in versions
    ]
    rows += [
        (record.spec.name, f"{record.build} {record.state.value}", _how_far(record), "", "", record.user, "")
        for record in others
    ]
    columns = ("data set", "content", "samples", "tokens", "digest", "by", "built")
    mesh.show_table({"versions": versions, "builds": builds}, columns, rows)


def show(
    what: Annotated[str, argument("NAME[@VERSION]|BUILD", "A version of a data set, or a build.")],
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Show a version: what it holds, what was dropped and why, what it was made of; or how far a build is.

    Example: dmsc data show stdlib@3
    """

    from schemas.data_set.builds import BuildRecord

    async def find(client: AsyncClient) -> DataSetManifest | BuildRecord:
        return await _build(client, what) or await client.data_set_manifest(*parsed(what))

    found = mesh.ask(find)

    mesh.show(found, *(_build_lines(found) if isinstance(found, BuildRecord) else _manifest_lines(found)))


def diff(
    first: Annotated[str, argument("NAME[@VERSION]", "A version of a data set.")],
    second: Annotated[str, argument("NAME[@VERSION]", "Another one.")],
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Compare two versions: counts, reasons, tokenizer, sources and files.

    Example: dmsc data diff stdlib@2 stdlib@3
    """

    async def both(client: AsyncClient) -> tuple[DataSetManifest, DataSetManifest]:
        found = []
        for what in (first, second):
            await _refuse_build(client, what)
            found.append(await client.data_set_manifest(*parsed(what)))
        return found[0], found[1]

    before, after = mesh.ask(both)
    rows = differences(before, after)
    value = {key: [one, other] for key, one, other in rows}
    if mesh.json or rows:
        mesh.show_table(value, ("", first, second), rows)
    else:
        print_text(f"{first} and {second} are equal: {before.digest[:12]}")


def check(
    what: VersionArgument,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Read each file of a version through the gateway, and compare its bytes with their digest.

    The exit code is 1 if a file is missing or damaged; each is named on one line.

    Example: dmsc data check stdlib@3
    """
    from dmsc.console.exit_codes import ExitCode

    name, version = parsed(what)

    async def checked(client: AsyncClient) -> tuple[DataSetManifest, list[str]]:
        await _refuse_build(client, what)
        return await client.check_data_set(name, version)

    manifest, damages = mesh.ask(checked)
    files = 2 * sum(len(shards) for shards in manifest.splits.values())
    whole = (
        f"{manifest.name}@{manifest.version}: {files:,} files are as they were built ({manifest.digest[:12]})"
    )
    mesh.show({"version": manifest.version, "files": files, "damages": damages}, *(damages or [whole]))
    leave(ExitCode.FAILED if damages else ExitCode.OK)


def delete_version(what: str, mesh: GatewayOptions) -> None:
    """Delete the version NAME@VERSION (`dmsc data delete`)."""
    from dmsc.console.exit_codes import bad_input

    name, version = parsed(what)
    if version is None:
        raise bad_input(f"{what}: name the version, too: {name}@VERSION")
    print_text(mesh.ask(lambda client: client.delete_data_set(name, version)))


def parsed(what: str) -> tuple[str, int | None]:
    """Name and version of `NAME[@VERSION]`."""
    from dmsc.console.exit_codes import bad_input

    name, mark, version = what.removeprefix("dataset://").partition("@")
    if mark and not version.isdecimal():
        raise bad_input(f"{what}: a version is a number: {name}@3")
    return name, int(version) if mark else None


async def _build(client: AsyncClient, what: str) -> BuildRecord | None:
    """The build that has this id; None: it is none of a build.

    Raises:
        NotFound: It may be a build's id, and there is neither a build nor a data set of this name.
    """
    from schemas.data_set.builds import BUILD_ID
    from schemas.errors import NotFound

    if BUILD_ID.fullmatch(what) is None:
        return None
    try:
        return await client.build_record(what)
    except NotFound:
        if any(row.name == what for row in await client.data_sets()):
            return None
    raise NotFound(
        f"there is no build {what}, and no data set of that name; `dmsc data list` shows which there are"
    )


async def _refuse_build(client: AsyncClient, what: str) -> None:
    """Raises `NotFound` if it is the id of a build, where a version of a data set is wanted."""
    from schemas.errors import NotFound

    if (record := await _build(client, what)) is None:
        return
    made = "" if record.version is None else f"; what it made is {record.spec.name}@{record.version}"
    raise NotFound(
        f"{what} is a build, of data set {record.spec.name}: `dmsc data show {what}` shows it{made}"
    )


def differences(before: DataSetManifest, after: DataSetManifest) -> list[tuple[str, str, str]]:
    """What differs between two manifests: (what, first, second)."""

    def facts(manifest: DataSetManifest) -> dict[str, str]:
        found = {
            "content": manifest.content,
            "file's digest": manifest.spec_sha256[:12],
            "tokenizer": manifest.tokenizer,
            "tokenizer's digest": (manifest.tokenizer_sha256 or "")[:12],
            "record units": f"{manifest.units:,}",
            "units left out": f"{len(manifest.units_skipped):,}",
            "rows in": f"{manifest.rows_in:,}",
            "licence": manifest.licence,
        }
        found |= {f"kept, {split}": f"{count:,}" for split, count in manifest.kept.items()}
        found |= {f"dropped, {reason}": f"{count:,}" for reason, count in manifest.dropped.items()}
        for split in manifest.splits:
            found[f"samples, {split}"] = f"{manifest.rows(split):,}"
            found[f"tokens, {split}"] = f"{manifest.tokens(split):,}"
        return found

    one, other = facts(before), facts(after)
    rows = [
        (key, one.get(key, "–"), other.get(key, "–"))
        for key in (*one, *(key for key in other if key not in one))
        if one.get(key) != other.get(key)
    ]
    common = set(before.sources) & set(after.sources)
    if before.sources != after.sources:
        one_alone, other_alone = (len(set(each.sources) - common) for each in (before, after))
        rows.append(("sources' digests", f"{one_alone:,} of its own", f"{other_alone:,} of its own"))
    files = [
        {shard.sha256 for shards in manifest.splits.values() for shard in shards}
        for manifest in (before, after)
    ]
    if files[0] != files[1]:
        both = files[0] & files[1]
        own = [f"{len(each):,}, {len(each - both):,} of its own" for each in files]
        rows.append(("files", own[0], own[1]))
    return rows


def _manifest_lines(manifest: DataSetManifest) -> list[str]:
    from dmsc.commands.security.user import when

    lines = [
        f"{manifest.name}@{manifest.version}  {manifest.content}, digest {manifest.digest}",
        f"built {when(manifest.built_at)} by {manifest.built_by or 'nobody'} in {manifest.seconds:,.0f} s",
        f"rows: {manifest.rows_in:,} in, {sum(manifest.kept.values()):,} kept",
        *(f"  dropped, {reason}: {count:,}" for reason, count in manifest.dropped.items()),
    ]
    for split, shards in manifest.splits.items():
        size = sum(shard.bytes for shard in shards)
        tokens = f", {manifest.tokens(split):,} tokens" if manifest.tokens(split) else ""
        lines.append(
            f"{split}: {manifest.rows(split):,} samples{tokens}, {len(shards):,} files, {size:,} bytes"
        )
    if manifest.tokenizer:
        lines.append(f"tokenizer: {manifest.tokenizer} ({(manifest.tokenizer_sha256 or '')[:12]})")
    lines.append(f"made of {manifest.units:,} units of sources; lies in {manifest.store}")
    if manifest.units_skipped:
        lines.append(
            f"left out: {len(manifest.units_skipped):,} units that could not be read (on_bad_unit: skip)"
        )
    lines += [f"licence: {manifest.licence}"] if manifest.licence else []
    lines += [f"{key}: {text}" for key, text in manifest.notes.items()]
    return lines


def _build_lines(record: BuildRecord) -> list[str]:
    from dmsc.follow.follow_build import progress_line

    lines = [
        f"{record.build} {record.state.value}, {record.spec.name} of {record.user}",
        *record.history[-3:],
    ]
    *past, present = record.phases or (None,)
    lines += [progress_line(phase, 0.0, None) for phase in past if phase is not None]
    if present is not None:
        lines.append(progress_line(present, record.rows_per_s, record.left_s))
    lines += [f"tried again: {text}" for text in record.failures[-5:]]
    return lines


def _how_far(record: BuildRecord) -> str:
    from schemas.data_set.builds import BUILD_WAITS

    if not record.phases:
        return record.reason
    phase = record.phases[-1]
    units = f"{phase.phase} {phase.committed:,}/{phase.units:,}"
    waits = record.state in BUILD_WAITS
    return f"{units}: {record.reason}" if waits else units
