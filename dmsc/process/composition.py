"""Turns names of entities into services that can be run; the only file that knows every constructor."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from urllib.parse import urlsplit

from dmsc.state import identities
from schemas import names
from schemas.base import is_token
from schemas.envelope import EntityKind
from schemas.errors import BadInput

if TYPE_CHECKING:
    from bus.connection import Bus
    from dmsc.process.run_options import RunOptions
    from dmsc.state.settings import BusAddress
    from entities.cluster.config import ClusterConfig
    from schemas.automation import Automation
    from schemas.usage import Prices


class Entity(Protocol):
    """A service. It runs until it is cancelled, then drains and deregisters."""

    async def run(self, ready: asyncio.Event | None = None) -> None: ...


@runtime_checkable
class LeavingEntity(Entity, Protocol):
    """An entity that can leave in order, within a time that its machine leaves it; `run` then returns."""

    @property
    def has_left(self) -> bool: ...

    def leave(self, deadline_s: float, reason: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ServicePart:
    """One service to run: its identity on the bus and its constructor. A lower `stop_order` stops first."""

    sid: str
    kind: EntityKind
    make: Callable[[Bus], Entity]
    stop_order: int
    first: Callable[[], AbstractAsyncContextManager[object]] | None = None
    """A context that is entered before this process connects and left at its end: the bus's auth callout."""


ENTITIES = (
    *("service-registry", "authorizer", "orchestrator", "broker", "accountant", "gateway", "router"),
    *("model-registry", "provisioner"),
)
"""The entities that `dmsc run` knows, beside policies, the `tracer` and the `tracker`. Each cluster has its
own gateway and router."""


def compose(names: Sequence[str], options: RunOptions, address: BusAddress) -> list[ServicePart]:
    """Return the services for these names. Raises `BadInput` if a name or an option is wrong."""
    from dmsc.process.policy_loading import is_policy, unknown

    check_proxies(options.proxies)
    called = identities.called(names, options.name)
    parts: list[ServicePart] = []
    for name in dict.fromkeys(names):
        if name == "service-registry":
            parts.append(_service_registry(options))
        elif name == "authorizer":
            parts.append(_authorizer(called.authorizer, options, address))
        elif name == "orchestrator":
            parts.append(_orchestrator(options))
        elif name == "broker":
            parts.append(_broker(called.broker))
        elif name == "accountant":
            parts.append(_accountant(options))
        elif name == "model-registry":
            parts.append(_model_registry(called.model_registry))
        elif name == "provisioner":
            parts.append(_provisioner(options, address))
        elif name == "gateway":
            ports = (*options.http_ports, *(None for _ in options.clusters))
            pairs = zip(_clusters(name, options), ports, strict=False)
            parts.extend(_gateway(cluster, port, options) for cluster, port in pairs)
        elif name == "router":
            parts.extend(_router(cluster, options) for cluster in _clusters(name, options))
        elif name == "tracer":
            parts.append(_tracer())
        elif name == "tracker":
            parts.append(_tracker(options))
        elif is_policy(name):
            parts.append(policy_part(name))
        else:
            raise BadInput(f"{name}: no entity, and {unknown(name, *ENTITIES)}")
    return parts


def _clusters(name: str, options: RunOptions) -> tuple[str, ...]:
    if not options.clusters:
        raise BadInput(f"{name} serves a cluster: say which with --cluster NAME (or DMSC_CLUSTER)")
    return check_clusters(options.clusters)


def check_proxies(proxies: Sequence[str]) -> tuple[str, ...]:
    """Return the proxies unchanged. Raises `BadInput` if one is neither an address nor a network."""
    for proxy in proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError:
            raise BadInput(
                f"--proxy {proxy!r}: an address or a network, as 10.0.0.7 or 10.0.0.0/24"
            ) from None
    return tuple(proxies)


def check_clusters(clusters: Sequence[str]) -> tuple[str, ...]:
    """Return the cluster names unchanged. Raises `BadInput` for duplicates and for invalid names."""
    for cluster in clusters:
        if not is_token(cluster):
            raise BadInput(f"--cluster {cluster!r}: use letters, digits, - and _ only")
        if (why := names.misplaced(cluster)) is not None:
            raise BadInput(f"--cluster: {why}")
    if len(set(clusters)) != len(clusters):
        raise BadInput("--cluster: the same name twice")
    return tuple(clusters)


def _tracer() -> ServicePart:
    from dmsc.tracing.tracer import SpanExport, TracerService

    export = SpanExport()  # made here, so that a missing package is reported before any connection
    return ServicePart(
        sid="tracer",
        kind=EntityKind.FUNCTIONAL_MODULE,
        make=lambda bus: TracerService(bus, export),
        stop_order=0,
    )


def _tracker(options: RunOptions) -> ServicePart:
    from dmsc.run_history.selection import since_when
    from dmsc.state.state_folder import default_state
    from dmsc.tracking.sinks import sinks_of
    from dmsc.tracking.tracker import Tracker, TrackerConfig

    state = options.state or default_state()
    config = TrackerConfig(since=since_when(options.since, time.time()))
    sinks = sinks_of(tensorboard=options.tensorboard, mlflow=options.mlflow, wandb=options.wandb, state=state)
    return ServicePart(
        sid="tracker",
        kind=EntityKind.FUNCTIONAL_MODULE,
        make=lambda bus: Tracker(bus, sinks, config),
        stop_order=0,
    )


def _service_registry(options: RunOptions) -> ServicePart:
    from entities.election.lease import LeadershipLeaseConfig
    from entities.service_registry.service import ServiceRegistry, ServiceRegistryConfig

    lead = LeadershipLeaseConfig(lease_s=lease_s(options.replicas))
    config = ServiceRegistryConfig(node=node_name(), replicas=options.replicas, lead=lead)
    return ServicePart(
        sid="service-registry",
        kind=EntityKind.SERVICE_REGISTRY,
        make=lambda bus: ServiceRegistry(bus, config),
        stop_order=3,
    )


def _authorizer(sid: str, options: RunOptions, address: BusAddress) -> ServicePart:
    from entities.authorizer import Authorizer, AuthorizerConfig, guarding

    if options.tokens_file is None:
        raise BadInput("authorizer needs the users' file: --tokens FILE (or DMSC_TOKENS)")
    config = AuthorizerConfig(
        sid=sid,
        tokens_file=options.tokens_file,
        access_file=options.access_file,
        user_key=options.user_key,
        audit_folder=None if options.audit_folder is None else options.audit_folder / sid,
        keys_file=options.keys_file,
        researchers=not options.no_researchers,
        servers=address.servers,
        bus_token=address.token,
    )
    return ServicePart(
        sid=config.sid,
        kind=EntityKind.AUTHORIZER,
        make=lambda bus: Authorizer(bus, config),
        stop_order=2,
        first=None if options.keys_file is None else lambda: guarding(config),
    )


def _orchestrator(options: RunOptions) -> ServicePart:
    from dmsc.planning.topology_file import mesh_network
    from entities.election.lease import LeadershipLeaseConfig
    from entities.orchestrator import Orchestrator, OrchestratorConfig
    from entities.orchestrator.planning.plan_requests import MeshNetwork
    from entities.orchestrator.policy.arbitration import ArbitrationConfig
    from entities.orchestrator.queue.mesh_slots import queue_rules
    from entities.planner.planning_process import PlanningConfig

    modules = [name.strip() for name in options.precedence.split(",") if name.strip()]
    ranks = {module: rank for rank, module in enumerate(reversed(modules), start=1)}
    config = OrchestratorConfig(
        node=node_name(),
        lease=LeadershipLeaseConfig(lease_s=lease_s(options.replicas)),
        arbitration=ArbitrationConfig(precedence=ranks, fault_answer_s=options.fault_answer),
        automation=parse_automation(options.automation),
        own_loop=_is_on(options.own_loop, "--own-loop"),
        peak_tflops=options.peak_tflops,
        queue=queue_rules(options.queue_order, options.queue_cool_down, options.queue_half_life),
        planning=PlanningConfig(program="dmsc.planning"),
        network=mesh_network(options.topology) if options.topology is not None else MeshNetwork(),
    )
    return ServicePart(
        sid="orchestrator",
        kind=EntityKind.ORCHESTRATOR,
        make=lambda bus: Orchestrator(bus, config),
        stop_order=0,
    )


def parse_automation(text: str) -> Automation:
    """The value of `--automation`.

    Raises:
        BadInput: It is none of the modes.
    """
    from schemas.automation import Automation as Mode

    if text not in list(Mode):
        raise BadInput(f"--automation {text}: give one of {', '.join(Mode)}")
    return Mode(text)


def _is_on(text: str, option: str) -> bool:
    if text not in ("on", "off"):
        raise BadInput(f"{option} {text}: give on or off")
    return text == "on"


def _broker(sid: str) -> ServicePart:
    from entities.broker import Broker

    return ServicePart(sid=sid, kind=EntityKind.BROKER, make=Broker, stop_order=4)


def _accountant(options: RunOptions) -> ServicePart:
    from entities.accountant import Accountant, AccountantConfig
    from entities.accountant.prices_file import read_tariff
    from schemas.tariff import flat_tariff

    if options.prices is not None:
        read_tariff(options.prices)  # what is wrong in it is said before any connection
    config = AccountantConfig(prices_file=options.prices, otherwise=flat_tariff(_prices(options)))
    return ServicePart(
        sid="accountant", kind=EntityKind.ACCOUNTANT, make=lambda bus: Accountant(bus, config), stop_order=2
    )


def _prices(options: RunOptions) -> Prices:
    from schemas.usage import Prices

    return Prices(slot_hour=options.slot_price, kwh=options.energy_price, slot_watts=options.slot_watts)


def _model_registry(sid: str) -> ServicePart:
    from entities.model_registry import ModelRegistry

    return ServicePart(sid=sid, kind=EntityKind.MODEL_REGISTRY, make=ModelRegistry, stop_order=1)


def _provisioner(options: RunOptions, address: BusAddress) -> ServicePart:
    from bus.security.identity import is_credential, is_root
    from dmsc.process.machine_drivers import driver_of
    from dmsc.state.state_folder import default_state
    from entities.election.lease import LeadershipLeaseConfig
    from entities.provisioner import Provisioner, ProvisionerConfig
    from entities.provisioner.pools_file import read_pools

    if options.pools is None:
        raise BadInput("provisioner needs pools: --pools FILE (or DMSC_POOLS), as examples/pools.yaml")
    guarded = is_root(address.token) or is_credential(address.token)
    state = (options.state or default_state()).absolute()
    file = read_pools(options.pools, guarded=guarded)
    for name, pool in file.pools.items():
        driver_of(file.name, name, pool, address, state)  # what a driver lacks here is said at once
    config = ProvisionerConfig(
        file=file,
        make_driver=lambda name, pool: driver_of(file.name, name, pool, address, state),
        node=node_name(),
        lease=LeadershipLeaseConfig(lease_s=lease_s(options.replicas)),
    )
    return ServicePart(
        sid="provisioner",
        kind=EntityKind.PROVISIONER,
        make=lambda bus: Provisioner(bus, config),
        stop_order=0,
    )


def lease_s(replicas: int) -> float:
    """A leader's lease in seconds. On a NATS cluster it is longer, to leave time to reach another server."""
    return 1.0 if replicas == 1 else 3.0


def _gateway(cluster: str, port: int | None, options: RunOptions) -> ServicePart:
    from dmsc.process.service_tokenizers import open_service_tokenizer
    from entities.gateway import Gateway, GatewayConfig
    from entities.gateway.http.config import HttpConfig
    from entities.gateway.http.rate_limit import RequestRate

    prices = _prices(options)
    advertised = "" if port is None else own_address(options.bind)
    config = GatewayConfig(
        cluster=cluster,
        http_host=options.bind,
        http_port=port,
        advertised_host=advertised,
        tls=options.tls,
        proxies=options.proxies,
        door=HttpConfig(
            rate=RequestRate(per_s=options.user_rate, burst=int(2 * options.user_rate)), prices=prices
        ),
        open_tokenizer=open_service_tokenizer,
    )
    return ServicePart(
        sid=f"gateway-{cluster}", kind=EntityKind.GATEWAY, make=lambda bus: Gateway(bus, config), stop_order=1
    )


def _router(cluster: str, options: RunOptions) -> ServicePart:
    from entities.router.service import Router, RouterConfig

    config = RouterConfig(cluster=cluster, energy_price=options.energy_price)
    return ServicePart(
        sid=config.sid, kind=EntityKind.ROUTER, make=lambda bus: Router(bus, config), stop_order=1
    )


def policy_part(
    source: str,
    *,
    shadow: bool = False,
    jobs: Sequence[str] = (),
    owner: str = "",
    own_jobs: bool = False,
) -> ServicePart:
    """The functional module of a built-in policy's name or a user's file (`path.py` or `path.py:Class`).

    Args:
        source: The policy's name or file.
        shadow: Whether its suggestions are only scored.
        jobs: The jobs that it serves; empty: all.
        owner: The user who runs it; empty: the mesh itself.
        own_jobs: Whether it may read local stores of its owner's jobs only.
    """
    from dmsc.process.policy_loading import load_policy
    from policies.kit.engine import EngineConfig
    from policies.module.service import FunctionalModule, ModuleConfig, module_sid

    policy = load_policy(source)
    config = ModuleConfig(
        shadow=shadow, owner=owner, own_jobs=own_jobs, engine=EngineConfig(jobs=tuple(jobs))
    )
    return ServicePart(
        sid=module_sid(policy, shadow=shadow),
        kind=EntityKind.FUNCTIONAL_MODULE,
        make=lambda bus: FunctionalModule(bus, policy, config),
        stop_order=0,
    )


def agent_part(config: ClusterConfig) -> ServicePart:
    """The node agent of a cluster."""
    from entities.cluster.agent import ClusterAgent

    return ServicePart(
        sid=names.agent_name(config.cluster, config.node),
        kind=EntityKind.CLUSTER,
        make=lambda bus: ClusterAgent(bus, config),
        stop_order=0,
    )


def node_name() -> str:
    """This machine's name as one subject token."""
    name = "".join(char if is_token(char) else "-" for char in socket.gethostname().split(".")[0])
    return re.sub("--+", "-", name.strip("-")) or "node"


def own_address(bind: str) -> str:
    """The address at which others reach a server that listens on `bind`.

    It is `bind` itself, or for a wildcard this host's address on its default route.
    """
    if bind not in ("0.0.0.0", "::", ""):
        return bind
    return _source_address("192.0.2.1")


def address_towards(url: str) -> str:
    """This machine's address on the route to a server; other nodes most likely reach it there, too."""
    return _source_address(urlsplit(url if "//" in url else f"nats://{url}").hostname or "127.0.0.1")


def _source_address(host: str) -> str:
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing; the kernel only looks up the route
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
