"""The options of `dmsc up`: each is spelled once, here, and the command line shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from dmsc.console.command_app import option
from dmsc.console.options import (
    AccessFileOption,
    AllowUrlOption,
    CacheGibOption,
    CacheOption,
    CodeOption,
    EmulateOption,
    EmulationOption,
    InstanceUsersOption,
    OwnStateOption,
    PolicyOption,
    PricesOption,
    TopologyOption,
    TrustOption,
    UserRateOption,
)
from dmsc.state.state_folder import default_state


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The options of `dmsc up`, and what it finds out about this machine."""

    state: OwnStateOption = field(default_factory=default_state)
    clusters: Annotated[
        tuple[str, ...], option("--cluster NAME", "A cluster to start; repeatable (a, b).")
    ] = ("a", "b")
    slots: Annotated[
        int, option("--slots", "How many stage instances each cluster may run at a time.", min=0)
    ] = 4  # may exceed the number of cores, which the instances then share
    labels: Annotated[
        tuple[str, ...],
        option(
            "--label [CLUSTER:]KEY=VALUE",
            "What jobs and plans may ask for, of all clusters or of one: region, trust, price, carbon, or any"
            " other; repeatable.",
        ),
    ] = ()
    emulate_slots: EmulateOption = ()  # of each cluster
    emulation: EmulationOption = None
    nats_port: Annotated[
        int | None, option("--nats-port PORT", "The bus's port (4222, else a free one); 0: any.")
    ] = None
    http_port: Annotated[
        int | None,
        option(
            "--http-port PORT",
            "The first gateway's port; the others take the next ones (8080, else free ones); 0: any.",
        ),
    ] = None
    bind: Annotated[
        str, option("--bind ADDRESS", "The address to listen on; 0.0.0.0 lets other machines join.")
    ] = "127.0.0.1"
    metrics_port: Annotated[
        str,
        option(
            "--metrics-port PORT|off $DMSC_METRICS_PORT",
            "The port at which the first process serves /metrics for Prometheus; other processes take"
            " the next ones; 0: any.",
        ),
    ] = "0"
    metrics_bind: Annotated[
        str,
        option(
            "--metrics-bind ADDRESS $DMSC_METRICS_BIND",
            "The address where /metrics listens. It needs no token.",
        ),
    ] = "127.0.0.1"
    monitor_port: Annotated[
        str,
        option(
            "--monitor-port PORT|off",
            "The port of NATS's monitoring pages, on loopback only; they show all connections; 0: any.",
        ),
    ] = "off"
    proxies: Annotated[
        tuple[str, ...],
        option(
            "--proxy ADDRESS", "A proxy (or network) whose X-Forwarded-For header gateways trust; repeatable."
        ),
    ] = ()
    user_rate: UserRateOption = 200.0
    servers: Annotated[
        int,
        option("--servers", "How many NATS servers to run; 3 or 5 survive the loss of one or two.", min=1),
    ] = 1
    orchestrators: Annotated[
        int,
        option(
            "--orchestrators",
            "How many orchestrators to run; one leads, another takes over if it dies.",
            min=1,
        ),
    ] = 1  # if there are several, each runs in a process of its own
    registries: Annotated[
        int,
        option(
            "--registries", "How many registries to run; one leads, another takes over if it dies.", min=1
        ),
    ] = 1  # likewise
    separate: Annotated[bool, option("--separate", "Run each entity in a process of its own.")] = False
    policies: PolicyOption = ("default",)  # an empty tuple: no module, but automation as it is
    automation: Annotated[
        str | None,
        option(
            "--automation off|advise|act",
            "How far jobs are changed without a person, until one switches it (act; off with --policy none).",
        ),
    ] = None
    tls: Annotated[
        bool, option("--tls", "Encrypt the bus and the gateways, with a CA made in the state folder.")
    ] = False
    topology: TopologyOption = None
    access_file: AccessFileOption = None
    prices: PricesOption = None
    code: CodeOption = ()
    allow_urls: AllowUrlOption = ()
    cache: CacheOption = None
    cache_gib: CacheGibOption = None  # of all clusters together
    trust_researchers: TrustOption = False
    instance_users: InstanceUsersOption = None

    address: str = "127.0.0.1"  # at which other machines reach this one
    node: str = "node"
    own_loop: bool = True  # False: modules alone suggest changes of running jobs
    researchers: bool = True  # False: refused, since their code can't be confined and they are not trusted
