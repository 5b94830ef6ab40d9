"""A replica for the reduction tests, in a process of its own.

    python reduction_peer.py URL JOB RANK SIZE GENERATION TASK [TIMEOUT_S]

TASK `sum` reduces once and stays; `absent` builds the group and never reduces. Prints JSON lines.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import torch

from bus.connection import Bus
from schemas.envelope import EntityKind
from schemas.errors import PeerUnreachable
from schemas.step import Member
from tests.patience import PATIENCE_S
from workers.links.reduction import ReductionGroup
from workers.transport.gloo import GroupConfig


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


async def main(
    url: str, job: str, rank: str, size: str, generation: str, task: str, timeout_s: str = "20"
) -> None:
    torch.set_num_threads(1)
    members = [Member(sid=f"replica-{number}", incarnation="1") for number in range(int(size))]
    me = members[int(rank)]
    async with Bus.connect(url, name=me.sid, kind=EntityKind.INSTANCE) as bus:
        group = await ReductionGroup.build(
            bus,
            job=job,
            stage=0,
            generation=int(generation),
            members=members,
            me=me,
            # processes start at their own pace
            config=GroupConfig(build_timeout_s=PATIENCE_S, timeout_s=float(timeout_s)),
        )
        say("built")
        if task == "sum":
            began = time.perf_counter()
            try:
                reduced = await group.all_reduce(torch.full((1000,), int(rank), dtype=torch.int64))
                say("reduced", value=int(reduced[0]))
            except PeerUnreachable as error:
                say("failed", text=error.text, took_s=time.perf_counter() - began)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
