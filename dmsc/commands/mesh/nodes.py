"""`dmsc nodes`, `cordon`, `drain`, `leave` and `uncordon`: show nodes, and take them out of use and back."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from dmsc.console.command_app import argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import GatewayQuery, JsonOutput
from dmsc.console.options import print_text
from dmsc.console.running import leave as end_command

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from schemas.cluster import Cordon, Slot
    from schemas.gateway_api import Cordons, MeshStatus
    from schemas.registry import PeerLink

COLUMNS = (
    *("node", "cluster", "device", "name", "GiB", "speed", "bits", "labels", "runs", "judged"),
    *("links", "cordoned"),
)
_help = "The name of a node or of its agent, or NODE/SLOT for one slot; see `dmsc nodes`."
PlaceArgument = Annotated[str, argument("NODE[/SLOT]", _help)]
ReasonOption = Annotated[str, option("--reason TEXT", "Why; shown with the cordon.", show_default=False)]


def nodes(
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """List nodes and slots: what each slot can do, which instance runs there, and who cordoned what and why.

    Speed is relative to the reference of the standard stage, about a core of a server. Slots of one class of
    bits compute the same bits. Judged: what the node's agent (MIC) says of the instance in a slot, or of the
    last one. Links: latency and bandwidth to other nodes, as transfers of jobs have measured them; small ones
    show no bandwidth.

    Example: dmsc nodes
    """
    status = mesh.ask(lambda client: client.mesh())
    whole = {cordon.agent: cordon for cordon in status.cordons if cordon.slot is None}
    single = {(cordon.agent, cordon.slot): cordon for cordon in status.cordons}
    links = {record.sid: record.links for record in status.services}
    rows = []
    for node in sorted(status.nodes, key=lambda node: node.sid):
        reach = links_text(links.get(node.sid, ())) or ("not measured" if len(status.nodes) > 1 else "")
        rows.append((node.sid, node.cluster, *[""] * 8, reach, _cordon_text(whole.get(node.sid))))
        rows += [
            (
                f"{node.sid}/{slot.index}",
                node.cluster,
                device_text(slot),
                slot.device_name,
                f"{slot.memory_bytes / (1 << 30):.1f}",
                speed_text(slot),
                slot.bits_class,
                labels_text(slot.labels),
                slot.busy_with or "",
                judged_text(slot),
                "",
                _cordon_text(single.get((node.sid, slot.index))),
            )
            for slot in node.slots
        ]
    here = {node.sid for node in status.nodes}
    rows += [
        (agent, cordon.cluster, "away", *[""] * 8, _cordon_text(cordon))
        for agent, cordon in sorted(whole.items())
        if agent not in here
    ]
    measured = {node.sid: links.get(node.sid, ()) for node in status.nodes}
    document = {"nodes": status.nodes, "cordons": status.cordons, "links": measured}
    mesh.show_table(document, COLUMNS, rows)


def device_text(slot: Slot) -> str:
    """The device of a slot, with the profile of a slice of a GPU: `cuda:0 (MIG 1g.10gb)`."""
    return f"{slot.device} (MIG {slot.mig})" if slot.mig else slot.device


def speed_text(slot: Slot) -> str:
    """The relative speed of a slot, with a mark if it is emulated; empty: not measured."""
    speed = slot.speed.get("stage")
    return "" if speed is None else f"{speed:.2f}{' (emulated)' if slot.emulated else ''}"


def judged_text(slot: Slot) -> str:
    """The judgement of a slot's instance, with the share of its speed that it gives; empty: it is well."""
    return f"{slot.condition} ({slot.performance:.0%})" if slot.performance < 1 else slot.condition


def links_text(links: Iterable[PeerLink]) -> str:
    """A node's measured links: `b-n 0.3 ms 950 MB/s`."""

    def words(link: PeerLink) -> str:
        latency = "" if link.latency_ms is None else f" {link.latency_ms:.2g} ms"
        rate = link.bandwidth_bytes_per_s
        return f"{link.peer}{latency}" + ("" if rate is None else f" {rate / 1e6:.3g} MB/s")

    return ", ".join(words(link) for link in links)


def labels_text(labels: dict[str, str]) -> str:
    """Labels as operators write them."""
    return " ".join(f"{key}={value}" for key, value in sorted(labels.items()))


def cordon(
    place: PlaceArgument,
    reason: ReasonOption = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Place no new instances on a node or slot; instances that run there continue.

    Example: dmsc cordon b-node2/0 --reason 'noisy fan'
    """
    node, slot = parse_place(place)
    _show(mesh, mesh.ask(lambda client: client.cordon(node, slot, reason=reason)))


def uncordon(
    place: PlaceArgument,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Allow new instances on a node or slot again; for a node, on all its slots too.

    Example: dmsc uncordon b-node2
    """
    node, slot = parse_place(place)
    _show(mesh, mesh.ask(lambda client: client.uncordon(node, slot)))


def drain(
    node: Annotated[str, argument("NODE", "The name of a node or of its agent.")],
    reason: ReasonOption = "",
    timeout_s: Annotated[
        float, option("--timeout SECONDS", "How long to wait until the node is empty.", min=0)
    ] = 300.0,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Cordon a node and move its instances to other nodes, one at a time, at step boundaries.

    The command returns once the node is empty. After --timeout the command fails, but the drain continues;
    `dmsc uncordon` ends it.

    Example: dmsc drain b-node2 --timeout 60
    """
    name, slot = parse_place(node)
    if slot is not None:
        raise bad_input(f"{node}: whole nodes are drained; for one slot: dmsc cordon {node}")
    final, remaining = mesh.ask(lambda client: _drain(client, name, reason, timeout_s))
    mesh.show(final, *(() if remaining else (f"{final.agent} is empty and cordoned",)))
    if remaining:
        left = _progress(final) or remaining
        print_text(f"{final.agent} is not empty after {timeout_s:g} s: {left}", error=True)
        from dmsc.console.exit_codes import ExitCode

        end_command(ExitCode.FAILED)


def leave(
    node: Annotated[str, argument("NODE", "The name of a node or of its agent.")],
    deadline: Annotated[
        str,
        option("--deadline TIME", "How long the machine stays: 30s, 500ms, 2min.", show_default=True),
    ] = "30s",
    reason: ReasonOption = "",
    source: Annotated[
        str,
        option("--source", "Who says that the machine goes away: person, cloud, taint or other."),
    ] = "person",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Have a node leave by a deadline: its instances move elsewhere, then its agent ends.

    No step is lost: instances that are alone in their stage are looked after first, and where nothing fits
    elsewhere a checkpoint of that step is written. The command returns once the node has left.

    Example: dmsc leave b-node2 --deadline 2min --source cloud --reason 'spot interruption'
    """
    name, slot = parse_place(node)
    if slot is not None:
        raise bad_input(f"{node}: whole nodes leave; for one slot: dmsc cordon {node}")
    deadline_s = parse_duration(deadline)
    if source not in ("person", "cloud", "taint", "other"):
        raise bad_input(f"--source {source}: person, cloud, taint or other")
    final, took_s, gone = mesh.ask(lambda client: _leave(client, name, deadline_s, reason, source))
    mesh.show(final, *((f"{final.agent} has left after {took_s:.1f} s",) if gone else ()))
    if not gone:
        print_text(
            f"{final.agent} has not left after {took_s:.0f} s: {_progress(final) or 'it does not answer'}",
            error=True,
        )
        from dmsc.console.exit_codes import ExitCode

        end_command(ExitCode.FAILED)


def parse_duration(text: str) -> float:
    """Parse a time such as `30s`, `500ms`, `2min`; returns seconds. Raises `BadInput`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min)\s*", text)
    if match is None:
        raise bad_input(f"--deadline {text}: write it as 30s, 500ms or 2min")
    return float(match[1]) * {"ms": 0.001, "s": 1.0, "min": 60.0}[match[2]]


async def _leave(
    client: AsyncClient,
    node: str,
    deadline_s: float,
    reason: str,
    source: Any,
    poll_s: float = 0.2,
    after_s: float = 10.0,
) -> tuple[Cordons, float, bool]:
    """Give notice and wait. Returns the node's cordons, how long that took, and whether the node has left."""
    from schemas.gateway_api import Cordons

    answer, began = (
        await client.leave(node, deadline_s=deadline_s, source=source, reason=reason),
        time.monotonic(),
    )
    incarnations = {cordon.leaves.incarnation for cordon in answer.cordons if cordon.leaves is not None}
    while True:
        mesh = await client.mesh()
        here = [status for status in mesh.nodes if status.sid == answer.agent]
        took_s = time.monotonic() - began
        cordons = tuple(cordon for cordon in mesh.cordons if cordon.agent == answer.agent)
        gone = not here or here[0].incarnation not in incarnations
        if gone or took_s > deadline_s + after_s:  # an agent that hangs is not there, but still registered
            return Cordons(agent=answer.agent, cordons=cordons), took_s, gone
        await asyncio.sleep(poll_s)


def _progress(cordons: Cordons) -> str:
    return next((cordon.progress for cordon in cordons.cordons if cordon.slot is None), "")


def parse_place(text: str) -> tuple[str, int | None]:
    """Split `NODE` or `NODE/SLOT` into the node and the slot. Raises `BadInput`."""
    node, slash, slot = text.partition("/")
    if not slash:
        return node, None
    if not slot.isdigit():
        raise bad_input(f"{text}: the slot must be a number, as in {node}/0")
    return node, int(slot)


async def _drain(
    client: AsyncClient, node: str, reason: str, timeout_s: float, poll_s: float = 0.5
) -> tuple[Cordons, str]:
    """Request the drain and wait. Returns the node's cordons and the instances left there ('' if none)."""
    from schemas.errors import DmscError
    from schemas.gateway_api import Cordons

    answer = await client.drain(node, reason=reason)
    deadline = time.monotonic() + timeout_s
    while True:
        mesh = await client.mesh()
        cordons = tuple(cordon for cordon in mesh.cordons if cordon.agent == answer.agent)
        whole = next((cordon for cordon in cordons if cordon.slot is None and cordon.draining), None)
        if whole is None:
            raise DmscError(f"the drain of {answer.agent} was ended by someone else")
        remaining = _remaining(mesh, whole)
        if not remaining or time.monotonic() >= deadline:
            return Cordons(agent=answer.agent, cordons=cordons), remaining
        await asyncio.sleep(poll_s)


def _remaining(mesh: MeshStatus, cordon: Cordon) -> str:
    """The instances that are still on the node, according to the node itself and to the registry."""
    from schemas.envelope import EntityKind
    from schemas.registry import InstanceState

    over = (InstanceState.FAULTED, InstanceState.GONE)
    remaining = {
        record.sid
        for record in mesh.services
        if record.kind is EntityKind.INSTANCE
        and (record.endpoint.cluster, record.endpoint.node) == (cordon.cluster, cordon.node)
        and record.state not in over
    }
    remaining |= {
        slot.busy_with
        for node in mesh.nodes
        if node.sid == cordon.agent
        for slot in node.slots
        if slot.busy_with
    }
    return ", ".join(sorted(remaining))


def _cordon_text(cordon: Cordon | None) -> str:
    if cordon is None:
        return ""
    doing = "draining" if cordon.leaves is None else "leaving"
    drain = f" ({doing}: {cordon.progress or 'begun'})" if cordon.draining else ""
    return f"{cordon.reason}, by {cordon.by}{drain}"


def _show(output: JsonOutput, answer: Cordons) -> None:
    places = [
        f"{answer.agent if cordon.slot is None else f'{answer.agent}/{cordon.slot}'}: cordoned:"
        f" {_cordon_text(cordon)}"
        for cordon in answer.cordons
    ]
    output.show(answer, *(places or [f"{answer.agent}: open"]))
