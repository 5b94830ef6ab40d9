"""`dmsc nodes`, `cordon`, `drain` and `uncordon`: which nodes take instances, and taking one out of use."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from dmsc.console.options import (
    GatewayOption,
    JsonOption,
    StateOption,
    TokenOption,
    print_json,
    print_table,
    print_text,
)
from dmsc.console.running import ask_gateway, leave

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from schemas.cluster import Cordon
    from schemas.door import Cordons, MeshStatus

_look_every_s = 0.5
_help = "A node's agent or name, or NODE/SLOT for one slot; see `dmsc nodes`."
PlaceArgument = Annotated[str, typer.Argument(metavar="NODE[/SLOT]", help=_help, show_default=False)]
ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Why; shown with it.", show_default=False)
]


def nodes(
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """List the nodes with their slots: what runs there, and what is cordoned, why and by whom.

    Example: dmsc nodes
    """
    mesh: MeshStatus = ask_gateway(gateway, token, state, lambda client: client.mesh())
    if json:
        print_json({"nodes": mesh.nodes, "cordons": mesh.cordons})
        return
    whole = {cordon.agent: cordon for cordon in mesh.cordons if cordon.slot is None}
    single = {(cordon.agent, cordon.slot): cordon for cordon in mesh.cordons}
    rows = []
    for node in sorted(mesh.nodes, key=lambda each: each.sid):
        rows.append((node.sid, node.cluster, "", "", "", _cordon_text(whole.get(node.sid))))
        rows += [
            (
                f"{node.sid}/{slot.index}",
                node.cluster,
                slot.device,
                slot.device_name,
                slot.busy_with or "",
                _cordon_text(single.get((node.sid, slot.index))),
            )
            for slot in node.slots
        ]
    here = {node.sid for node in mesh.nodes}
    rows += [
        (agent, cordon.cluster, "away", "", "", _cordon_text(cordon))
        for agent, cordon in sorted(whole.items())
        if agent not in here
    ]
    print_table(("node", "cluster", "device", "name", "runs", "cordoned"), rows)


def cordon(
    place: PlaceArgument,
    reason: ReasonOption = "",
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Let no new instances go to a node or slot; what runs there goes on.

    Example: dmsc cordon b-node2/0 --reason 'noisy fan'
    """
    node, slot = parse_place(place)
    answer = ask_gateway(gateway, token, state, lambda client: client.cordon(node, slot, reason=reason))
    _show(answer, json)


def uncordon(
    place: PlaceArgument,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Let new instances go to a node or slot again; of a node: also to all its slots.

    Example: dmsc uncordon b-node2
    """
    node, slot = parse_place(place)
    _show(ask_gateway(gateway, token, state, lambda client: client.uncordon(node, slot)), json)


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="A node's agent or name.", show_default=False)],
    reason: ReasonOption = "",
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=0, help="How long to wait until it is empty."),
    ] = 300.0,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Cordon a node and move what runs there elsewhere, one instance at a time, at step boundaries.

    Returns once the node is empty. After --timeout it goes on by itself; `dmsc uncordon` ends it.

    Example: dmsc drain b-node2 --timeout 60
    """
    name, slot = parse_place(node)
    if slot is not None:
        from schemas.errors import BadInput

        raise BadInput(f"{node}: whole nodes are drained; for one slot: dmsc cordon {node}")
    final, left = ask_gateway(gateway, token, state, lambda client: _drain(client, name, reason, timeout_s))
    if json:
        print_json(final)
    elif not left:
        print_text(f"{final.agent} is empty and cordoned")
    if left:
        progress = next((one.progress for one in final.cordons if one.slot is None), "")
        print_text(f"{final.agent} is not empty after {timeout_s:g} s: {progress or left}", error=True)
        from dmsc.console.exit_codes import ExitCode

        leave(ExitCode.FAILED)


def parse_place(text: str) -> tuple[str, int | None]:
    """`NODE` or `NODE/SLOT`. Raises `BadInput`."""
    node, slash, slot = text.partition("/")
    if not slash:
        return node, None
    if not slot.isdigit():
        from schemas.errors import BadInput

        raise BadInput(f"{text}: the slot must be a number, as in {node}/0")
    return node, int(slot)


async def _drain(client: AsyncClient, node: str, reason: str, timeout_s: float) -> tuple[Cordons, str]:
    """Asks and waits. Returns the node's cordons and what is left there, '' if nothing."""
    from schemas.door import Cordons
    from schemas.errors import DmscError

    asked = await client.drain(node, reason=reason)
    deadline = time.monotonic() + timeout_s
    while True:
        mesh = await client.mesh()
        mine = tuple(cordon for cordon in mesh.cordons if cordon.agent == asked.agent)
        whole = next((cordon for cordon in mine if cordon.slot is None and cordon.draining), None)
        if whole is None:
            raise DmscError(f"the drain of {asked.agent} was ended by someone else")
        left = _left(mesh, whole)
        if not left or time.monotonic() >= deadline:
            return Cordons(agent=asked.agent, cordons=mine), left
        await asyncio.sleep(_look_every_s)


def _left(mesh: MeshStatus, cordon: Cordon) -> str:
    """The instances that are still on the node, by what it says itself and by the registry."""
    from schemas.envelope import EntityKind
    from schemas.registry import InstanceState

    over = (InstanceState.FAULTED, InstanceState.GONE)
    left = {
        record.sid
        for record in mesh.services
        if record.kind is EntityKind.INSTANCE
        and (record.endpoint.cluster, record.endpoint.node) == (cordon.cluster, cordon.node)
        and record.state not in over
    }
    left |= {
        slot.busy_with
        for node in mesh.nodes
        if node.sid == cordon.agent
        for slot in node.slots
        if slot.busy_with
    }
    return ", ".join(sorted(left))


def _cordon_text(cordon: Cordon | None) -> str:
    if cordon is None:
        return ""
    drain = f" (draining: {cordon.progress or 'begun'})" if cordon.draining else ""
    return f"{cordon.reason}, by {cordon.by}{drain}"


def _show(answer: Cordons, json: bool) -> None:
    if json:
        print_json(answer)
        return
    if not answer.cordons:
        print_text(f"{answer.agent}: open")
    for cordon in answer.cordons:
        place = answer.agent if cordon.slot is None else f"{answer.agent}/{cordon.slot}"
        print_text(f"{place}: cordoned: {_cordon_text(cordon)}")
