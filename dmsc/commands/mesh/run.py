"""`dmsc run` (runs entities in this process) and `dmsc join` (adds this machine's slots to a mesh)."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.exit_codes import ExitCode, bad_input
from dmsc.console.options import (
    AllowUrlOption,
    CacheGibOption,
    CacheOption,
    CodeOption,
    EmulateOption,
    EmulationOption,
    InstanceUsersOption,
    LevelOption,
    MetricsBindOption,
    MetricsPortOption,
    ParentOption,
    StateOption,
    TrustOption,
    WaitOption,
    print_text,
)
from dmsc.console.running import leave, run_async
from dmsc.launch import ports
from dmsc.process.run_options import RunOptions

if TYPE_CHECKING:
    from dmsc.metrics.listener import MetricsOptions
    from dmsc.process.composition import ServicePart
    from dmsc.state.settings import BusAddress


def run(
    entity: Annotated[
        tuple[str, ...],
        argument(
            "ENTITY...",
            "service-registry, authorizer, orchestrator, broker, model-registry, provisioner, gateway,"
            " router, tracer, tracker, or a policy.",
        ),
    ],
    options: RunOptions = RunOptions(),
) -> None:
    """Run one or several entities in this process, until SIGTERM or Ctrl-C.

    For containers, most options can be set by environment variables instead.

    Example: DMSC_BUS=nats://nats:4222 dmsc run gateway router --cluster a --http-port 8080
    """
    from bus.files.artifacts import restrict
    from dmsc.process.composition import compose
    from dmsc.process.sandboxing import closed_files
    from dmsc.state import identities
    from dmsc.state.renewals import follow_renewals
    from dmsc.state.settings import find_bus
    from dmsc.state.state_folder import default_state
    from schemas.urls import UrlRules

    if options.recording is not None:
        _track_recording(entity, options)
        return
    address = find_bus(options.bus, options.bus_token, options.state)
    services = identities.entities(entity, options.clusters, identities.called(entity, options.name))
    if services:
        address = replace(address, token=identities.own(address.token, services))
        follow_renewals(address.token, services)
    closed = [str(path) for path in closed_files(options.state or default_state())]
    restrict(UrlRules.of(options.allow_urls, os.getcwd()), closed)
    run_parts(
        compose(entity, options, address),
        address,
        parent=options.parent,
        level=options.log_level,
        patience_s=options.wait_s,
        replicas=options.replicas,
        metrics=metrics_options(options.metrics_port, options.metrics_bind),
    )


def _track_recording(entity: tuple[str, ...], options: RunOptions) -> None:
    """Hand a recorded run to the tracker's sinks, and end."""
    from dmsc.replay.recordings import Archive
    from dmsc.state.settings import find_bus
    from dmsc.state.state_folder import default_state
    from dmsc.tracking.recorded import track_recording
    from dmsc.tracking.sinks import sinks_of
    from schemas.errors import BusUnreachable

    if entity != ("tracker",):
        raise bad_input(f"--from {options.recording}: only the tracker takes a recorded run")
    assert options.recording is not None
    state = options.state or default_state()
    sinks = sinks_of(tensorboard=options.tensorboard, mlflow=options.mlflow, wandb=options.wandb, state=state)
    try:
        address = find_bus(options.bus, options.bus_token, options.state)
    except BusUnreachable:
        address = None
    job, count = run_async(track_recording(options.recording, address, Archive(state), sinks))
    print_text(f"{job}: {count:,} events tracked in {', '.join(sink.name for sink in sinks)}")


def join(
    url: Annotated[str | None, argument("nats://HOST:4222", "The bus's address ($DMSC_BUS).")] = None,
    token: Annotated[
        str | None, option("--token", "The bus's token ($DMSC_BUS_TOKEN); other users can see it in `ps`.")
    ] = None,
    credential: Annotated[
        Path | None,
        option(
            "--credential FILE $DMSC_CREDENTIAL",
            "A credential file written by `dmsc credential agent`, instead of the token.",
        ),
    ] = None,
    cluster: Annotated[
        str, option("--cluster NAME $DMSC_CLUSTER", "The cluster that this node belongs to.")
    ] = "a",
    node: Annotated[str | None, option("--node NAME $DMSC_NODE", "This node's name (the host's).")] = None,
    slots: Annotated[
        int | None,
        option(
            "--slots $DMSC_SLOTS",
            "How many stage instances may run at a time (one per GPU, else one per core).",
            min=0,
        ),
    ] = None,
    label: Annotated[
        tuple[str, ...],
        option(
            "--label KEY=VALUE $DMSC_LABEL",
            "What jobs and plans may ask for: region, trust, price (of a slot per hour), carbon (g CO2 per"
            " kWh), or any other; repeatable.",
        ),
    ] = (),
    emulate_slot: EmulateOption = (),
    emulation: EmulationOption = None,
    device_kind: Annotated[
        tuple[str, ...],
        option(
            "--device-kind MODULE:NAME $DMSC_DEVICE_KIND",
            "A kind of devices beside CPU and CUDA; repeatable. See examples/xpu_devices.py.",
        ),
    ] = (),
    capabilities: Annotated[
        Path | None,
        option(
            "--capabilities DIR $DMSC_CAPABILITIES",
            "The folder where measurements of devices are kept (~/.cache/dmsc/capabilities).",
        ),
    ] = None,
    address: Annotated[
        str | None,
        option(
            "--address ADDRESS $DMSC_ADDRESS",
            "The address at which other nodes reach this node's tensor ports.",
        ),
    ] = None,
    ports: Annotated[
        str | None,
        option(
            "--ports LO-HI $DMSC_PORTS",
            "The port range of tensor links (any); open it in the firewall for other nodes.",
        ),
    ] = None,
    code: CodeOption = (),
    allow_url: AllowUrlOption = (),
    trust_researchers: TrustOption = False,
    instance_users: InstanceUsersOption = None,
    logs: Annotated[
        Path | None, option("--logs DIR $DMSC_LOGS", "The folder of instances' log files.")
    ] = None,
    stores: Annotated[
        Path | None,
        option(
            "--stores DIR $DMSC_STORES", "The folder of instances' local stores (`stores` beside the logs)."
        ),
    ] = None,
    keep_stores: Annotated[
        bool, option("--keep-stores $DMSC_KEEP_STORES", "Keep local stores after their job has ended.")
    ] = False,
    cache: CacheOption = None,
    cache_gib: CacheGibOption = None,
    grace: Annotated[
        float,
        option(
            "--grace SECONDS $DMSC_GRACE",
            "From SIGTERM until this machine kills the process: the mesh moves what runs here meanwhile.",
            min=0,
            max=86_400,
        ),
    ] = 30.0,
    metrics_port: MetricsPortOption = "0",
    metrics_bind: MetricsBindOption = "127.0.0.1",
    wait: WaitOption = 30.0,
    state: StateOption = None,
    log_level: LevelOption = "info",
    parent: ParentOption = None,
) -> None:
    """Add this machine's slots to a mesh, until SIGTERM or Ctrl-C.

    It needs only the bus's address and a credential; there are no ranks and there is no master address.
    SIGTERM is a notice: instances move elsewhere without losing a step, and the command ends once nothing
    runs here, or just before --grace is over. A second SIGTERM, or Ctrl-C, ends it at once.
    `dmsc doctor` tells whether other nodes can reach this one. If the credential file is replaced by a newer
    one, the running command uses the new one.

    Example: dmsc join nats://10.0.0.5:4222 --credential b.cred --cluster b --slots 2 --ports 40000-40100
    """
    from dmsc.process.composition import address_towards, agent_part, check_clusters, node_name
    from dmsc.process.sandboxing import closed_files, confinement
    from dmsc.state import identities
    from dmsc.state.renewals import follow_renewals
    from dmsc.state.settings import find_bus, read_token
    from dmsc.state.state_folder import default_state
    from entities.cluster.capabilities.labels import parse_labels
    from entities.cluster.config import ClusterConfig
    from entities.cluster.core import EmulatedSlot
    from schemas.urls import local_path

    if credential is not None:
        token = read_token(credential)
    bus = find_bus(url, token, state)
    check_clusters((cluster,))
    node = node or node_name()
    agent = (identities.agent(cluster, node),)
    bus = replace(bus, token=identities.own(bus.token, agent))
    follow_renewals(bus.token, agent, credential)
    limits = confinement(
        trusted=trust_researchers,
        users=instance_users,
        closed=closed_files(state or default_state(), credential, logs, stores, cache),
        read=[path for url in allow_url if (path := local_path(url)) is not None],
    )
    config = ClusterConfig(
        servers=bus.servers,
        token=bus.token,
        cluster=cluster,
        node=node,
        slots=slots,
        labels=parse_labels(label),
        capabilities=None if capabilities is None else capabilities.absolute(),
        device_kinds=device_kind,
        emulated_slots=tuple(EmulatedSlot.parse(text) for text in emulate_slot),
        emulation=None if emulation is None else emulation.absolute(),
        address=address or address_towards(bus.servers[0]),
        ports=_range(ports),
        code_path=tuple(str(path.absolute()) for path in code or (Path(),)),
        logs=(logs or (state or default_state()) / "logs").absolute(),
        stores=None if stores is None else stores.absolute(),
        keep_stores=keep_stores,
        cache=None if cache is None else cache.absolute(),
        cache_bytes=None if cache_gib is None else int(cache_gib * (1 << 30)),
        allow_urls=allow_url,
        confinement=limits,
    )
    run_parts(
        [agent_part(config)],
        bus,
        logs=config.logs if parent is None else None,  # `dmsc up` rotates the logs of its own processes
        parent=parent,
        level=log_level,
        patience_s=wait,
        metrics=metrics_options(metrics_port, metrics_bind),
        grace_s=grace,
    )


def run_parts(
    parts: list[ServicePart],
    address: BusAddress,
    *,
    parent: int | None,
    level: str,
    patience_s: float,
    replicas: int | None = None,
    metrics: MetricsOptions | None = None,
    logs: Path | None = None,
    grace_s: float = 0.0,
) -> None:
    """Run these services in this process until a signal arrives, or they have left.

    Args:
        parts: The services to run.
        address: The bus.
        parent: The id of a parent process. This process ends when that process ends.
        level: The log level.
        patience_s: How long to wait for the bus at startup.
        replicas: Copies of streams and buckets, which this process then creates or adjusts first. None:
            another process, which knows the number, does that.
        metrics: Where /metrics is served. None: this process serves no /metrics.
        logs: A folder of log files to rotate meanwhile.
        grace_s: See `serve`. With a parent, the exit code then says that a signal has ended the process.

    Raises:
        BadInput: The log level is unknown.
    """
    from bus.files.artifacts import open_only_bus
    from bus.logs import configure_logging
    from bus.parent_death import end_with_parent
    from dmsc.launch.log_rotation import rotating
    from dmsc.process.serving import serve, tune_interpreter
    from workers.sandbox.kernel import keep_private

    keep_private()  # instances may run as the same user, and must not read this process's memory
    open_only_bus()
    if parent is not None:
        if grace_s and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        end_with_parent(parent, signal.SIGINT if grace_s else signal.SIGTERM)
    if level not in ("debug", "info", "warning", "error"):
        raise bad_input(f"--log-level {level}: debug, info, warning or error")
    configure_logging(level=level)
    tune_interpreter()

    async def serve_all() -> bool:
        async with contextlib.nullcontext() if logs is None else rotating(logs):
            return await serve(
                *(parts, address.servers, address.token),
                patience_s=patience_s,
                replicas=replicas,
                metrics=metrics,
                grace_s=grace_s,
            )

    by_signal = run_async(serve_all())
    if by_signal and grace_s and parent is not None:
        leave(ExitCode.TERMINATED)


def metrics_options(port: str, bind: str) -> MetricsOptions | None:
    """The options that `--metrics-port` and `--metrics-bind` name; None: off."""
    from dmsc.metrics.listener import MetricsOptions
    from dmsc.process.composition import own_address

    number = ports.port_or_off(port, "--metrics-port")
    return None if number is None else MetricsOptions(port=number, bind=bind, host=own_address(bind))


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit() and 0 < int(low) <= int(high) < 65536):
        raise bad_input(f"--ports {text}: write it as LO-HI, for example 40000-40100")
    return int(low), int(high)
