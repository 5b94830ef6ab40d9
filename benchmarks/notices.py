"""Whether notices cost steps: node agents that get SIGTERM while a job trains on them, one after the other.

    python benchmarks/notices.py [--notices 100] [--only sole,spread] [--seed 1]

Half of the notices hit agents with an instance that is alone in its stage (`sole`: two stages of one
replica), half such as have none (`spread`: two stages of two replicas). Each section has a mesh of three
clusters, real processes and real signals through `dmsc.chaos`, and compares each job with an undisturbed
one. The jobs write no checkpoints of their own, so that a loss costs all steps since the beginning. Compute
is padded (`workers/models/padded.py`), so that devices are independent of the cores that they share here.
Smaller:

    python benchmarks/notices.py --notices 8

A figure that misses its bar is marked MISSED, and the exit code is 0; JSON goes to `--out` after each figure.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.fault_figures import FaultSheet, Plan
from benchmarks.fault_runs import add_only, run_and_exit
from benchmarks.fault_sections import job, sound
from benchmarks.harness.command import command, say
from benchmarks.harness.meshes import open_mesh
from dmsc.chaos.plan import Every, FaultKind
from dmsc.chaos.report import ChaosReport, quantile
from dmsc.chaos.run import ChaosOptions, open_chaos
from schemas.job import JobSpec

CLUSTERS = ("a", "b", "c")
EVERY_STEPS = 12
"""Longer than an agent takes to be there again, so that its slots are free for the next one's instances."""
NOTICES_PER_JOB = 10
STEPS = EVERY_STEPS * (NOTICES_PER_JOB + 2)
NO_CHECKPOINTS = ("training.checkpoint_every=0", "training.validation_microbatches=0")


async def sole(options: argparse.Namespace, sheet: FaultSheet) -> None:
    """Agents with an instance that is alone in its stage: another one takes its state first."""
    await _noticed("sole", options, sheet, job(STEPS, replicas=1, settings=NO_CHECKPOINTS))


async def spread(options: argparse.Namespace, sheet: FaultSheet) -> None:
    """Agents whose instances all have a replica elsewhere, which goes on."""
    await _noticed("spread", options, sheet, job(STEPS, replicas=2, settings=NO_CHECKPOINTS))


SECTIONS = {"sole": sole, "spread": spread}


async def _noticed(section: str, options: argparse.Namespace, sheet: FaultSheet, spec: JobSpec) -> None:
    wanted, reports = (options.notices + 1) // 2, list[ChaosReport]()
    async with open_mesh(*CLUSTERS, tell=say) as mesh, open_chaos(mesh.running.folder, say) as chaos:
        clean = await chaos.clean_run(spec)
        while (left := wanted - sum(_counted(section, report) for report in reports)) > 0:
            plan = ChaosOptions(
                every=Every(steps=EVERY_STEPS),
                seed=options.seed + len(reports),
                kinds=(FaultKind.NOTICE,),
                faults=min(left, NOTICES_PER_JOB),
            )
            reports.append(await chaos.disturbed_run(spec, plan, clean))
            if not _counted(section, reports[-1]):
                say(f"no notice of {reports[-1].job} was of section {section}")
                break
    _tell(section, reports, sheet)


def _counted(section: str, report: ChaosReport) -> int:
    """How many notices were of a section's kind: in `spread`, both replicas of a stage may meet on one."""
    return sum(fault.fired and bool(fault.sole) is (section == "sole") for fault in report.faults)


def _tell(section: str, reports: list[ChaosReport], sheet: FaultSheet) -> None:
    fired = sum(fault.fired for report in reports for fault in report.faults)
    plan = Plan(section=section, seed=reports[0].seed, fired=fired)
    alone = sum(fault.fired and bool(fault.sole) for report in reports for fault in report.faults)
    missed = [fault.missed for report in reports for fault in report.faults if fault.failed]
    sheet.add(
        plan.figure("of a sole replica", alone),
        plan.at_most("steps computed again", sum(report.undone for report in reports), "", 0),
        plan.at_most("instances lost", sum(report.recoveries for report in reports), "", 0),
        plan.at_most("agents that did not leave", len(missed), "", 0, "; ".join(missed)),
    )
    sound(sheet, section, *reports)
    stalls = [stall.stall_s for report in reports for stall in report.stalls]
    if stalls:
        clean = f"a step takes {reports[0].clean.step_s:.2f} s"
        sheet.add(
            plan.figure("stall of the step, p50", quantile(stalls, 0.5), "s", clean),
            plan.figure("stall of the step, worst", max(stalls), "s"),
        )


def main() -> None:
    """Measures and prints."""
    parser = command(
        __doc__,
        as_json=False,
        notices=(100, "in all, half of them in each section"),
        seed=(1, "of the first job's plan; each next one has the next", 0),
        limit=(30.0, "minutes for a section"),
        out=(Path("runs/bench-notices.json"), "the file for the figures"),
    )
    add_only(parser, SECTIONS)
    run_and_exit(parser.parse_args(), SECTIONS)


if __name__ == "__main__":
    main()
