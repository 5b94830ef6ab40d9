"""What a finished job leaves: weights as safetensors shards with an index.

Instances write all of it; on the bus, this process the index.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from bus.artifacts import SCHEME, open_on_bus
from bus.connection import Bus
from bus.subjects import EXPORT
from entities.orchestrator.instances import Instances
from entities.orchestrator.publishing import publish_file
from schemas.job import JobSpec, WeightsManifest
from schemas.step import Exported, ExportOrder, Member
from schemas.weights_digest import INDEX_NAME, weights_sha256

EXPORT_DEADLINE_S = 300.0
"""Of a small stage; a large one has more (`Instances.patience_s`)."""


async def export_weights(
    bus: Bus,
    job: str,
    spec: JobSpec,
    epoch: int,
    instances: Instances,
    stages: Sequence[Sequence[Member]],
    version: int,
) -> WeightsManifest:
    """Has the first replica of each stage write its shard, then writes the index.

    Raises:
        MemberLost: a replica died while exporting; ask again with another one.
    """
    url = f"{spec.artifacts.rstrip('/')}/{job}/weights"
    names = [f"model-{index + 1:05d}-of-{len(stages):05d}.safetensors" for index in range(len(stages))]

    patience_s = instances.patience_s(EXPORT_DEADLINE_S)

    async def one(stage: int) -> Exported:
        order = ExportOrder(job=job, epoch=epoch, version=version, url=url, shard=names[stage])
        answers = await instances.order(EXPORT, order, [stages[stage][0]], deadline_s=patience_s)
        exported = answers[stages[stage][0].sid]
        assert isinstance(exported, Exported)
        return exported

    written = await asyncio.gather(*(one(stage) for stage in range(len(stages))))
    lines: dict[str, str] = {}
    where: dict[str, str] = {}
    for name, exported in zip(names, written, strict=True):
        lines.update(exported.tensors)
        where.update(dict.fromkeys(exported.tensors, name))
    size = sum(exported.bytes for exported in written)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    data = json.dumps(index, indent=1).encode()
    if url.startswith(SCHEME):
        await open_on_bus(url, bus).put_bytes(INDEX_NAME, data)
    else:
        writers = [members[0] for members in stages]
        await publish_file(instances, writers, job=job, epoch=epoch, url=url, name=INDEX_NAME, data=data)
    return WeightsManifest(
        url=url,
        shards=(*names, INDEX_NAME),
        tensors=where,
        bytes=size,
        sha256=weights_sha256(lines),
        step=version,
    )
