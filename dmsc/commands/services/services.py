"""`dmsc service list|show|traffic|promote|rollback|shadow|scale|stop`: services and who answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import CommandApp, argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import GatewayQuery
from dmsc.console.options import print_text

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from schemas.services.model_service import ModelService, ServedVersion

app = CommandApp(help="Model services: their versions, their traffic, their end.", no_args_is_help=True)

ServiceArgument = Annotated[str, argument("SERVICE", "The service, as `dmsc service list` shows it.")]
VersionArgument = Annotated[str, argument("VERSION", "A version of it, as `dmsc service show` shows it.")]
WhyOption = Annotated[str, option("--why TEXT", "Is recorded with the change.")]
COLUMNS = ("version", "state", "traffic", "job", "kind", "replicas", "exact", "weights", "reason")


def list_(mesh: GatewayQuery = GatewayQuery()) -> None:
    """List the model services of the mesh, with the share of traffic of each version.

    Example: dmsc service list
    """
    from dmsc.commands.services.advice import of_list

    found = mesh.ask(lambda client: client.services())
    rows = [
        (
            each.service,
            each.state.value,
            _traffic(each),
            str(len(each.versions)),
            each.stable or "",
            each.user,
        )
        for each in found
    ]
    columns = ("service", "state", "traffic", "versions", "stable", "user")
    mesh.show_table({"services": found}, columns, rows)
    _advise(mesh, of_list(found))


@app.command()
def show(
    service: ServiceArgument,
    history: Annotated[bool, option("--history", "The changes of its traffic instead, newest last.")] = False,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Show a service's versions: their states, jobs, replicas, and shares of the traffic.

    Example: dmsc service show chat
    """
    from time import localtime, strftime

    from dmsc.commands.services.advice import of_service

    found = mesh.ask(lambda client: client.service(service))
    if history:
        rows = [
            (
                strftime("%Y-%m-%d %H:%M:%S", localtime(each.at)),
                each.action,
                _shares(each.weights),
                each.by,
                each.why,
            )
            for each in found.history
        ]
        mesh.show_table(found, ("at", "change", "traffic", "by", "why"), rows)
        return
    mesh.show_table(found, COLUMNS, [_row(found, each) for each in found.versions])
    _advise(mesh, of_service(found))


@app.command()
def traffic(
    service: ServiceArgument,
    shares: Annotated[
        tuple[str, ...],
        argument(
            "VERSION=PERCENT…", "The share of each, 100 in all: v1=95 v2=5; or steps of one: v2=1,5,25."
        ),
    ],
    every: Annotated[str, option("--every TIME", "Between two steps: 30s, 10m, 2h.")] = "10m",
    why: WhyOption = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Share a service's traffic among versions that are ready, to a hundredth of a percent.

    Who asked one version stays with it as long as its share does not fall. In steps, one version takes its
    share from the stable one, until it goes back or somebody else changes the traffic (exit code 1).

    Example: dmsc service traffic chat v2=1,5,25,100 --every 10m
    """
    wanted = dict(_percents(share) for share in shares)
    if any(len(steps) > 1 for steps in wanted.values()):
        _ramp(service, wanted, every, why, mesh)
        return
    weights = {version: steps[0] for version, steps in wanted.items()}
    _say(mesh, mesh.ask(lambda client: client.set_traffic(service, weights, why=why)))


@app.command()
def promote(
    service: ServiceArgument,
    version: VersionArgument,
    why: WhyOption = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Give a version all traffic at once; the former one stays, for `dmsc service rollback`.

    Example: dmsc service promote chat v2
    """
    _say(mesh, mesh.ask(lambda client: client.promote_version(service, version, why=why)))


@app.command()
def rollback(service: ServiceArgument, why: WhyOption = "", mesh: GatewayQuery = GatewayQuery()) -> None:
    """Give all traffic back to the stable version.

    Example: dmsc service rollback chat --why 'answers in capitals'
    """
    _say(mesh, mesh.ask(lambda client: client.roll_back_service(service, why=why)))


@app.command()
def shadow(
    service: ServiceArgument,
    version: VersionArgument,
    off: Annotated[bool, option("--off", "It answers no copies any more.")] = False,
    why: WhyOption = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Have a version answer copies of requests, so that it is measured; nobody gets its answers.

    Example: dmsc service shadow chat v2
    """
    _say(mesh, mesh.ask(lambda client: client.shadow_version(service, version, shadow=not off, why=why)))


@app.command()
def scale(
    service: ServiceArgument,
    version: VersionArgument,
    replicas: Annotated[int, argument("REPLICAS", "Of each stage; 0: it gives its slots back.", min=0)],
    why: WhyOption = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Set the number of replicas of each stage of a version.

    Example: dmsc service scale chat v1 3
    """
    _say(mesh, mesh.ask(lambda client: client.scale_version(service, version, replicas, why=why)))


@app.command()
def stop(
    service: ServiceArgument,
    version: Annotated[str | None, argument("[VERSION]", "Only this version; it gets no traffic.")] = None,
    why: WhyOption = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Stop a service with all its versions, or one of them; the slots are free.

    Example: dmsc service stop chat v1
    """
    _say(mesh, mesh.ask(lambda client: client.stop_service(service, version, why=why)))


def _percents(share: str) -> tuple[str, list[int]]:
    """A version, and its shares one after the other, in ten-thousandths."""
    version, equals, percents = share.partition("=")
    try:
        steps = [round(float(percent.removesuffix("%")) * 100) for percent in percents.split(",")]
    except (ValueError, OverflowError):  # the latter: inf
        equals, steps = "", []
    if not equals or not version:
        raise bad_input(f"{share}: write VERSION=PERCENT, such as v2=5")
    return version, steps


def _ramp(service: str, wanted: dict[str, list[int]], every: str, why: str, mesh: GatewayQuery) -> None:
    import asyncio
    import sys

    from dmsc.commands.services.ramping import ramp
    from dmsc.console.durations import parse_duration

    if len(wanted) > 1:
        raise bad_input("steps are of one version, such as v2=1,5,25,100; the stable one has the rest")
    ((version, steps),) = wanted.items()
    every_s = parse_duration(every, "--every")

    def done(found: ModelService) -> None:
        print(f"{_traffic(found)}", file=sys.stderr, flush=True)

    def pause() -> Awaitable[None]:
        return asyncio.sleep(every_s)

    _say(mesh, mesh.ask(lambda client: ramp(client, service, version, steps, pause, why=why, done=done)))


def _advise(mesh: GatewayQuery, lines: list[str]) -> None:
    """Prints what to do next, for people only."""
    for line in () if mesh.json else lines:
        print_text(line)


def _say(mesh: GatewayQuery, service: ModelService) -> None:
    shadow = f"; in shadow: {', '.join(service.shadow)}" if service.shadow else ""
    mesh.show(service, f"service {service.service} {service.state.value}: {_traffic(service)}{shadow}")


def _traffic(service: ModelService) -> str:
    return _shares(service.weights) or "nobody answers"


def _shares(weights: dict[str, int]) -> str:
    return ", ".join(f"{version} {weight / 100:g} %" for version, weight in weights.items())


def _row(service: ModelService, version: ServedVersion) -> tuple[str, ...]:
    from dmsc.commands.services.advice import went_back

    share, back = service.weights.get(version.version), went_back(service, version.version)
    marks = [f"{share / 100:g} %"] if share else []
    marks += ["shadow"] if version.version in service.shadow else []
    marks += ["stable"] if version.version == service.stable else []
    exact = {True: "yes", False: f"no: {version.inexact_because}", None: ""}[version.exact]
    slow = f"slower, for it has no cache: {version.uncached_because}" if version.cached is False else ""
    return (
        version.version,
        version.state.value,
        ", ".join(marks),
        version.job,
        version.kind or "",
        " ".join(map(str, version.replicas)),
        exact,
        version.sha256[:12] or version.weights,
        (version.reason or slow) if back is None else f"went back, by {back.by}",
    )
