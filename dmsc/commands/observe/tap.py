"""`dmsc tap`: shows the messages on the bus, decoded."""

from __future__ import annotations

from dataclasses import replace

from dmsc.console.option_groups import GatewayQuery
from dmsc.console.options import BusOption, BusTokenOption
from dmsc.console.running import run_async
from dmsc.tapping.request import TapRequest


def tap(
    request: TapRequest = TapRequest(),
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Show messages of the mesh as they travel, each decoded by its schema, until Ctrl-C.

    The mesh never waits for a tap. Messages that arrive too fast are dropped here, and their number is shown
    at the end. Tokens, passwords and credentials are shown as ***. If you use your own token, a gateway
    decides what you may see.

    Example: dmsc tap 'signal.>' --filter sender.name=gateway-a --record signals.dmsctap
    """
    from dmsc.process.interrupts import interrupts
    from dmsc.state.settings import find_bus
    from dmsc.tapping import session
    from dmsc.tapping.printing import Printer
    from dmsc.tapping.role import given_token

    printer = Printer(raw=request.raw, json=mesh.json, ids=request.ids)
    if request.read is not None:
        session.read(request.read, request, printer)
        return
    address = find_bus(bus, bus_token, mesh.state)
    if address.token is None:  # the bus takes a user's own token, too, and permits what the role may
        address = replace(address, token=given_token(mesh.token))

    async def listen() -> None:
        with interrupts():  # a recording is closed in order, whichever signal ends the command
            await session.listen(address, request, printer, mesh)

    run_async(listen())
