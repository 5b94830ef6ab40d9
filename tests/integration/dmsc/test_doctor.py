"""What `dmsc doctor` says of a server that the mesh did not start."""

from __future__ import annotations

import shutil
from pathlib import Path

from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from dmsc.launch.checks import STORE_REMEDY
from schemas.envelope import EntityKind
from tests.integration.dmsc.command_line import dmsc


async def test_a_foreign_servers_deleted_store_is_red_and_the_remedy_named(tmp_path: Path) -> None:
    """The server itself goes on in memory, and notices when it is started again."""
    server = EmbeddedServer(tmp_path / "nats", sync_always=False)
    await server.start()
    try:
        async with Bus.connect(server.url, name="orchestrator", kind=EntityKind.ORCHESTRATOR) as bus:
            await bus.provision()
        assert "✓ streams: all there" in (whole := dmsc("doctor", "--bus", server.url, cwd=tmp_path)).stdout
        assert STORE_REMEDY not in whole.stdout
        shutil.rmtree(server.store_dir / "jetstream")
        await server.kill()
        await server.start()
        lost = dmsc("doctor", "--bus", server.url, cwd=tmp_path)
        assert lost.returncode == 1
        (said,) = [line for line in lost.stdout.splitlines() if "streams: " in line]
        assert said.startswith("✗ streams: not there: ")
        assert "KV_jobs" in said
        assert "OBJ_artifacts" in said
        assert STORE_REMEDY in " ".join(lost.stdout.split())
        assert "start the server again" in STORE_REMEDY
    finally:
        await server.stop()
