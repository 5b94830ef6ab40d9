"""`dmsc model list|show|lineage|evaluate|approve|remove`: versions of models in the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import CommandApp, argument, option
from dmsc.console.option_groups import GatewayOptions, GatewayQuery
from dmsc.console.options import print_text

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from schemas.models.version import ModelVersion

app = CommandApp(
    help="Models in the registry: versions by their weights' digest, aliases with their history, lineage.",
    no_args_is_help=True,
)

VersionArgument = Annotated[
    str,
    argument("NAME[@VERSION]", "A version: a number, an alias or a digest's beginning; default: the newest."),
]


@app.command("list")
def list_(
    name: Annotated[str | None, argument("[NAME]", "A model, whose versions are listed.")] = None,
    removed: Annotated[bool, option("--removed", "List removed versions, too.")] = False,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """List the models, or the versions of one.

    Example: dmsc model list stdlib-gpt
    """
    from dmsc.commands.security.user import when

    if name is None:
        models = mesh.ask(lambda client: client.models())
        rows = [
            (
                model.name,
                "–" if model.newest is None else str(model.newest),
                f"{model.versions:,}",
                ", ".join(f"{alias} {number}" for alias, number in sorted(model.aliases.items())),
                model.sha256[:12],
                model.owner,
                "" if model.registered_at is None else when(model.registered_at),
            )
            for model in models
        ]
        columns = ("model", "newest", "versions", "aliases", "digest", "owner", "registered")
        mesh.show_table({"models": models}, columns, rows)
        return

    async def found(client: AsyncClient) -> tuple[list[ModelVersion], dict[str, int]]:
        versions = await client.model_versions(name, removed=removed)
        aliases = [each.aliases for each in await client.models() if each.name == name]
        return versions, aliases[0] if aliases else {}

    versions, aliases = mesh.ask(found)
    named = {number: alias for alias, number in aliases.items()}
    version_rows = [
        (
            version.reference + (" (removed)" if version.removed_at is not None else ""),
            named.get(version.version, ""),
            version.sha256[:12],
            version.lineage.job or version.lineage.source,
            version.lineage.parent,
            ", ".join(f"{each.metric} {each.value:.4g}" for each in version.evaluations[:2]),
            version.registered_by,
            when(version.registered_at),
        )
        for version in versions
    ]
    headings = ("version", "alias", "digest", "from", "parent", "evaluation", "by", "registered")
    mesh.show_table({"versions": versions}, headings, version_rows)


@app.command()
def show(what: VersionArgument, mesh: GatewayQuery = GatewayQuery()) -> None:
    """Show a version, and check the mesh's signature under it. The exit code is 1 if that is wrong.

    Example: dmsc model show stdlib-gpt@production
    """
    from dmsc.commands.models.lines import version_lines
    from dmsc.console.exit_codes import ExitCode
    from dmsc.console.running import leave
    from dmsc.models.signature_check import is_trusted, signature_line

    async def found(client: AsyncClient) -> tuple[ModelVersion, tuple[str, ...], tuple[str, ...]]:
        version = await client.model(what)
        keys = await client.model_keys()
        models = [each for each in await client.models() if each.name == version.name]
        aliases = models[0].aliases if models else {}
        return version, keys, tuple(a for a, number in sorted(aliases.items()) if number == version.version)

    version, keys, aliases = mesh.ask(found)
    mesh.show(version, *version_lines(version, signature_line(version, keys), aliases))
    if version.signed_by and not is_trusted(version, keys):
        leave(ExitCode.FAILED)


@app.command()
def lineage(what: VersionArgument, mesh: GatewayQuery = GatewayQuery()) -> None:
    """Show what a version descends from: versions, jobs, code and data, the nearest first.

    Example: dmsc model lineage stdlib-gpt@4
    """
    from dmsc.commands.models.lines import lineage_lines

    line = mesh.ask(lambda client: client.model_lineage(what))
    lines = []
    for depth, version in enumerate(line.versions):
        indent = "  " * depth
        lines.append(f"{indent}{version.reference}  {version.sha256[:12]}")
        lines += [f"{indent}  {text}" for text in lineage_lines(version)]
    if line.missing:
        lines.append(f"{'  ' * len(line.versions)}{line.missing} is not in the registry")
    if line.children:
        lines.append(f"children: {', '.join(line.children)}")
    mesh.show(line, *lines)


@app.command()
def evaluate(
    what: VersionArgument,
    figures: Annotated[tuple[str, ...], argument("METRIC=VALUE...", "Figures that were measured.")],
    data: Annotated[str, option("--data TEXT", "What they were measured on.")] = "",
    mesh: GatewayOptions = GatewayOptions(),
) -> None:
    """Record figures of a version; yours of the same metric and data are replaced.

    Example: dmsc model evaluate stdlib-gpt@4 accuracy=0.71 --data dataset://exam@2
    """
    from dmsc.console.exit_codes import bad_input

    found: dict[str, float] = {}
    for text in figures:
        metric, mark, value = text.partition("=")
        try:
            found[metric] = float(value)
        except ValueError:
            raise bad_input(f"{text}: write METRIC=NUMBER, as accuracy=0.71") from None
        if not mark or not metric:
            raise bad_input(f"{text}: write METRIC=NUMBER, as accuracy=0.71")
    version = mesh.ask(lambda client: client.evaluate_model(what, found, data=data))
    print_text(f"{version.reference}: {len(found)} recorded, {len(version.evaluations)} in all")


@app.command()
def approve(
    what: VersionArgument,
    note: Annotated[str, option("--note TEXT", "What is recorded with it.")] = "",
    mesh: GatewayOptions = GatewayOptions(),
) -> None:
    """Approve a version, for aliases that want approvals; for operators. Who registered it does not count.

    Example: dmsc model approve stdlib-gpt@4 --note "passed the exam"
    """
    version = mesh.ask(lambda client: client.approve_model(what, note=note))
    print_text(f"{version.reference}: approved by {', '.join(version.approvers) or 'nobody who counts'}")


@app.command()
def remove(what: VersionArgument, mesh: GatewayOptions = GatewayOptions()) -> None:
    """Remove a version that no alias names. Its record stays, and its number is not given again.

    Example: dmsc model remove stdlib-gpt@2
    """
    from dmsc.console.exit_codes import bad_input
    from schemas.models.reference import split_model

    if not split_model(what)[1]:
        raise bad_input(f"{what}: name the version, too: {what}@VERSION")
    print_text(mesh.ask(lambda client: client.remove_model(what)))
