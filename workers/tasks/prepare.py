"""One unit of a data set's build, in a short-lived worker of a node (ADR-0065).

What it writes goes to the build's own folder, under the SHA-256 of the bytes. The node agent starts it with
the lowest priority of the operating system.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from bus.files.artifacts import open_artifacts
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.units import MOST_RESULT_BYTES, UnitOrder
from schemas.errors import BadData
from schemas.stored_values import read_stored
from workers.data.source_files import fetch_uploads
from workers.data.storage import node_cache
from workers.data_builds.run import run_unit
from workers.data_builds.stores import ArtifactUnitStore
from workers.requirements import check_requirements
from workers.tasks.short_lived import answer, bus_for


def main(payload: dict[str, Any], result: Path | None = None) -> int:
    """Entry point under the fork server: writes {"result": …} or {"failed": {"code", "text"}}.

    Args:
        payload: With spec, order, cluster, node, servers, sid, token, cache; urls and secrets as of
            `workers.tasks.short_lived.answer`.
        result: The file to write.
    """
    return answer(_main, payload, result)


async def _main(payload: dict[str, Any]) -> dict[str, Any]:
    spec = read_stored(payload["spec"], DataBuildSpec)
    order = UnitOrder.model_validate(payload["order"])
    check_requirements(spec.code, payload.get("node", ""))
    node_cache.grant(payload.get("cache"), payload["sid"])
    reads = needed(spec, order)
    with tempfile.TemporaryDirectory(prefix="unit-", ignore_cleanup_errors=True) as folder:
        uploads, outputs = Path(folder) / "uploads", Path(folder) / "outputs"
        outputs.mkdir()
        async with bus_for(payload, spec.folder, *reads.values()) as bus:
            fetched = await fetch_uploads(reads, bus, uploads)
            artifacts = await asyncio.to_thread(open_artifacts, spec.folder, bus)
            store = ArtifactUnitStore(artifacts, outputs, asyncio.get_running_loop())
            found = await asyncio.to_thread(run_unit, spec, order, store, fetched)
    document = found.model_dump(mode="json", exclude_defaults=True)
    if order.phase == "plan" and (size := len(found.model_dump_json())) > MOST_RESULT_BYTES:
        raise BadData(
            f"source: the list of its files takes {size:,} bytes, at most {MOST_RESULT_BYTES:,}: put small "
            "files together, as lines of JSON for instance"
        )
    return {"result": document}


def needed(spec: DataBuildSpec, order: UnitOrder) -> dict[str, str]:
    """Key in the build's file → URL of what a unit reads, outputs of other units aside."""
    sources = {key: url for key, url in spec.urls() if key.startswith("source[")}
    tokenizers = {key: url for key, url in spec.urls() if key.startswith("steps[")}
    if order.phase == "plan":
        return sources | tokenizers
    if order.phase == "records" and order.unit is not None:
        key = f"source[{order.unit.source}]"
        return {key: sources[key]} if key in sources else {}
    return tokenizers if order.phase == "pack" else {}
