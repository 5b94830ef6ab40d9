"""A stage's state in and out: to a newcomer, from and to checkpoints (ADR-0011), and exported weights.

It decides which version the stage is at, who waits for it, and how tensors are named in files. The stage
runtime calls it on orders of the orchestrator; `workers.tasks.sample` reads exported weights. It never
decides when a checkpoint is taken, and a checkpoint counts only once the orchestrator's manifest is written.

- `stage_state`: versions, transfers, redos, restore, export.
- `checkpoint`, `checkpoint_writer`, `checkpoint_files`: a stage's part of a checkpoint; its write during
  training; the DCP folder on disk.
- `weights`, `safetensors_files`: initial and exported weights; safetensors in an artifact store.
- `publishing`: files that the orchestrator has an instance write (manifests, weight indexes).
"""
