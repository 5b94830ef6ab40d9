"""`dmsc policy score`, `promote`, `rollback`, `plot`: compare and switch a module's versions; draw plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import CommandApp, argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import BusOptions, BusQuery, GatewayQuery
from dmsc.console.options import ModuleArgument, PngOption
from dmsc.console.running import run_async

if TYPE_CHECKING:
    from dmsc.replay.scores import Scores
    from schemas.policy import PolicySwitch

plot = CommandApp(help="Draw scores, routes or forecasts as PNG.", no_args_is_help=True)

RunOption = Annotated[
    str | None,
    option(
        "--run RUN", "Score a recorded run instead of the running mesh: an exported run file, or a job's id."
    ),
]
JobOption = Annotated[list[str] | None, option("--job JOB", "Only suggestions for this job; repeatable.")]
ReasonOption = Annotated[str, option("--reason", "Why; published with the switch.", show_default=False)]


def score(
    module: Annotated[str | None, argument("[MODULE]", "A module's name (all modules).")] = None,
    run: RunOption = None,
    job: JobOption = None,
    actions: Annotated[
        bool, option("--actions", "One row for each kind of action and objective of a version.")
    ] = False,
    bus: BusQuery = BusQuery(),
) -> None:
    """Show how good modules' suggestions were, given what happened afterwards, for all versions side by side.

    A score of 1 means that hindsight would have suggested the same; 0.5 means that doing nothing would have
    been as good. Without --run, the scores are those that the running mesh's modules give themselves. With
    --run, all suggestions of that record are scored anew.

    Example: dmsc policy score service-time-weights
    """
    from dmsc.replay.present import (
        ACTION_COLUMNS,
        SCORE_COLUMNS,
        action_rows,
        by_action,
        score_rows,
        summary_json,
    )

    scores = _scores(run, module, job, bus)
    if actions:
        fields = ("module", "version", "action", "objective")
        parts = [
            {**dict(zip(fields, key, strict=True)), **summary_json(summary)}
            for key, summary in by_action(scores.by_version).items()
        ]
        bus.show_table(parts, ACTION_COLUMNS, action_rows(scores.by_version))
        return
    document = [
        {"module": key[0], "version": key[1], **summary_json(summary)}
        for key, summary in sorted(scores.by_version.items())
    ]
    bus.show_table(document, SCORE_COLUMNS, score_rows(scores.by_version))


def promote(
    module: ModuleArgument,
    version: Annotated[str, argument(None, "The version; it must be running.")],
    reason: ReasonOption = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Make a running version of a module the active one. The former version continues in shadow.

    Both versions are then scored on the same traffic. If the new one scores worse, the orchestrator rolls
    back.

    Example: dmsc policy promote service-time-weights 2
    """
    switch = mesh.ask(lambda client: client.promote_policy(module, version, reason=reason))
    _show(mesh, switch)


def rollback(
    module: ModuleArgument,
    reason: ReasonOption = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Make the version active again that was active before the last promotion.

    Example: dmsc policy rollback service-time-weights
    """
    switch = mesh.ask(lambda client: client.roll_back_policy(module, reason=reason))
    _show(mesh, switch)


@plot.command("score")
def plot_score(
    module: ModuleArgument,
    out: PngOption,
    run: RunOption = None,
    job: JobOption = None,
    bus: BusOptions = BusOptions(),
) -> None:
    """Draw the scores of a module's versions over time, and mark promotions.

    Example: dmsc policy plot score service-time-weights --out score.png
    """
    from dmsc.plots import save
    from dmsc.plots.score import draw_scores

    record = _scores(run, module, job, bus)
    switches = [
        (at, f"{switch.version} {'again' if switch.rollback else 'promoted'}")
        for at, switch in record.switches
    ]
    scores = {version: scores for (_, version), scores in record.by_version.items()}
    save(draw_scores(module, scores, switches), out)
    print(f"{out}: {', '.join(f'version {version}' for version in sorted(scores))}")


@plot.command("routes")
def plot_routes(
    file: Annotated[Path, argument("FILE.graphml", "A network topology, as in the Topology Zoo.")],
    out: PngOption,
    seed: Annotated[int, option("--seed", "The seed of the random traffic.")] = 0,
) -> None:
    """Draw the link utilisation of a network with ECMP and with the topology-scoring policy.

    Example: dmsc policy plot routes Geant2012.graphml --out routes.png
    """
    from xml.etree import ElementTree

    import numpy as np

    from dmsc.plots import new_figure, save
    from policies.contrib.topology_file import gravity, read_topology
    from policies.contrib.topology_plot import draw_routes
    from policies.numerics.allocation.path_scoring import trained

    try:
        topology = read_topology(file.stem, file.read_bytes())
    except OSError as error:
        raise bad_input(f"{file}: {error.strerror or error}") from error
    except (ElementTree.ParseError, ValueError) as error:
        raise bad_input(f"{file}: not a topology in GraphML: {error}") from error
    if topology is None:
        raise bad_input(f"{file}: it has no link")
    paths, demand = topology.paths(), gravity(np.random.default_rng(seed), topology.nodes)
    splits = {"ECMP": paths.equal_cost(), "topology-scoring": trained().split(paths, demand)}
    used = {name: paths.utilisation(demand, split) for name, split in splits.items()}
    figure = new_figure(5.5 * len(used), 4.8)
    draw_routes(figure, topology, used)
    save(figure, out)
    figures = ", ".join(f"{name} {values.max() / used['ECMP'].max():.2f}" for name, values in used.items())
    print(f"{out}: the fullest link beside ECMP's: {figures}")


@plot.command("forecast")
def plot_forecast(
    run: Annotated[str, argument("RUN", "An exported run file, or a job's id.")],
    out: PngOption,
    bus: BusOptions = BusOptions(),
) -> None:
    """Draw the link-trend policy's forecasts for the links of a recorded run, with the values measured later.

    Example: dmsc policy plot forecast night.dmscrun --out forecast.png
    """
    from dmsc.plots import save
    from dmsc.plots.forecast import draw_forecasts, link_courses
    from dmsc.replay.recordings import recorded_samples
    from policies.built_in.link_trend import COVERAGE

    job, samples = run_async(recorded_samples(run, bus.address_or_none(), bus.archive()))
    by_link = link_courses(job, samples)
    courses = {f"{sender} → {receiver}": course for (sender, receiver), course in by_link.items()}
    if not courses:
        raise bad_input(f"{run}: no link to forecast; it takes some six minutes of measured links")
    save(draw_forecasts(job, courses, unit="ms", coverage=f"{COVERAGE:.0%}"), out)
    print(f"{out}: {len(courses)} links")


def _scores(run: str | None, module: str | None, jobs: list[str] | None, bus: BusOptions) -> Scores:
    from dmsc.replay.scores import find_scores

    scores = run_async(find_scores(run, bus.address_or_none(), bus.archive(), jobs or ()))
    return scores if module is None else scores.of(module)


def _show(mesh: GatewayQuery, switch: PolicySwitch) -> None:
    rest = f"; {switch.previous} goes on in shadow" if switch.previous else ""
    mesh.show(switch, f"{switch.module} {switch.version} is active{rest}: {switch.reason}")
