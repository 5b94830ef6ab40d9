"""`dmsc serve`: deploy a version of a service, and wait until it is ready."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dmsc.console.command_app import argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import GatewayQuery
from dmsc.console.options import print_text
from dmsc.console.running import leave, run_async

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from dmsc.console.exit_codes import ExitCode
    from schemas.job import JobRecord
    from schemas.services.model_service import ModelService, ServedVersion

OF_TOKENS = ("bytes", "text", "chat", "tokens", "dataset")


def serve(
    file: Annotated[
        str, argument("FILE.yaml|JOB", "A file with `serve`, or a job that has ended: what it has trained.")
    ],
    set_: Annotated[
        list[str] | None,
        option("--set KEY=VALUE", "Override a key of the file, e.g. serve.version=v2; repeatable."),
    ] = None,
    service: Annotated[str | None, option("--service NAME", "Name of the service.")] = None,
    version: Annotated[str | None, option("--version NAME", "Name of the version (v1).")] = None,
    code: Annotated[
        Path | None, option("--code DIR", "Send the modules of this folder along (`code` of its file).")
    ] = None,
    detach: Annotated[
        bool, option("--detach -d", "Only deploy; `dmsc service show NAME` says how it gets on.")
    ] = False,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Deploy a version of a model service, and wait until it is ready.

    The service comes to be with its first version, which gets all requests once it is ready; each later one
    gets none until `dmsc service traffic` or `promote`. Ctrl-C only stops waiting; `dmsc service stop` ends
    it. The exit code is 1 if the version is refused.

    Example: dmsc serve j1a2b3 --service chat
    """
    made, exit_code = run_async(_serve(file, set_ or [], service, version, code, detach, mesh))
    if mesh.json:
        print(made.model_dump_json())
    elif detach:
        print_text(
            f"service {made.service} {made.state.value}; how it gets on: dmsc service show {made.service}"
        )
    leave(exit_code)


async def _serve(
    file: str,
    overrides: list[str],
    service: str | None,
    version: str | None,
    code: Path | None,
    detach: bool,
    mesh: GatewayQuery,
) -> tuple[ModelService, ExitCode]:
    from dmsc.client.job_file import load_job, with_code
    from dmsc.console.exit_codes import ExitCode
    from schemas.job import JobSpec

    overrides = [
        *([f"serve.service={service}"] if service else []),
        *([f"serve.version={version}"] if version else []),
        *overrides,
    ]
    async with mesh.client() as client:
        if _is_file(file):
            spec = load_job(Path(file), overrides)
        else:
            spec = JobSpec.model_validate(_document(await client.job(file), overrides))
        if code is not None:
            spec = with_code(spec, code)
        if spec.serve is None:
            raise bad_input(f"{file}: has no `serve`: give --service NAME, or name the service in the file")
        made = await client.deploy(spec)
        if detach:
            return made, ExitCode.OK
        return await _until_deployed(client, made, spec.serve.version, mesh)


def _is_file(text: str) -> bool:
    return Path(text).exists() or text.endswith((".yaml", ".yml", ".json"))


def _document(record: JobRecord, overrides: list[str]) -> dict[str, Any]:
    """The file that serves what a job has trained: its model, its code, and its weights."""
    from dmsc.client.job_file import apply_override

    spec = record.spec.model_dump(mode="json")
    training = {key: spec["training"][key] for key in ("precision", "compute_threads", "seed")}
    document = {
        "name": record.spec.name,
        "model": spec["model"],
        "code": spec["code"],
        "requires": spec["requires"],
        "training": training,
        "parallel": {"stages": record.spec.parallel.stages},
        "initial_weights": f"job:{record.job}",
        "serve": {"service": record.spec.name.lower()},
    }
    if record.spec.data.kind not in OF_TOKENS:
        document["data"] = spec["data"]  # a sample of it says what the model takes
    for override in overrides:
        apply_override(document, override)
    return document


async def _until_deployed(
    client: AsyncClient, made: ModelService, name: str, mesh: GatewayQuery
) -> tuple[ModelService, ExitCode]:
    """Says on standard error how the version gets on, until it is deployed or refused."""
    from dmsc.console.exit_codes import ExitCode
    from schemas.errors import LastingConflict

    show = print_progress(made.service)
    try:
        found = await client.wait_for_version(
            made.service, name, progress=(lambda _: None) if mesh.json else show
        )
    except LastingConflict:  # its state and reason are printed
        return await client.service(made.service), ExitCode.FAILED
    made = await client.service(made.service)
    if not mesh.json:
        print_text(described(made, found))
    return made, ExitCode.OK


def print_progress(service: str) -> Callable[[ServedVersion], None]:
    """What prints a version's state and reason to standard error whenever they change."""
    import sys

    last = ""

    def show(version: ServedVersion) -> None:
        nonlocal last
        text = f"{version.state}: {version.reason}" if version.reason else str(version.state)
        if text != last:
            print(f"{service} {version.version} {text}", file=sys.stderr, flush=True)
        last = text

    return show


def described(service: ModelService, version: ServedVersion) -> str:
    """A version that is deployed, in one line."""
    share = service.weights.get(version.version, 0) / 100
    exact = "exact" if version.exact else f"not exact: {version.inexact_because}"
    kind = version.kind or "unknown kind"
    slow = f", slower, for it has no cache: {version.uncached_because}" if version.cached is False else ""
    return (
        f"service {service.service}, version {version.version}: {kind}, replicas "
        f"{', '.join(map(str, version.replicas))}, {exact}{slow}; gets {share:g} % of the traffic"
    )
