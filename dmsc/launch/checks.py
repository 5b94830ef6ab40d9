"""The checks of `dmsc doctor`, one per function: each returns whether it passed, and a remedy."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bus import subjects
from bus.connection import Bus
from bus.messaging.streams import stream_configs
from bus.nats import jetstream
from dmsc.client.async_client import AsyncClient
from dmsc.launch import ports
from dmsc.process.sandboxing import REMEDY, sentence, way_here
from dmsc.state.cleartext_notice import in_the_clear
from dmsc.state.settings import BusAddress, find_bus, find_gateway
from dmsc.state.state_folder import StateFolder
from entities.presence.service_area import server_of, serving_clusters
from schemas.cluster import NodeStatus
from schemas.envelope import EntityKind, Envelope
from schemas.errors import DmscError, NotFound, Refused
from schemas.gateway_api import MeshStatus
from schemas.registry import Heartbeat, InstanceState
from workers.sandbox.confinement import ConfinementMethod

MIN_SERVER = (2, 11)
"""The first version of nats-server that marks key-value entries as expired."""
MIN_FREE_BYTES = 2 << 30

STORE_REMEDY = (
    "was the server's store deleted, or is its disk full? make room and start the server again; one of "
    "`dmsc up` is started again by itself, and the mesh makes its streams anew"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check. `remedy` says what to do if the check is not `ok`."""

    name: str
    ok: bool
    text: str
    remedy: str = ""


async def examine(state: StateFolder, servers: str | None, bus_token: str | None) -> list[Finding]:
    """Run all checks, the most basic ones first. Checks that need a mesh are skipped if there is none."""
    findings = [await _torch(), _disk(state), _sandbox(state)]
    try:
        address = find_bus(servers, bus_token, state.path)
    except DmscError as error:
        findings.append(
            Finding("mesh", False, error.text, "start one with `dmsc up`, or name one with --bus")
        )
        return [*findings, *_default_ports()]
    info = await _server(address, findings)
    if info is None:
        return findings
    try:
        async with Bus.connect(
            address.servers, name="doctor", kind=EntityKind.CLIENT, token=address.token
        ) as bus:
            findings.append(Finding("bus token", True, "accepted"))
            findings.append(await _clocks(bus))
            findings.append(await _streams(bus))
    except DmscError as error:
        findings.append(
            Finding(
                "bus token", False, error.text, "take the one of the mesh: STATE/bus_token, or --bus-token"
            )
        )
        return findings
    findings += await _gateways(state, address.servers)
    return findings


async def _torch() -> Finding:
    """Import torch in a separate process, as instances do, so that this process stays small."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import torch; print(torch.__version__, torch.cuda.device_count())",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    if process.returncode == 0:
        version, devices = out.decode().split()
        return Finding("torch", True, f"{version}, {devices} CUDA device(s)")
    reason = (err.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
    return Finding(
        "torch", False, reason, f"install it for this interpreter: {sys.executable} -m pip install torch"
    )


def _disk(state: StateFolder) -> Finding:
    place = next((path for path in (state.path, *state.path.parents) if path.exists()), Path("/"))
    free = shutil.disk_usage(place).free
    text = f"{free / 2**30:.1f} GiB free at {place}"
    return Finding("disk", free >= MIN_FREE_BYTES, text, "make room, or put the state elsewhere with --state")


def _sandbox(state: StateFolder) -> Finding:
    """How users' code is confined: in the mesh that runs on this folder, else in one started now."""
    mesh = state.mesh()
    confined = (
        way_here() is not ConfinementMethod.NONE
        if mesh is None
        else not mesh.sandbox.startswith(ConfinementMethod.NONE.described)
    )
    text = (mesh.sandbox if mesh is not None else "") or sentence(way_here(), trusted=False)
    return Finding("sandbox", confined, text, REMEDY)


def _default_ports() -> list[Finding]:
    findings = []
    for name, port in (("bus port", 4222), ("gateway port", 8080)):
        free = ports.is_free("127.0.0.1", port)
        remedy = "`dmsc up` takes a free one by itself"
        findings.append(Finding(name, free, f"{port} is {'free' if free else 'taken'}", remedy))
    return findings


async def _server(
    address: BusAddress, findings: list[Finding], *, connect_s: float = 2.0
) -> dict[str, Any] | None:
    """The INFO line with which the first reachable server greets, before it asks for a token; None if none.

    The outcome is appended to `findings`.
    """
    for url in address.servers:
        where = urlsplit(url if "//" in url else f"nats://{url}")
        host, port = where.hostname or "127.0.0.1", where.port or 4222
        try:
            async with asyncio.timeout(connect_s):
                reader, writer = await asyncio.open_connection(host, port)
                line = await reader.readline()
                writer.close()
            info: dict[str, Any] = json.loads(line.removeprefix(b"INFO "))
        except (OSError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
            findings.append(
                Finding("server", False, f"{url}: {reason}", "is it up, and the port open to this machine?")
            )
            continue
        version = tuple(
            int(part) for part in str(info.get("version", "0.0")).split(".")[:2] if part.isdigit()
        )
        recent = version >= MIN_SERVER
        newer = f"install nats-server {MIN_SERVER[0]}.{MIN_SERVER[1]} or newer"
        findings.append(Finding("server", recent, f"{url}: nats-server {info.get('version')}", newer))
        jetstream = bool(info.get("jetstream"))
        text = "on" if jetstream else "off"
        findings.append(
            Finding("jetstream", jetstream, text, "start the server with -js, or `jetstream {}` in its file")
        )
        return info
    return None


async def _clocks(bus: Bus, *, listen_s: float = 1.5, most_skew_s: float = 1.0) -> Finding:
    """Compare clocks by heartbeats, which carry their sender's time.

    A heartbeat's age is the clock difference plus its delay, so the smallest age is closest to the
    difference. Heartbeats come once a second, so each service is heard within `listen_s`.
    """
    skews: dict[str, float] = {}

    async def on_heartbeat(message: Heartbeat, envelope: Envelope) -> None:
        skew = time.time() - envelope.sent_at
        best = skews.get(envelope.sender.name)
        skews[envelope.sender.name] = skew if best is None or abs(skew) < abs(best) else best

    subscription = await bus.subscribe(subjects.HEARTBEAT, on_heartbeat)
    await asyncio.sleep(listen_s)
    await subscription.stop()
    if not skews:
        return Finding(
            "clocks", False, "no service says that it lives", "is anything but the server up? `dmsc status`"
        )
    worst = max(skews, key=lambda name: abs(skews[name]))
    text = f"{len(skews)} services, at most {abs(skews[worst]) * 1000:.0f} ms apart ({worst})"
    return Finding(
        "clocks", abs(skews[worst]) <= most_skew_s, text, f"set the clock of {worst}'s machine (NTP)"
    )


async def _streams(bus: Bus) -> Finding:
    """Check that the server has all streams of the mesh; its store or a stream may have been deleted."""
    missing = []
    for config in stream_configs(1):
        try:
            await jetstream.call(bus.connection, f"STREAM.INFO.{config['name']}")
        except NotFound:
            missing.append(config["name"])
        except Refused:  # this token may not see the stream, for example that of meeting points
            continue
        except DmscError as error:
            return Finding("streams", False, error.text, STORE_REMEDY)
    if missing:
        return Finding("streams", False, f"not there: {', '.join(missing)}", STORE_REMEDY)
    return Finding("streams", True, "all there")


async def _gateways(state: StateFolder, servers: Sequence[str]) -> list[Finding]:
    try:
        async with AsyncClient(state=state.path, timeout_s=5.0) as client:
            waiting = (await client.ready()).waiting
            if "store" in waiting:
                return [Finding("store", False, waiting["store"], STORE_REMEDY)]
            mesh = await client.mesh()
    except DmscError as error:
        return [Finding("gateway", False, error.text, "name it with DMSC_GATEWAY and DMSC_TOKEN")]
    findings = [Finding("gateway", True, f"{len(mesh.services)} services, {len(mesh.nodes)} nodes")]
    places = [*servers, *find_gateway(state=state.path).urls, *(node.address for node in mesh.nodes)]
    findings.append(Finding("in the clear", True, in_the_clear(places) or "nothing leaves this machine"))
    findings += _versions(mesh)
    findings.append(_brokers(mesh))
    findings += (cluster_servers(mesh, kind) for kind in (EntityKind.ROUTER, EntityKind.GATEWAY))
    findings.append(_records(mesh))
    findings += await asyncio.gather(*(_tensor_address(node) for node in mesh.nodes))
    return findings


def _versions(mesh: MeshStatus) -> list[Finding]:
    torches = {node.torch_version for node in mesh.nodes if node.torch_version}
    remedy = "install the same torch on all nodes: bits differ between versions"
    return [
        Finding("versions", len(torches) <= 1, f"torch {', '.join(sorted(torches)) or 'unknown'}", remedy)
    ]


def _brokers(mesh: MeshStatus) -> Finding:
    """Check that a broker is active.

    Without one, instances, agents, modules and users can read nothing from a guarded bus.
    """
    kind, active = EntityKind.BROKER, InstanceState.ACTIVE
    names = sorted(record.sid for record in mesh.services if record.kind is kind and record.state is active)
    remedy = "start one: dmsc run broker"
    return Finding("broker", bool(names), ", ".join(names) or "none is registered", remedy)


def cluster_servers(mesh: MeshStatus, kind: EntityKind) -> Finding:
    """Check that each cluster with nodes has a router (or gateway), or is served by another cluster's."""
    serving = serving_clusters(kind, mesh.services)
    alone = sorted({node.cluster for node in mesh.nodes} - serving)
    remedy = f"start one: dmsc run {kind} --cluster {alone[0] if alone else 'NAME'}"
    if alone and not serving:
        return Finding(f"{kind}s", False, f"none lives; nodes are in {', '.join(alone)}", remedy)
    guests = [f"{cluster} has none, {kind}-{server_of(cluster, serving)} serves it" for cluster in alone]
    text = "; ".join([f"of {', '.join(sorted(serving)) or 'no cluster'}", *guests])
    return Finding(f"{kind}s", True, text, remedy)


def _records(mesh: MeshStatus) -> Finding:
    """Report records of buckets that could not be read and were replaced by their last known value."""
    notes = mesh.unreadable
    if not notes:
        return Finding("records", True, "all that were read lately could be")
    last = notes[-1]
    text = f"{len(notes)} could not be read, the last {last.bucket}.{last.key}: {last.reason}"
    remedy = (
        f"who wrote it? its bytes are in the stream UNREADABLE at {last.sequence} (`dmsc status` has all); a "
        "failing disk, or somebody with the mesh's root, writes such"
    )
    return Finding("records", False, text, remedy)


async def _tensor_address(node: NodeStatus, *, connect_s: float = 2.0) -> Finding:
    """Check that this machine can reach a node's address.

    A refused connection proves that it can; no answer means that a firewall drops packets.
    """
    name = f"tensors {node.cluster}/{node.node}"
    remedy = "let peers through its firewall: join with --address and --ports LO-HI, and open that range"
    try:
        async with asyncio.timeout(connect_s):
            _, writer = await asyncio.open_connection(node.address, 9)
            writer.close()
    except ConnectionRefusedError:
        pass
    except TimeoutError:
        return Finding(name, False, f"{node.address} does not answer within {connect_s:.0f} s", remedy)
    except OSError as error:
        return Finding(name, False, f"{node.address}: {error.strerror or error}", remedy)
    return Finding(name, True, f"{node.address} answers")
