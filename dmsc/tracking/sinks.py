"""The sinks that the options of `dmsc run tracker` name."""

from __future__ import annotations

import os
from pathlib import Path

from dmsc.tracking.sink import Sink
from schemas.errors import BadInput


def sinks_of(*, tensorboard: Path | None, mlflow: str | None, wandb: bool, state: Path) -> list[Sink]:
    """The sinks. Each imports its library here, so that a missing one is reported at once.

    Raises:
        BadInput: No sink is named, a library is missing, or a folder can't be written.
    """
    sinks: list[Sink] = []
    if tensorboard is not None:
        from dmsc.tracking.tensorboard_sink import TensorBoardSink

        sinks.append(TensorBoardSink(tensorboard))
    if mlflow is not None:
        from dmsc.tracking.mlflow_sink import MlflowSink

        sinks.append(MlflowSink(mlflow, state / "tracker"))
    if wandb:
        from dmsc.tracking.wandb_sink import WandbSink

        sinks.append(WandbSink(Path(os.environ.get("WANDB_DIR", state / "tracker"))))
    if not sinks:
        raise BadInput("tracker: say where to with --tensorboard DIR, --mlflow URI or --wandb")
    return sinks
