"""`dmsc sweep`: runs one job file with several values of some of its keys."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.exit_codes import ExitCode
from dmsc.console.option_groups import GatewayOptions, GatewayQuery
from dmsc.console.options import print_table, print_text
from dmsc.console.running import leave, run_async

if TYPE_CHECKING:
    from dmsc.sweeps.results import SweepResult
    from dmsc.sweeps.sweep_file import Sweep
    from dmsc.sweeps.trials import SweepTrial


def sweep(
    file: Annotated[Path, argument("FILE.yaml", "The sweep file (docs/tracking.md).")],
    set_: Annotated[
        list[str] | None,
        option("--set KEY=VALUE", "Override a key of the base job, e.g. training.steps=200; repeatable."),
    ] = None,
    name: Annotated[str | None, option("--name NAME", "The sweep's name (the file's).")] = None,
    resume: Annotated[
        bool, option("--resume", "Go on with this sweep's jobs after the command ended.")
    ] = False,
    cancel: Annotated[bool, option("--cancel", "Cancel this sweep's jobs that have not ended.")] = False,
    dry: Annotated[bool, option("--dry-run", "Only list the trials.")] = False,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Run a sweep over a job file's keys (grid, random or successive halving), and print the best job file.

    All files are checked first. The trials are jobs in the mesh's queue. Ctrl-C ends only this command: the
    jobs that run go on, and `--resume` continues the sweep.

    Example: dmsc sweep examples/sweep.yaml
    """
    from dmsc.run_history.presentation import spec_yaml
    from dmsc.sweeps.results import result_table
    from dmsc.sweeps.sweep_file import load_sweep
    from dmsc.sweeps.trials import trials_of

    chosen = load_sweep(file, set_ or (), name)
    trials = trials_of(chosen)
    if dry:
        rows = [(str(trial.number), trial.spec.name, *map(str, trial.values.values())) for trial in trials]
        mesh.show_table([trial.values for trial in trials], ("trial", "name", *trials[0].values), rows)
        return
    if cancel:
        count = run_async(_cancel(chosen, trials, mesh))
        mesh.show({"sweep": chosen.name, "cancelled": count}, f"{chosen.name}: {count} jobs are cancelled")
        return
    result = run_async(_run(chosen, trials, mesh, resume=resume))
    if mesh.json:
        best = None if result.best is None else trials[result.best].spec
        mesh.show({**result.model_dump(mode="json"), "best_spec": best})
    else:
        print_table(*result_table(result), title=f"sweep {chosen.name}, the best first")
        if result.best is None:
            print_text("no trial reported the objective", error=True)
        else:
            print_text(f"# trial {result.best}\n{spec_yaml(trials[result.best].spec)}")
    if result.best is None:
        leave(ExitCode.FAILED)


async def _run(
    chosen: Sweep, trials: tuple[SweepTrial, ...], mesh: GatewayOptions, *, resume: bool
) -> SweepResult:
    from dmsc.process.interrupts import interrupts
    from dmsc.sweeps.driver import SweepDriver

    with interrupts():
        async with mesh.client(timeout_s=20.0) as client:
            driver = SweepDriver(client, chosen, trials, lambda line: print_text(line, error=True))
            try:
                return await driver.run(resume=resume)
            except asyncio.CancelledError:
                lines = "the jobs that run go on; go on with the sweep: --resume; end its jobs: --cancel"
                print_text(lines, error=True)
                raise


async def _cancel(chosen: Sweep, trials: tuple[SweepTrial, ...], mesh: GatewayOptions) -> int:
    from dmsc.sweeps.driver import SweepDriver

    async with mesh.client(timeout_s=20.0) as client:
        return await SweepDriver(client, chosen, trials, lambda line: None).cancel()
