"""`dmsc weights`: a finished job's weights as files, its adapters in the form that others load."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.option_groups import GatewayQuery
from dmsc.console.options import print_text

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from schemas.job import JobRecord


class Adapters(StrEnum):
    """What becomes of a job's adapters (LoRA)."""

    KEEP = "keep"
    MERGE = "merge"
    SEPARATE = "separate"


def weights(
    job: Annotated[str, argument("JOB|RUN", "The job's id, or the folder that `dmsc train` has written.")],
    out: Annotated[Path, option("--out DIR", "The folder for the weights.", show_default=False)],
    adapters: Annotated[
        Adapters,
        option(
            "--adapters FORM",
            "keep: base and adapters as the job has them. merge: one model, for from_pretrained. separate: "
            "the adapters alone, for PeftModel.from_pretrained.",
        ),
    ] = Adapters.KEEP,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Write the weights of a finished job, with its adapters (LoRA) merged or separate.

    A run's folder is read as it is, without a mesh. A config that the job names by its path has to be there.

    Example: dmsc weights runs/llama-lora-1 --adapters merge --out llama
    """
    from tempfile import TemporaryDirectory

    from dmsc.client.weight_forms import write_form
    from dmsc.follow.follow import check_writable
    from schemas.errors import BadInput
    from schemas.job import JobRecord

    check_writable(out)
    run = Path(job)
    with TemporaryDirectory(prefix="dmsc-weights-") as scratch:
        if (run / "record.json").exists():
            if adapters is Adapters.KEEP:
                raise BadInput(f"{run / 'weights'} has them already; say --adapters merge or separate")
            record, folder = JobRecord.model_validate_json((run / "record.json").read_text()), run / "weights"
        else:
            folder = out if adapters is Adapters.KEEP else Path(scratch)

            async def fetched(client: AsyncClient) -> JobRecord:
                found = await client.job(job)
                await client.download_weights(job, folder)
                return found

            record = mesh.ask(fetched)
        if adapters is not Adapters.KEEP:
            write_form(record.spec, folder, out, "merge" if adapters is Adapters.MERGE else "separate")
    print_text(f"{record.job}: {adapters.value} → {out}")
