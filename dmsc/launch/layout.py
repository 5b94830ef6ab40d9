"""Which processes make a mesh on this machine: takes options and returns a list of children. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bus.security.identity import Identity
from dmsc.state import identities
from schemas.names import agent_name

USER_KEY = "user_key"
"""The file in the state folder with the key that signs users' tokens."""
AUDIT = "audit"
"""The folder in the state folder with the authorizer's audit records."""


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The options of `dmsc up`."""

    state: Path
    clusters: tuple[str, ...] = ("a", "b")
    slots: int = 4  # stage instances per cluster; may exceed the number of cores, which they then share
    nats_port: int | None = None  # None: 4222, or a free one if that is taken; 0: any
    http_port: int | None = (
        None  # None: 8080, or a free one; 0: any; the next clusters get the following ones
    )
    servers: int = 1  # NATS servers; 3 or 5 make a cluster, which survives the loss of 1 or 2
    orchestrators: int = 1  # one leads; if there are several, each runs in a process of its own
    registries: int = 1  # likewise
    separate: bool = False  # one process per entity instead of one for the control plane
    bind: str = "127.0.0.1"
    metrics_port: int | None = 0  # the first process's; others take the next ones; 0: any; None: no metrics
    metrics_bind: str = "127.0.0.1"
    monitor_port: int | None = None  # of NATS's monitoring pages, on loopback; None: no pages; 0: any
    address: str = "127.0.0.1"  # at which other machines reach this one
    node: str = "node"
    policies: tuple[str, ...] = ()  # built-in names or files
    proxies: tuple[str, ...] = ()  # whose X-Forwarded-For header the HTTP APIs trust
    tls: bool = False  # whether the bus and the HTTP APIs use TLS
    access_file: Path | None = None  # the access rules; None: the default rules
    code: tuple[str, ...] = ()  # folders with users' Python modules; empty: the working directory
    allow_urls: tuple[str, ...] = ()  # folders and URLs that jobs may name
    trust_researchers: bool = False  # True: users' code is not confined
    instance_users: str | None = None  # LO-HI: ids of system users for instances
    researchers: bool = True  # False: refused, since their code can't be confined and they are not trusted


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """One child process: its name (also that of its log file), its arguments, and when it stops.

    Children with a lower `stop_order` stop first. The control plane stops before the node agents, so that the
    orchestrator ends its jobs and gets no reports of dying instances. Functional modules stop with the
    control plane.
    """

    name: str
    arguments: tuple[str, ...]
    stop_order: int
    identities: tuple[Identity, ...] = ()  # under which it may connect to the bus
    users_code: bool = False  # whether it runs a user's file; it is then confined
    may_leave: bool = False  # whether it may exit with code 0 by itself; it is then not restarted


def with_metrics(children: Sequence[ChildSpec], ports: Sequence[int], bind: str) -> list[ChildSpec]:
    """Return the same children, each with the port at which it serves its metrics; without ports, none does.

    Functional modules serve no metrics, because their activity is visible on the bus.
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
        options: The options of the mesh.
        bus_url: The servers' addresses for processes of this machine, separated by commas.
        http_ports: The gateways' ports, one per cluster.
        tokens: The users' file.
        logs: The folder of the instances' log files.
        keys: The file with the keys of the auth callout, if the authorizer guards the bus.
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
    ]  # agents come first: they load torch and take longest


def _users_code(options: MeshOptions) -> tuple[str, ...]:
    """The options of an agent about users' code: where it is, and how it is confined."""
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
    """The option that switches confinement off.

    If code can't be confined, researchers are refused, so all users' code comes from operators.
    """
    return ("--trust-researchers",) if options.trust_researchers or not options.researchers else ()


def _files(options: MeshOptions, tokens: Path, keys: Path | None) -> tuple[str, ...]:
    """The options of an authorizer about its files. The key of tokens is in the users' file's folder."""
    rules = () if options.access_file is None else ("--access-file", str(options.access_file))
    guard = () if keys is None else ("--keys", str(keys))
    researchers = () if options.researchers else ("--no-researchers",)
    siblings = ("--user-key", str(tokens.with_name(USER_KEY)), "--audit-folder", str(tokens.with_name(AUDIT)))
    return ("--tokens", str(tokens), *siblings, *rules, *guard, *researchers)


def _clusters(child: ChildSpec) -> tuple[str, ...]:
    pairs = zip(child.arguments, child.arguments[1:], strict=False)
    return tuple(value for option, value in pairs if option == "--cluster")


def _control_plane(
    options: MeshOptions, http_ports: Sequence[int], files: tuple[str, ...]
) -> list[ChildSpec]:
    def http_options(cluster: str, port: int) -> tuple[str, ...]:
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
        arguments += tuple(argument for pair in pairs for argument in http_options(*pair))
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
                arguments=("run", "gateway", *http_options(cluster, port), *_allowed(options)),
                stop_order=3,
            )
            for cluster, port in pairs
        ),
    ]


def numbered(entity: str, count: int) -> tuple[str, ...]:
    """The process names of an entity that runs in processes of its own."""
    return (entity,) if count == 1 else tuple(f"{entity}-{number}" for number in range(1, count + 1))


def expected_services(options: MeshOptions) -> frozenset[str]:
    """The SIDs that must be active in the registry when the mesh is ready; the registry lists not itself."""
    return frozenset(
        {"authorizer", "orchestrator"}
        | {f"{kind}-{cluster}" for kind in ("gateway", "router") for cluster in options.clusters}
        | {agent_name(cluster, options.node) for cluster in options.clusters}
    )


def child_arguments(child: ChildSpec, parent: int) -> list[str]:
    """The arguments to `dmsc` of a child that ends when the process `parent` ends."""
    return [*child.arguments, "--parent", str(parent)]


def command(child: ChildSpec, parent: int) -> list[str]:
    """The command line of such a child."""
    return [sys.executable, "-m", "dmsc", *child_arguments(child, parent)]
