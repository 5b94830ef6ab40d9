"""Whether accounts close, and what they cost: mixed jobs under kills on a real mesh.

    python benchmarks/accounts.py [--minutes 4] [--every 6] [--seed 0]

An hour in compressed time: jobs of several shapes beside one that `dmsc chaos` hits, with a kill every few
seconds of instances, of the control plane (the accountant is in it) and of the bus's server. Bars: the
accounts close within 1 %; what was offered is what the nodes' reports show from outside, by the time at which
they were sent, within 1 %; recomputed microbatches are those that the chaos report counts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.fault_figures import FaultSheet, Plan
from benchmarks.fault_sections import job as job_of
from benchmarks.harness.command import command, say
from benchmarks.harness.meshes import open_mesh
from bus import subjects
from bus.connection import Bus
from bus.logs import configure_logging
from dmsc.chaos.plan import FaultKind, parse_every
from dmsc.chaos.report import ChaosReport
from dmsc.chaos.run import Chaos, ChaosOptions, open_chaos
from dmsc.chaos.watch import work_of
from entities.accountant.ledger import JobClaims
from schemas.accounts import AccountStatement, SlotReport
from schemas.job import ENDED
from schemas.step import MicrobatchClaim

SLOTS = 4
SECTION = "accounts"
COUNTED_S = 15.0
"""After the end, until all that was told is counted."""


async def offered_outside(bus: Bus) -> float:
    """Device-seconds for which nodes were seen to offer slots: from each agent's first report to its last."""
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    slots: dict[tuple[str, str], int] = {}
    async for record in bus.history(subjects.SLOT_REPORT):
        report = record.message
        assert isinstance(report, SlotReport)
        key = (record.envelope.sender.name, report.incarnation)
        seen[key].append(record.envelope.sent_at)
        slots[key] = len({slot.slot for slot in report.slots})
    return sum(slots[key] * (times[-1] - times[0]) for key, times in seen.items())


async def mixed(chaos: Chaos, options: argparse.Namespace) -> ChaosReport:
    """The disturbed job with others beside it, which end with it."""
    steps = max(20, int(60 * options.minutes / 0.4))
    others = [
        await chaos.client.submit(job_of(steps, stages=2, replicas=1)),
        await chaos.client.submit(job_of(steps // 8, stages=1, replicas=1)),
        await chaos.client.submit(job_of(steps // 8, stages=1, replicas=1)),
    ]
    kinds = (FaultKind.INSTANCE, FaultKind.INSTANCE, FaultKind.ORCHESTRATOR, FaultKind.SERVER)
    plan = ChaosOptions(every=parse_every(f"{options.every:g}s"), seed=options.seed, kinds=kinds)
    try:
        async with asyncio.timeout(60 * options.minutes * 6):
            return await chaos.disturbed_run(job_of(steps // 2), plan, None)
    finally:
        for record in others:
            present = await chaos.client.job(record.job)
            if present.state not in ENDED:
                await chaos.client.cancel(record.job)


def judge(
    sheet: FaultSheet, report: ChaosReport, made: AccountStatement, outside_s: float, excess: int
) -> None:
    """The figures beside their bars."""
    fired = sum(fault.fired for fault in report.faults)
    plan = Plan(section=SECTION, seed=report.seed, fired=fired)
    hours = made.offered_s / 3600
    open_share = abs(made.unaccounted_s) / made.offered_s if made.offered_s else 1.0
    apart = abs(made.offered_s - outside_s) / outside_s if outside_s else 1.0
    (line,) = [line for line in made.lines if line.name == report.job]
    kinds = f"busy {line.busy_s:.0f} s, waiting {line.waiting_s:.0f} s, recomputed {line.recomputed_s:.1f} s"
    sheet.add(
        plan.at_most("in no account", 100 * open_share, "%", 1, f"{hours:.3f} device-hours offered"),
        plan.at_most("offered, beside what was seen", 100 * apart, "%", 1, f"{outside_s:.0f} s seen"),
        plan.equal(
            "recomputed as the claims show",
            line.recomputed_units == excess,
            f"{line.recomputed_units} beside {excess}; in struck steps {report.waste.recomputed}; {kinds}",
        ),
        plan.at_least("lines", len(made.lines), "", 4),
    )


async def cost_of_claims(bus: Bus) -> tuple[float, int]:
    """CPU seconds of reading and counting all claims anew, and how many there are."""
    began, read, claims = time.process_time(), 0, JobClaims()
    async for record in bus.history(subjects.STEP_CLAIM):
        assert isinstance(record.message, MicrobatchClaim)
        claims.take(record.message, record.envelope.sent_at, ("", ""), time.time())
        read += 1
    return time.process_time() - began, read


async def measure(options: argparse.Namespace) -> FaultSheet:
    """Runs the mesh and fills the sheet."""
    sheet, began = FaultSheet(options.out), time.time()
    async with (
        open_mesh(slots=SLOTS, tell=say) as mesh,
        open_chaos(mesh.running.folder, say) as chaos,
    ):
        report = await mixed(chaos, options)
        await asyncio.sleep(COUNTED_S)
        made = await chaos.client.accounts("job", since=began - 900, until=time.time() + 900)
        work, spec = await work_of(mesh.bus, report.job), (await chaos.client.job(report.job)).spec
        needed = spec.training.microbatches * spec.parallel.stages
        excess = sum(max(0, units - needed) for units in work.units.values())
        judge(sheet, report, made, await offered_outside(mesh.bus), excess)
        cpu_s, read = await cost_of_claims(mesh.bus)
        plan = Plan(section=SECTION)
        sheet.add(plan.figure("reading a claim", 1e6 * cpu_s / max(1, read), "µs CPU", f"{read} claims"))
        for problem in report.problems():
            say(problem)
    return sheet


def main() -> None:
    """Measures and prints."""
    parser = command(
        __doc__,
        as_json=False,
        minutes=(4.0, "about how long the disturbed job runs"),
        every=(6.0, "seconds between two kills"),
        seed=(0, "of the plan of kills"),
        out=(Path("runs/bench-accounts.json"), "the file for the figures"),
    )
    options = parser.parse_args()
    configure_logging(level="error")
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
