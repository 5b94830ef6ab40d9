"""What `dmsc doctor` looks at: one check per function, each says ✓ or ✗ and what to do about it."""

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
from schemas.cluster import NodeStatus
from schemas.door import MeshStatus
from schemas.envelope import EntityKind, Envelope
from schemas.errors import DmscError, NotFound, Refused
from schemas.registry import Heartbeat, InstanceState
from workers.sandbox.confinement import ConfinementMethod

MIN_SERVER = (2, 11)
"""The first server with expiry markers of key-value entries."""
MAX_SKEW_S = 1.0
MIN_FREE_BYTES = 2 << 30

STORE_REMEDY = (
    "was the server's store deleted, or is its disk full? make room and start the server again; one of "
    "`dmsc up` is started again by itself, and the mesh makes its streams anew"
)

_listen_s = 1.5  # heartbeats come once a second
_connect_s = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check. `remedy` is for those that are not `ok`."""

    name: str
    ok: bool
    text: str
    remedy: str = ""


async def examine(state: StateFolder, servers: str | None, bus_token: str | None) -> list[Finding]:
    """All checks, in the order in which one would look; those that need a mesh are left out without one."""
    found = [await _torch(), _disk(state), _sandbox(state)]
    try:
        address = find_bus(servers, bus_token, state.path)
    except DmscError as error:
        found.append(Finding("mesh", False, error.text, "start one with `dmsc up`, or name one with --bus"))
        return [*found, *_default_ports()]
    info = await _server(address, found)
    if info is None:
        return found
    try:
        async with Bus.connect(
            address.servers, name="doctor", kind=EntityKind.CLIENT, token=address.token
        ) as bus:
            found.append(Finding("bus token", True, "accepted"))
            found.append(await _clocks(bus))
            found.append(await _streams(bus))
    except DmscError as error:
        found.append(
            Finding(
                "bus token", False, error.text, "take the one of the mesh: STATE/bus_token, or --bus-token"
            )
        )
        return found
    found += await _gateways(state, address.servers)
    return found


async def _torch() -> Finding:
    """In a process of its own, as instances are: this one stays small."""
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
    place = next((each for each in (state.path, *state.path.parents) if each.exists()), Path("/"))
    free = shutil.disk_usage(place).free
    text = f"{free / 2**30:.1f} GiB free at {place}"
    return Finding("disk", free >= MIN_FREE_BYTES, text, "make room, or put the state elsewhere with --state")


def _sandbox(state: StateFolder) -> Finding:
    """What holds users' code: of the mesh that runs there, or of one that would."""
    mesh = state.mesh()
    held = (
        way_here() is not ConfinementMethod.NONE
        if mesh is None
        else not mesh.sandbox.startswith(ConfinementMethod.NONE.described)
    )
    text = (mesh.sandbox if mesh is not None else "") or sentence(way_here(), trusted=False)
    return Finding("sandbox", held, text, REMEDY)


def _default_ports() -> list[Finding]:
    found = []
    for name, port in (("bus port", 4222), ("gateway port", 8080)):
        free = ports.is_free("127.0.0.1", port)
        remedy = "`dmsc up` takes a free one by itself"
        found.append(Finding(name, free, f"{port} is {'free' if free else 'taken'}", remedy))
    return found


async def _server(address: BusAddress, found: list[Finding]) -> dict[str, Any] | None:
    """The server's own greeting: it comes before any token is asked for."""
    for url in address.servers:
        where = urlsplit(url if "//" in url else f"nats://{url}")
        host, port = where.hostname or "127.0.0.1", where.port or 4222
        try:
            async with asyncio.timeout(_connect_s):
                reader, writer = await asyncio.open_connection(host, port)
                line = await reader.readline()
                writer.close()
            info: dict[str, Any] = json.loads(line.removeprefix(b"INFO "))
        except (OSError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
            found.append(
                Finding("server", False, f"{url}: {reason}", "is it up, and the port open to this machine?")
            )
            continue
        version = tuple(
            int(part) for part in str(info.get("version", "0.0")).split(".")[:2] if part.isdigit()
        )
        recent = version >= MIN_SERVER
        newer = f"install nats-server {MIN_SERVER[0]}.{MIN_SERVER[1]} or newer"
        found.append(Finding("server", recent, f"{url}: nats-server {info.get('version')}", newer))
        jetstream = bool(info.get("jetstream"))
        text = "on" if jetstream else "off"
        found.append(
            Finding("jetstream", jetstream, text, "start the server with -js, or `jetstream {}` in its file")
        )
        return info
    return None


async def _clocks(bus: Bus) -> Finding:
    """Heartbeats carry their sender's clock; the least delay seen is closest to the difference."""
    skews: dict[str, float] = {}

    async def heard(message: Heartbeat, envelope: Envelope) -> None:
        skew = time.time() - envelope.sent_at
        best = skews.get(envelope.sender.name)
        skews[envelope.sender.name] = skew if best is None or abs(skew) < abs(best) else best

    subscription = await bus.subscribe(subjects.HEARTBEAT, heard)
    await asyncio.sleep(_listen_s)
    await subscription.stop()
    if not skews:
        return Finding(
            "clocks", False, "no service says that it lives", "is anything but the server up? `dmsc status`"
        )
    worst = max(skews, key=lambda name: abs(skews[name]))
    text = f"{len(skews)} services, at most {abs(skews[worst]) * 1000:.0f} ms apart ({worst})"
    return Finding(
        "clocks", abs(skews[worst]) <= MAX_SKEW_S, text, f"set the clock of {worst}'s machine (NTP)"
    )


async def _streams(bus: Bus) -> Finding:
    """Whether the server has all that the mesh keeps: somebody may have deleted its store, or a stream."""
    missing = []
    for config in stream_configs(1):
        try:
            await jetstream.call(bus.link, f"STREAM.INFO.{config['name']}")
        except NotFound:
            missing.append(config["name"])
        except Refused:  # not for whoever asks to see: meeting points, for example
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
    found = [Finding("gateway", True, f"{len(mesh.services)} services, {len(mesh.nodes)} nodes")]
    places = [*servers, *find_gateway(state=state.path).urls, *(node.address for node in mesh.nodes)]
    found.append(Finding("in the clear", True, in_the_clear(places) or "nothing leaves this machine"))
    found += _versions(mesh)
    found.append(_brokers(mesh))
    found.append(_records(mesh))
    found += await asyncio.gather(*(_tensor_address(node) for node in mesh.nodes))
    return found


def _versions(mesh: MeshStatus) -> list[Finding]:
    torches = {node.torch_version for node in mesh.nodes if node.torch_version}
    remedy = "install the same torch on all nodes: bits differ between versions"
    return [
        Finding("versions", len(torches) <= 1, f"torch {', '.join(sorted(torches)) or 'unknown'}", remedy)
    ]


def _brokers(mesh: MeshStatus) -> Finding:
    """Without one instances, agents, modules and users read nothing of a guarded bus."""
    kind, there = EntityKind.BROKER, InstanceState.ACTIVE
    names = sorted(each.sid for each in mesh.services if each.kind is kind and each.state is there)
    remedy = "start one: dmsc run broker"
    return Finding("broker", bool(names), ", ".join(names) or "none is registered", remedy)


def _records(mesh: MeshStatus) -> Finding:
    """What nobody could read in a bucket, and had its place taken by what was known."""
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


async def _tensor_address(node: NodeStatus) -> Finding:
    """Can this machine reach that node's address? A refused connection is an answer; silence is a wall."""
    name = f"tensors {node.cluster}/{node.node}"
    remedy = "let peers through its firewall: join with --address and --ports LO-HI, and open that range"
    try:
        async with asyncio.timeout(_connect_s):
            _, writer = await asyncio.open_connection(node.address, 9)
            writer.close()
    except ConnectionRefusedError:
        pass
    except TimeoutError:
        return Finding(name, False, f"{node.address} does not answer within {_connect_s:.0f} s", remedy)
    except OSError as error:
        return Finding(name, False, f"{node.address}: {error.strerror or error}", remedy)
    return Finding(name, True, f"{node.address} answers")
