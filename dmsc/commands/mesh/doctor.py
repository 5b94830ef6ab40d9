"""`dmsc doctor`: finds problems of this machine and its mesh, and says what to do about each."""

from __future__ import annotations

from dmsc.console.option_groups import BusQuery
from dmsc.console.options import print_json, print_text
from dmsc.console.running import leave, run_async


def doctor(
    bus: BusQuery = BusQuery(),
) -> None:
    """Check this machine and its mesh: torch, disk, NATS server, tokens, clocks, tensor ports.

    The exit code is 1 if a check fails. Reachability is tested from this machine, so run it on each machine.

    Example: dmsc doctor
    """
    from dataclasses import asdict

    from dmsc.console.exit_codes import ExitCode
    from dmsc.launch.checks import examine
    from dmsc.state.state_folder import StateFolder

    checks = run_async(examine(StateFolder(bus.state), bus.bus, bus.bus_token))
    if bus.json:
        print_json([asdict(check) for check in checks])
    else:
        for check in checks:
            print_text(f"{'✓' if check.ok else '✗'} {check.name}: {check.text}")
            if not check.ok and check.remedy:
                print_text(f"    → {check.remedy}")
    leave(ExitCode.OK if all(check.ok for check in checks) else ExitCode.FAILED)
