"""`dmsc sync`: makes the mesh's jobs agree with a folder of job files, as Git has it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.exit_codes import ExitCode, bad_input
from dmsc.console.option_groups import GatewayQuery
from dmsc.console.options import print_text
from dmsc.console.running import leave, run_async

if TYPE_CHECKING:
    from dmsc.syncing.job_folder import FolderJob


def sync(
    folder: Annotated[Path, argument("DIR", "A folder of job files (YAML or JSON).")],
    name: Annotated[
        str | None, option("--name NAME", "What the folder is called in its jobs' names (the folder's name).")
    ] = None,
    prune: Annotated[bool, option("--prune", "Also cancel this folder's jobs whose file is gone.")] = False,
    dry: Annotated[bool, option("--dry-run", "Only list what would be submitted and cancelled.")] = False,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Submit the jobs of a folder's files that are new or have changed, and cancel what they replace.

    All files are checked first. Again is no change: a job counts by its name and the digest of its file and
    its code. To roll back, put the old file back and sync again. Only jobs that this command submitted, for
    this user and folder, are ever cancelled.

    Example: dmsc sync jobs/ --prune
    """
    from dmsc.syncing.job_folder import read_folder
    from schemas.base import is_token

    called = name or folder.resolve().name
    if not is_token(called) or "--" in called:
        raise bad_input(f"--name {called!r}: it begins its jobs' names: give letters, digits, _ and single -")
    jobs = read_folder(folder, called)
    leave(run_async(_sync(jobs, called, prune, dry, mesh)))


async def _sync(
    jobs: tuple[FolderJob, ...], folder: str, prune: bool, dry: bool, mesh: GatewayQuery
) -> ExitCode:
    from dmsc.syncing.driver import SyncDriver

    lines: list[str] = []
    async with mesh.client(timeout_s=20.0) as client:
        driver = SyncDriver(client, folder, lines.append)
        if dry:
            todo = await driver.plan(jobs, prune=prune)
            lines += [f"would submit {each.job.name}: {each.reason}" for each in todo.submit]
            lines += [f"would cancel {each.job} {each.name}: {each.reason}" for each in todo.cancel]
            refused = []
        else:
            refused = await driver.run(jobs, prune=prune)
    mesh.show({"folder": folder, "done": lines, "refused": refused}, *lines)
    for line in refused:
        print_text(line, error=True)
    return ExitCode.FAILED if refused else ExitCode.OK
