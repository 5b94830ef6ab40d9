"""Which processes make a mesh on this machine: takes options and returns a list of children. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bus.security.identity import Identity
from dmsc.console.command_app import option_words
from dmsc.launch.mesh_options import MeshOptions
from dmsc.process.policy_loading import NONE, chosen_policies
from dmsc.state import identities
from entities.cluster.capabilities.labels import parse_labels
from schemas.errors import BadInput
from schemas.names import agent_name

USER_KEY = "user_key"
"""The file in the state folder with the key that signs users' tokens."""
AUDIT = "audit"
"""The folder in the state folder with the authorizer's audit records."""


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
    takes_notice: bool = False  # whether SIGTERM alone gives it time to leave in order


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
                *option_words(
                    options, "code", "allow_urls", "instance_users", "cache", "emulate_slots", "emulation"
                ),
                *_labels(options, cluster),
                *_cache_part(options),
                *_trust(options),
            ),
            stop_order=2,
            identities=(identities.agent(cluster, options.node),),
            may_leave=True,
            takes_notice=True,
        )
        for cluster in options.clusters
    ]
    return [
        *agents,
        *(
            child
            if child.identities
            else replace(child, identities=identities.entities(child.arguments[1:], _clusters(child)))
            for child in _control_plane(options, http_ports, _files(options, tokens, keys))
        ),
        *_modules(options),
    ]  # agents come first: they load torch and take longest


def _modules(options: MeshOptions) -> list[ChildSpec]:
    """A process for each functional module, named by it, so that one may crash without the others.

    Raises:
        BadInput: `--policy` names no policy, or `none` beside others.
    """
    children: list[ChildSpec] = []
    for source in chosen_policies(options.policies):
        if source == NONE:
            continue
        identity = identities.module(source)
        same = sum(child.identities[0].name == identity.name for child in children)
        children.append(
            ChildSpec(
                name=f"policy-{identity.name}" + (f"-{same + 1}" if same else ""),
                arguments=("policy", "run", source, *_trust(options)),
                stop_order=0,
                identities=(identity,),
                may_leave=True,
                users_code=".py" in source,
            )
        )
    return children


def _automation(options: MeshOptions) -> tuple[str, ...]:
    """The option of an orchestrator that says how far jobs are changed without a person."""
    off = "off" if chosen_policies(options.policies) == (NONE,) else None
    mode = options.automation or off
    return () if mode is None else ("--automation", mode)


def _labels(options: MeshOptions, cluster: str) -> tuple[str, ...]:
    """The options with the labels of one cluster's agent.

    Raises:
        BadInput: a label is none, or names a cluster that is not started.
    """
    own = []
    for text in options.labels:
        head, equals, _ = text.partition("=")
        place, colon, _ = head.partition(":")
        if colon and equals and place not in options.clusters:
            raise BadInput(f"--label {text}: there is no cluster {place}, only {', '.join(options.clusters)}")
        if not colon or place == cluster:
            own.append(text.removeprefix(f"{place}:") if colon else text)
    return tuple(word for key, value in parse_labels(own).items() for word in ("--label", f"{key}={value}"))


def _cache_part(options: MeshOptions) -> tuple[str, ...]:
    """The option with each agent's part of the cache: all are on one disk."""
    if options.cache_gib is None:
        return ()
    return ("--cache-gib", f"{options.cache_gib / max(1, len(options.clusters)):g}")


def _trust(options: MeshOptions) -> tuple[str, ...]:
    """The option that switches confinement off.

    If code can't be confined, researchers are refused, so all users' code comes from operators.
    """
    return ("--trust-researchers",) if options.trust_researchers or not options.researchers else ()


def _files(options: MeshOptions, tokens: Path, keys: Path | None) -> tuple[str, ...]:
    """The options of an authorizer about its files. The key of tokens is in the users' file's folder."""
    rules = option_words(options, "access_file")
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
    names = ("bind", "proxies", "user_rate")

    def http_options(cluster: str, port: int) -> tuple[str, ...]:
        return ("--cluster", cluster, "--http-port", str(port), *option_words(options, *names))

    allowed, prices = option_words(options, "allow_urls"), option_words(options, "prices")
    network = (*option_words(options, "topology"), *_automation(options))
    if not options.own_loop:
        network = (*network, "--own-loop", "off")
    pairs = list(zip(options.clusters, http_ports, strict=True))
    several = {"service-registry": options.registries, "orchestrator": options.orchestrators}
    apart = [entity for entity, count in several.items() if options.separate or count > 1]
    orchestrators = [
        ChildSpec(name=name, arguments=("run", "orchestrator", *allowed, *network), stop_order=1)
        for name in (numbered("orchestrator", options.orchestrators) if "orchestrator" in apart else ())
    ]
    registries = [
        ChildSpec(name=name, arguments=("run", "service-registry"), stop_order=4)
        for name in (numbered("service-registry", options.registries) if "service-registry" in apart else ())
    ]
    if not options.separate:
        alone = ("service-registry", "authorizer", "orchestrator", "broker", "accountant", "model-registry")
        together = tuple(entity for entity in alone if entity not in apart)
        arguments: tuple[str, ...] = ("run", *together, "router", "gateway")
        arguments += tuple(argument for pair in pairs for argument in http_options(*pair))
        arguments += (*files, *prices, *allowed, *(network if "orchestrator" in together else ()))
        return [
            *registries,
            ChildSpec(name="control-plane", arguments=arguments, stop_order=3 if orchestrators else 1),
            *orchestrators,
        ]
    return [
        *registries,
        ChildSpec(name="authorizer", arguments=("run", "authorizer", *files), stop_order=3),
        ChildSpec(name="broker", arguments=("run", "broker"), stop_order=4),
        ChildSpec(name="accountant", arguments=("run", "accountant", *prices), stop_order=3),
        ChildSpec(name="model-registry", arguments=("run", "model-registry"), stop_order=3),
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
                arguments=("run", "gateway", *http_options(cluster, port), *allowed),
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
