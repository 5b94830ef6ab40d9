"""`dmsc batch`: the requests of a file, answered in the background into a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.exit_codes import ExitCode, bad_input
from dmsc.console.option_groups import GatewayQuery
from dmsc.console.running import leave

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from schemas.services.batches import OpenaiBatch

ENDPOINTS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "predict": "/v1/predict",
    "embeddings": "/v1/embeddings",
}
FILES = "files"
FLEETING = "deleted once fetched"
"""Of a batch's metadata: its files at the mesh are this command's own, and go with the answers' arrival."""


def batch(
    source: Annotated[
        str | None,
        argument("[FILE|ID]", "A request in each line; or bus://datasets/NAME, or a batch's id."),
    ] = None,
    service: Annotated[
        str | None, option("--service NAME", "Answers lines that name no model; also NAME@VERSION.")
    ] = None,
    endpoint: Annotated[
        str, option("--endpoint KIND", "completions, chat, predict or embeddings.")
    ] = "completions",
    out: Annotated[
        Path | None,
        option("--out FILE", "Where the answers go; errors go beside it."),
    ] = None,
    cancel: Annotated[bool, option("--cancel", "Ends the batch; what is answered is fetched.")] = False,
    detach: Annotated[bool, option("--detach", "Prints the batch's id, and waits for nothing.")] = False,
    keep_files: Annotated[
        bool, option("--keep-files", "Requests and answers also stay at the mesh, in your quota.")
    ] = False,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Have all requests of a file answered, in the file's order; without a file, list your batches.

    A line is a request as OpenAI's batches have it, or its body alone, such as {"prompt": "def parse("}.
    Whatever dies meanwhile, each request has one answer. Interrupted, it goes on: dmsc batch ID fetches it.
    Once the answers are fetched, what this command has stored at the mesh is deleted. The exit code is 1 if
    the batch has failed or expired.

    Example: dmsc batch requests.jsonl --service stdlib --out answers.jsonl
    """
    if endpoint not in ENDPOINTS:
        raise bad_input(f"--endpoint {endpoint}: there are {', '.join(ENDPOINTS)}")
    if source is None:
        _list(mesh)
        return
    is_id = source.startswith("batch_")
    if cancel and not is_id:
        raise bad_input("--cancel ends a batch by its id, which dmsc batch lists")
    if not is_id and not source.startswith("bus://") and not Path(source).is_file():
        raise bad_input(f"{source}: there is no such file, and no batch has that id")

    async def run(client: AsyncClient) -> OpenaiBatch:
        found = await _begun(client, source, service, ENDPOINTS[endpoint], keep_files)
        if cancel:
            found = await client.cancel_batch(found.id)
        if detach:
            return found
        if not is_id:
            print(f"{found.id}: {found.request_counts.total} requests", file=sys.stderr)
        with _progress_line() as show:
            found = await client.wait_for_batch(found.id, progress=show)
        await _fetch(client, found, out or Path(f"{found.id if is_id else Path(source).stem}.out.jsonl"))
        if not keep_files and (found.metadata or {}).get(FILES) == FLEETING:
            await _delete_files(client, found)
        return found

    found = mesh.ask(run)
    counts = found.request_counts
    lines = [
        f"{found.id}: {found.status}, {counts.completed} of {counts.total} answered, {counts.failed} failed"
    ]
    if found.errors is not None:
        lines += [each.message for each in found.errors.data]
    mesh.show(found, "\n".join(lines))
    leave(ExitCode.FAILED if found.status in ("failed", "expired") else ExitCode.OK)


async def _begun(
    client: AsyncClient, source: str, service: str | None, endpoint: str, keep_files: bool
) -> OpenaiBatch:
    if source.startswith("batch_"):
        return await client.batch(source)
    metadata = None if keep_files else {FILES: FLEETING}
    if source.startswith("bus://"):
        return await client.create_batch(source, endpoint=endpoint, model=service or "", metadata=metadata)
    from schemas.errors import DmscError

    file = await client.upload_file(Path(source))
    try:
        return await client.create_batch(file.id, endpoint=endpoint, model=service or "", metadata=metadata)
    except DmscError:
        if not keep_files:
            with suppress(DmscError):  # why there is no batch matters more
                await client.delete_file(file.id)
        raise


@contextmanager
def _progress_line() -> Iterator[Callable[[OpenaiBatch], None]]:
    """What shows how far a batch is, in one line of a terminal, which ends with the block."""
    is_open = False

    def show(batch: OpenaiBatch) -> None:
        nonlocal is_open
        if sys.stderr.isatty():
            counts = batch.request_counts
            done = counts.completed + counts.failed
            print(f"\r{batch.status}: {done} of {counts.total}   ", end="", file=sys.stderr, flush=True)
            is_open = True

    try:
        yield show
    finally:
        if is_open:
            print(file=sys.stderr, flush=True)


async def _delete_files(client: AsyncClient, found: OpenaiBatch) -> None:
    """Removes a batch's files from the mesh, whose answers are on this disk."""
    from schemas.errors import DmscError, NotFound

    files = (found.input_file_id, found.output_file_id, found.error_file_id)
    for file in files:
        if file is None or file.startswith("bus://"):
            continue
        try:
            await client.delete_file(file)
        except NotFound:  # somebody was quicker
            continue
        except DmscError as error:  # the answers are there all the same
            print(f"{file} stays at the mesh: {error.text}", file=sys.stderr)


async def _fetch(client: AsyncClient, found: OpenaiBatch, out: Path) -> None:
    if found.output_file_id is not None:
        await client.download_file(found.output_file_id, out)
        print(f"answers: {out}", file=sys.stderr)
    if found.error_file_id is not None:
        errors = out.with_suffix(".errors" + out.suffix)
        await client.download_file(found.error_file_id, errors)
        print(f"errors: {errors}", file=sys.stderr)


def _list(mesh: GatewayQuery) -> None:
    from time import localtime, strftime

    found = mesh.ask(lambda client: client.batches())
    rows = [
        (
            each.id,
            each.status,
            f"{each.request_counts.completed + each.request_counts.failed}/{each.request_counts.total}",
            str(each.request_counts.failed),
            each.endpoint,
            strftime("%Y-%m-%d %H:%M", localtime(each.created_at)),
        )
        for each in found
    ]
    columns = ("batch", "status", "answered", "failed", "endpoint", "created")
    mesh.show_table({"batches": found}, columns, rows)
