"""The weights of a finished job: safetensors shards with an index.

Instances write the shards. This process writes the index if the artifacts are on the bus; else an instance
does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from bus.files.artifacts import SCHEME, open_on_bus
from bus.subjects import EXPORT
from entities.orchestrator.checkpointing.publishing import publish_file
from entities.orchestrator.job_state.context import JobContext
from schemas.errors import BadMessage
from schemas.job import WeightsManifest
from schemas.step import Exported, ExportOrder, Member
from schemas.weights_digest import BESIDE, INDEX_NAME, weights_index, weights_sha256

MOST_TENSORS = 1 << 18
"""Most tensors of one stage. They come in pages from a job's own process, which need not be honest."""


async def export_weights(
    job: JobContext, stages: Sequence[Sequence[Member]], version: int
) -> WeightsManifest:
    """Has the first replica of each stage write its shard, then writes the index.

    Raises:
        MemberLost: a replica died while exporting; ask again with another one.
        BadMessage: a replica reports more tensors than a stage may have.
    """
    url = f"{job.spec.artifacts.rstrip('/')}/{job.name}/weights"
    names = [f"model-{index + 1:05d}-of-{len(stages):05d}.safetensors" for index in range(len(stages))]

    idle_s = job.instances.idle_s(url)

    async def export_stage(stage: int) -> Exported:
        writer = stages[stage][0]
        tensors: dict[str, str] = {}
        renamed: dict[str, str] = {}
        files: tuple[str, ...] = ()
        after = ""
        while True:
            order = ExportOrder(
                job=job.name, epoch=job.epoch, version=version, url=url, shard=names[stage], after=after
            )
            answers = await job.instances.order(EXPORT, order, [writer], deadline_s=idle_s, moving=True)
            exported = answers[writer.sid]
            tensors |= exported.tensors
            renamed |= {name: exported.names[name] for name in exported.tensors if name in exported.names}
            files = files or tuple(name for name in exported.files if name in BESIDE)
            if len(tensors) > MOST_TENSORS:
                raise BadMessage(f"{writer.sid} tells of more than {MOST_TENSORS:,} tensors of its stage")
            last = max(exported.tensors, default="")
            if not exported.more or last <= after:  # a page without a new name is the last one
                return exported.model_copy(update={"tensors": tensors, "names": renamed, "files": files})
            after = last

    written = await asyncio.gather(*(export_stage(stage) for stage in range(len(stages))))
    lines: dict[str, str] = {}
    where: dict[str, str] = {}
    called: dict[str, str] = {}
    for name, exported in zip(names, written, strict=True):
        lines.update(exported.tensors)
        where.update(dict.fromkeys(exported.tensors, name))
        called.update(exported.names)
    size = sum(exported.bytes for exported in written)
    data = json.dumps(weights_index(where, size, called, lines), indent=1).encode()
    if url.startswith(SCHEME):
        await open_on_bus(url, job.bus).put_bytes(INDEX_NAME, data)
    else:
        writers = [members[0] for members in stages]
        await publish_file(job, writers, url=url, name=INDEX_NAME, data=data)
    return WeightsManifest(
        url=url,
        shards=(*names, INDEX_NAME, *written[0].files),
        tensors=where,
        names=called,
        bytes=size,
        sha256=weights_sha256(lines),
        step=version,
    )
