"""A checkpoint as a whole mesh would publish it, made by one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bus.files.artifacts import Artifacts
from schemas.checkpoint import MANIFEST_NAME, CheckpointManifest
from workers.graph.stage_module import StageModule
from workers.state.checkpoint import copy_tensors, write_stage


async def publish(
    artifacts: Artifacts, stages: Sequence[tuple[StageModule, torch.optim.AdamW]], *, version: int
) -> CheckpointManifest:
    """Writes every stage, then the manifest."""
    parts = [
        await write_stage(
            artifacts,
            copy_tensors(stage, optimizer),
            stage=number,
            first_layer=stage.first_layer,
            last_layer=stage.last_layer,
        )
        for number, (stage, optimizer) in enumerate(stages)
    ]
    manifest = CheckpointManifest(
        job="j",
        version=version,
        epoch=1,
        written_at=0.0,
        spec_sha256={},
        torch_version=parts[0].torch_version,
        stages=tuple(parts),
    )
    await artifacts.put_bytes(MANIFEST_NAME, manifest.to_json())
    return manifest
