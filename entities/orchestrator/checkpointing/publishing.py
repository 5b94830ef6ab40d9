"""Writing a file below a job's own artifacts, by an instance of that job (ADR-0040)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from bus.subjects import PUBLISH_FILE
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.job_state.instances import MemberLost
from schemas.errors import Conflict, DmscError, Fenced
from schemas.files import PIECE_BYTES, PublishFile
from schemas.step import Member

WRITERS = 3
"""Instances that are asked, one after the other, until one has written it; all would write the same."""


async def publish_file(
    job: JobContext, writers: Sequence[Member], *, url: str, name: str, data: bytes
) -> None:
    """Has an instance write file `name` into the folder `url`; returns once it is there.

    After any error but `Conflict` it is unknown whether the file is there, or will be.

    Raises:
        Conflict: files that the file lists are missing; nothing was written.
        Fenced: another orchestrator has the job.
        MemberLost: all instances that were asked are lost.
        DmscError: none of them could write it.
    """
    digest = hashlib.sha256(data).hexdigest()
    orders = [
        PublishFile(
            job=job.name,
            epoch=job.epoch,
            url=url,
            name=name,
            size=len(data),
            sha256=digest,
            offset=offset,
            data=data[offset : offset + PIECE_BYTES],
        )
        for offset in range(0, max(1, len(data)), PIECE_BYTES)
    ]
    lost: set[Member] = set()
    failed: DmscError | None = None
    for writer in writers[:WRITERS]:
        try:
            for order in orders:
                await job.instances.order(
                    PUBLISH_FILE, order, [writer], deadline_s=job.times.checkpoints.publish_s
                )
        except MemberLost as error:
            lost |= error.members
        except Fenced:
            raise
        except Conflict:
            if lost or failed is not None:  # an earlier writer may have found the listed files, and written
                continue
            raise
        except DmscError as error:
            failed = failed or error
        else:
            return
    raise failed or MemberLost(lost, f"{url}/{name}: nobody is left to write it")
