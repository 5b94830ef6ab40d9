"""Runs one node agent in a process of its own, so that a test can kill it. SIGTERM ends it in order."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from bus.connection import Bus
from entities.cluster.agent import ClusterAgent
from entities.cluster.config import ClusterConfig
from schemas.envelope import EntityKind


async def main(url: str, cluster: str, logs: str) -> None:
    config = ClusterConfig(
        cluster=cluster,
        node="own",
        slots=4,
        device="cpu",
        servers=(url,),
        logs=Path(logs),
        capabilities=Path(logs).parent / "capabilities",
        code_path=(str(Path(__file__).parent),),
        worker_package="cluster_stand_ins",
    )
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with Bus.connect(url, name=config.sid, kind=EntityKind.CLUSTER) as bus:
        await ClusterAgent(bus, config).run()


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except asyncio.CancelledError:
        sys.exit(0)
