"""`dmsc doctor`: what is in the way, and what to do about it."""

from __future__ import annotations

from dmsc.console.options import BusOption, BusTokenOption, JsonOption, StateOption, print_json, print_text
from dmsc.console.running import leave, run_async


def doctor(
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Check this machine and the mesh it sees: torch, disk, server, tokens, clocks, tensor ports.

    Exit code 1 if something is wrong. Reachability is seen from here: run it on each machine.

    Example: dmsc doctor
    """
    from dataclasses import asdict

    from dmsc.console.exit_codes import ExitCode
    from dmsc.launch.checks import examine
    from dmsc.state.state_folder import StateFolder, default_state

    found = run_async(examine(StateFolder(state or default_state()), bus, bus_token))
    if json:
        print_json([asdict(each) for each in found])
    else:
        for each in found:
            print_text(f"{'✓' if each.ok else '✗'} {each.name}: {each.text}")
            if not each.ok and each.remedy:
                print_text(f"    → {each.remedy}")
    leave(ExitCode.OK if all(each.ok for each in found) else ExitCode.FAILED)
