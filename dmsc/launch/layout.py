"""Which processes make a mesh on this machine: options in, a list of children out. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bus.security.identity import Identity
from dmsc.state import identities
from schemas.names import agent_name

USER_KEY = "user_key"
AUDIT = "audit"
"""The file in the state folder with the key that signs users' tokens."""


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """What `dmsc up` was asked for."""

    state: Path
    clusters: tuple[str, ...] = ("a", "b")
    slots: int = 4  # stage instances per cluster; more than cores is allowed, they share them
    nats_port: int | None = None  # None: 4222, or a free one if that is taken; 0: any
    http_port: int | None = (
        None  # None: 8080, or a free one; 0: any; the next clusters get the following ones
    )
    servers: int = 1  # of the bus: 3 or 5 make a cluster, which bears the loss of 1 or 2
    orchestrators: int = 1  # one leads; more than one: each in a process of its own
    registries: int = 1  # likewise
    separate: bool = False  # one process per entity instead of one for the control plane
    bind: str = "127.0.0.1"
    metrics_port: int | None = 0  # the first process's, the others follow; 0: any; None: none at all
    metrics_bind: str = "127.0.0.1"
    monitor_port: int | None = None  # of NATS's own pages, on loopback; None: none; 0: any
    address: str = "127.0.0.1"  # what other machines reach this one by
    node: str = "node"
    policies: tuple[str, ...] = ()  # built-in names or files
    proxies: tuple[str, ...] = ()  # whose word on a client's address the HTTP doors believe
    tls: bool = False  # the bus and the HTTP doors speak TLS
    access_file: Path | None = None  # who may do what; None: the default rules
    code: tuple[str, ...] = ()  # folders with users' modules; none: the working directory
    allow_urls: tuple[str, ...] = ()  # folders and URLs that jobs may name
    trust_researchers: bool = False  # users' code is not confined
    instance_users: str | None = None  # LO-HI: system users for instances
    researchers: bool = True  # False: nothing can hold their code, and they are not trusted


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """One process: its name (also of its log file), arguments, and when it stops (lower first).

    The control plane stops first, so that the orchestrator ends its jobs and is not told of dying
    instances; the node agents follow; functional modules go with the control plane.
    """

    name: str
    arguments: tuple[str, ...]
    stop_order: int
    identities: tuple[Identity, ...] = ()  # as whom it may be on the bus
    users_code: bool = False  # whether it runs a file that somebody has written: it is confined
    may_leave: bool = False  # whether it may end in order by itself, and then stays away


def with_metrics(children: Sequence[ChildSpec], ports: Sequence[int], bind: str) -> list[ChildSpec]:
    """The same children, each with the port at which it tells its metrics; no ports: none does.

    Functional modules tell none: what they do is on the bus.
    """
    own = iter(ports)
    return [
        child
        if child.arguments[0] not in ("run", "join")
        else replace(
            child,
            arguments=(*child.arguments, "--metrics-port", str(next(own, "off")), "--metrics-bind", bind),
        )
        for child in children
    ]


def lay_out(
    options: MeshOptions,
    bus_url: str,
    http_ports: Sequence[int],
    tokens: Path,
    logs: Path,
    keys: Path | None = None,
) -> list[ChildSpec]:
    """The children of a mesh, in the order in which they start.

    Args:
        options: what was asked for.
        bus_url: where the servers listen, as processes of this machine reach them, with commas between.
        http_ports: one per cluster.
        tokens: the users' file.
        logs: the folder of the instances' log files.
        keys: the file of the authorizer's keys, where it guards the bus.
    """
    agents = [
        ChildSpec(
            name=f"agent-{cluster}",
            arguments=(
                *("join", bus_url, "--cluster", cluster, "--node", options.node),
                *("--slots", str(options.slots), "--address", options.address, "--logs", str(logs)),
                *_users_code(options),
            ),
            stop_order=2,
            identities=(identities.agent(cluster, options.node),),
        )
        for cluster in options.clusters
    ]
    modules = [
        ChildSpec(
            name=f"policy-{index}",
            arguments=("policy", "run", source, *_trust(options)),
            stop_order=0,
            identities=(identities.module(source),),
            may_leave=True,
            users_code=".py" in source,
        )
        for index, source in enumerate(options.policies)
    ]
    return [
        *agents,
        *(
            child
            if child.identities
            else replace(child, identities=identities.entities(child.arguments[1:], _clusters(child)))
            for child in _control_plane(options, http_ports, _files(options, tokens, keys))
        ),
        *modules,
    ]  # agents load torch: they take longest


def _users_code(options: MeshOptions) -> tuple[str, ...]:
    """Where it lies, and what holds it."""
    users = () if options.instance_users is None else ("--instance-users", options.instance_users)
    return (
        *(part for folder in options.code for part in ("--code", folder)),
        *_allowed(options),
        *_trust(options),
        *users,
    )


def _allowed(options: MeshOptions) -> tuple[str, ...]:
    return tuple(part for url in options.allow_urls for part in ("--allow-url", url))


def _trust(options: MeshOptions) -> tuple[str, ...]:
    """Where nothing could hold users' code, only operators have some."""
    return ("--trust-researchers",) if options.trust_researchers or not options.researchers else ()


def _files(options: MeshOptions, tokens: Path, keys: Path | None) -> tuple[str, ...]:
    """What an authorizer is told: where its files are. The key of tokens lies beside the users' file."""
    rules = () if options.access_file is None else ("--access-file", str(options.access_file))
    guard = () if keys is None else ("--keys", str(keys))
    strangers = () if options.researchers else ("--no-researchers",)
    beside = ("--user-key", str(tokens.with_name(USER_KEY)), "--audit-folder", str(tokens.with_name(AUDIT)))
    return ("--tokens", str(tokens), *beside, *rules, *guard, *strangers)


def _clusters(child: ChildSpec) -> tuple[str, ...]:
    pairs = zip(child.arguments, child.arguments[1:], strict=False)
    return tuple(value for option, value in pairs if option == "--cluster")


def _control_plane(
    options: MeshOptions, http_ports: Sequence[int], files: tuple[str, ...]
) -> list[ChildSpec]:
    def doors(cluster: str, port: int) -> tuple[str, ...]:
        proxies = tuple(part for proxy in options.proxies for part in ("--proxy", proxy))
        return ("--cluster", cluster, "--http-port", str(port), "--bind", options.bind, *proxies)

    pairs = list(zip(options.clusters, http_ports, strict=True))
    several = {"service-registry": options.registries, "orchestrator": options.orchestrators}
    apart = [entity for entity, count in several.items() if options.separate or count > 1]
    orchestrators = [
        ChildSpec(name=name, arguments=("run", "orchestrator", *_allowed(options)), stop_order=1)
        for name in (numbered("orchestrator", options.orchestrators) if "orchestrator" in apart else ())
    ]
    registries = [
        ChildSpec(name=name, arguments=("run", "service-registry"), stop_order=4)
        for name in (numbered("service-registry", options.registries) if "service-registry" in apart else ())
    ]
    if not options.separate:
        alone = ("service-registry", "authorizer", "orchestrator", "broker")
        together = tuple(entity for entity in alone if entity not in apart)
        arguments: tuple[str, ...] = ("run", *together, "router", "gateway")
        arguments += tuple(argument for pair in pairs for argument in doors(*pair))
        arguments += (*files, *_allowed(options))
        return [
            *registries,
            ChildSpec(name="control-plane", arguments=arguments, stop_order=3 if orchestrators else 1),
            *orchestrators,
        ]
    return [
        *registries,
        ChildSpec(name="authorizer", arguments=("run", "authorizer", *files), stop_order=3),
        ChildSpec(name="broker", arguments=("run", "broker"), stop_order=4),
        *orchestrators,
        *(
            ChildSpec(
                name=f"router-{cluster}", arguments=("run", "router", "--cluster", cluster), stop_order=3
            )
            for cluster in options.clusters
        ),
        *(
            ChildSpec(
                name=f"gateway-{cluster}",
                arguments=("run", "gateway", *doors(cluster, port), *_allowed(options)),
                stop_order=3,
            )
            for cluster, port in pairs
        ),
    ]


def numbered(entity: str, count: int) -> tuple[str, ...]:
    """Process names of an entity that runs apart."""
    return (entity,) if count == 1 else tuple(f"{entity}-{number}" for number in range(1, count + 1))


def expected_services(options: MeshOptions) -> frozenset[str]:
    """SIDs that are active in the registry once the mesh is ready (the registry itself is not in it)."""
    return frozenset(
        {"authorizer", "orchestrator"}
        | {f"{kind}-{cluster}" for kind in ("gateway", "router") for cluster in options.clusters}
        | {agent_name(cluster, options.node) for cluster in options.clusters}
    )


def child_arguments(child: ChildSpec, parent: int) -> list[str]:
    """The arguments to `dmsc` of a child of the process `parent`, which it does not outlive."""
    return [*child.arguments, "--parent", str(parent)]


def command(child: ChildSpec, parent: int) -> list[str]:
    """The command line of such a child."""
    return [sys.executable, "-m", "dmsc", *child_arguments(child, parent)]
