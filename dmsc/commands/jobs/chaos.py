"""`dmsc chaos`: kills parts of a mesh while a job trains or a service answers, and reports what that cost."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dmsc.console.command_app import argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.options import AllowUrlOption, JsonOption, StateOption, print_json, print_table
from dmsc.console.running import leave, run_async
from dmsc.console.svg_files import check_plot, write_plot
from dmsc.launch.mesh_options import MeshOptions

if TYPE_CHECKING:
    from dmsc.chaos.report import ChaosReport
    from dmsc.chaos.run import Chaos, ChaosOptions
    from dmsc.chaos.services.service_chaos import LoadOptions
    from dmsc.chaos.services.service_report import ServiceChaosReport
    from dmsc.launch.prefork_server import PreforkServer
    from schemas.job import JobSpec

Say = Callable[[str], None]


def chaos(
    job: Annotated[
        str,
        argument("JOB", "A job file, the id of a running job, or service:NAME (or service:NAME@VERSION)."),
    ],
    seed: Annotated[
        int, option("--seed", "The seed of the fault plan; the same seed gives the same plan.", min=0)
    ] = 0,
    every: Annotated[
        str, option("--every INTERVAL", "The time between faults: 10s, 500ms, 2min, or 20steps.")
    ] = "10s",
    what: Annotated[
        str,
        option(
            "--what KINDS",
            "The kinds of faults, separated by commas: instance, data, freeze, stage, whole-stage, notice,"
            " cluster, orchestrator, gateway, router, registry, accountant, model-registry, server,"
            " server-freeze, no-room, garbage-value, disk-full.",
        ),
    ] = "instance,cluster,orchestrator,server",
    faults: Annotated[
        int | None,
        option("--faults N", "The maximal number of faults (until the job ends; of a service 10).", min=1),
    ] = None,
    clients: Annotated[
        int, option("--clients N", "Of a service: who asks it at the same time.", min=1, max=1000)
    ] = 8,
    tokens: Annotated[int, option("--tokens N", "Of a service: tokens of each answer.", min=2)] = 64,
    reference: Annotated[
        str | None,
        option(
            "--reference JOB", "A finished job without faults to compare with, instead of a new clean run."
        ),
    ] = None,
    no_reference: Annotated[
        bool, option("--no-reference", "Skip the clean run: no hash is compared, and goodput is estimated.")
    ] = False,
    set_: Annotated[
        list[str] | None, option("--set KEY=VALUE", "Override a key of the job file; repeatable.")
    ] = None,
    private: Annotated[
        bool, option("--private", "Start a mesh on free ports for this run, and stop it afterwards.")
    ] = False,
    separate: Annotated[
        bool, option("--separate", "With --private: run each entity in a process of its own.")
    ] = False,
    slots: Annotated[
        int, option("--slots", "With --private: stage instances in each of the two clusters.", min=1)
    ] = 4,
    allow_url: AllowUrlOption = (),
    plot: Annotated[Path | None, option("--plot FILE.svg", "Draw throughput and faults over time.")] = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Inject a seeded plan of faults into a job or a service, and report what they cost.

    The report shows stalls, goodput, waste, what was lost or doubled, and whether the weights are the same.
    A job file is run twice: first without faults, then with them. A service (`service:NAME`, or a file with
    `serve`) is asked all the time, and each answer is compared with the one to the same request without
    faults. The mesh must run on this machine, because its processes are killed (they are found through its
    state folder). The exit code is 1 if anything was lost or doubled, if weights or answers differ, or if a
    fault did not fire.

    Example: dmsc chaos examples/chaos-gpt.yaml --every 10s --what instance,orchestrator --plot chaos.svg
    """
    from bus.logs import configure_logging
    from dmsc.chaos.plan import FaultKind, parse_every, parse_kinds
    from dmsc.chaos.run import ChaosOptions, open_chaos
    from dmsc.chaos.services.service_chaos import LoadOptions, check_options
    from dmsc.client.job_file import load_job, named_urls
    from dmsc.console.exit_codes import ExitCode
    from dmsc.launch.prefork_server import running_prefork_server
    from dmsc.process.composition import node_name
    from dmsc.state.state_folder import StateFolder

    options = ChaosOptions(seed=seed, every=parse_every(every), kinds=parse_kinds(what), faults=faults)
    check_plot(plot)
    if reference is not None and (no_reference or private):
        raise bad_input("--reference names a job of this mesh; leave out --no-reference and --private")
    named = Path(job)
    spec = (
        load_job(named, set_ or ()) if named.suffix in (".yaml", ".yml", ".json") or named.exists() else None
    )
    if spec is None and (set_ or private):
        raise bad_input(f"{job}: --set and --private are for a job file; is it one? (.yaml, .yml, .json)")
    if allow_url and not private:
        raise bad_input(
            "--allow-url is for the mesh of --private; `dmsc up --allow-url` starts others with it"
        )
    is_service = job.startswith(SERVICE) if spec is None else spec.serve is not None
    if is_service:
        options = replace(options, faults=faults or FAULTS)
        check_options(options)
        if reference is not None or no_reference:
            raise bad_input(
                "answers of a service are compared with its own: leave out --reference and --no-reference"
            )

    def say(text: str) -> None:
        print(text, file=sys.stderr if json else sys.stdout, flush=True)

    configure_logging(level="error")  # a bus that is away now and then is expected here
    with running_prefork_server() if private else nullcontext() as prefork_server:
        if private:
            mesh = MeshOptions(
                nats_port=0,
                http_port=0,
                slots=slots,
                node=node_name(),
                separate=separate,
                allow_urls=(*(() if spec is None else named_urls(spec)), *allow_url),
            )
            small = FaultKind.DISK_FULL in options.kinds
            opened = _private_mesh(mesh, prefork_server, say, with_small_disk=small)
        else:
            opened = open_chaos(StateFolder(state), say)
        if is_service:
            load = LoadOptions(clients=clients, tokens=tokens)
            served = job.removeprefix(SERVICE) if spec is None else spec
            shown = _of_service(run_async(_chaos_of_service(served, options, load, opened)))
        else:
            shown = _of_job(run_async(_chaos(job, spec, options, reference, no_reference, opened)))
    if plot is not None:
        write_plot(plot, shown.picture())
    if json:
        print_json(shown.document)
    else:
        print_table(("what", "figure", ""), shown.rows, title=shown.title)
        for line in shown.closing:
            print(line)
        if plot is not None:
            print(f"plot        {plot}")
    leave(ExitCode.FAILED if shown.problems else ExitCode.OK)


SERVICE = "service:"
"""Begins what is a service, and no job."""
FAULTS = 10
"""How many faults a service gets, which has no end, if nobody says otherwise."""


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """A report of either kind, as it is shown."""

    title: str
    rows: list[tuple[str, str, str]]
    closing: list[str]
    problems: list[str]
    document: dict[str, Any]
    picture: Callable[[], str]


def _of_job(report: ChaosReport) -> _Shown:
    from dmsc.chaos.plot import svg
    from dmsc.chaos.present import closing, rows

    return _Shown(
        title=f"{report.job} {report.state}",
        rows=rows(report),
        closing=closing(report),
        problems=report.problems(),
        document=report.as_dict(),
        picture=lambda: svg(report),
    )


def _of_service(report: ServiceChaosReport) -> _Shown:
    from dmsc.chaos.services.service_report import svg

    return _Shown(
        title=f"{report.service}@{report.version}",
        rows=report.rows(),
        closing=report.closing(),
        problems=report.problems(),
        document=report.as_dict(),
        picture=lambda: svg(report),
    )


async def _chaos_of_service(
    service: JobSpec | str,
    options: ChaosOptions,
    load: LoadOptions,
    opened: AbstractAsyncContextManager[Chaos],
) -> ServiceChaosReport:
    from dmsc.chaos.services.service_chaos import ServiceChaos
    from dmsc.process.interrupts import interrupts

    with interrupts():
        async with opened as chaos:
            return await ServiceChaos(chaos, load).run(service, options)


async def _chaos(
    job: str,
    spec: JobSpec | None,
    options: ChaosOptions,
    reference: str | None,
    no_reference: bool,
    opened: AbstractAsyncContextManager[Chaos],
) -> ChaosReport:
    from dmsc.process.interrupts import interrupts

    with interrupts():
        async with opened as chaos:
            clean = None
            if reference is not None:
                clean = await chaos.clean_figures(reference)
            elif spec is not None and not no_reference:
                clean = await chaos.clean_run(spec)
            return await chaos.disturbed_run(job if spec is None else spec, options, clean)


@asynccontextmanager
async def _private_mesh(
    options: MeshOptions, prefork_server: PreforkServer | None, say: Say, *, with_small_disk: bool
) -> AsyncIterator[Chaos]:
    """Open `Chaos` for a mesh of a temporary folder that is started and stopped here."""
    from dmsc.chaos.run import open_chaos
    from dmsc.chaos.store_faults import small_disk
    from dmsc.launch.mesh import running_mesh

    with (
        tempfile.TemporaryDirectory(prefix="dmsc-chaos-", ignore_cleanup_errors=True) as name,
        small_disk(Path(name)) if with_small_disk else nullcontext(),
    ):
        say(f"starting a mesh of clusters {', '.join(options.clusters)}")
        options = replace(options, state=Path(name) / "state")
        async with (
            running_mesh(options, say, prefork_server=prefork_server) as mesh,
            open_chaos(mesh.folder, say) as chaos,
        ):
            yield chaos
            say("stopping the mesh")
