"""The analysis of a job's model and data, in a short-lived worker of the MIC (draft §5.3).

The control plane has no torch. So this worker builds the model, measures its layers, opens the data and
reports. A model that can't be trained is refused here, with one line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from schemas.errors import BadModel
from schemas.job import JobSpec, kept_spec
from schemas.task_graph import LayerProfile, ModelTopology
from workers.compute.determinism import compute_exactly, inexact_operation, tolerant
from workers.compute.layer_profile import Profiler
from workers.compute.model import build, check_trained, loss_function, tied_layers
from workers.data.batches import Batch, BatchSource
from workers.data.opening import open_source
from workers.data.storage import node_cache
from workers.tasks.short_lived import answer, bus_for
from workers.user_code import code_digest


def main(payload: dict[str, Any], result: Path | None = None) -> int:
    """Entry point under the fork server: writes {"topology": …} or {"failed": {"code", "text"}}.

    Args:
        payload: With job, spec, cluster, node, device, servers, sid, token.
        result: The file to write.
    """
    return answer(_main, payload, result)


async def _main(payload: dict[str, Any]) -> dict[str, Any]:
    spec = kept_spec(payload["spec"])
    node_cache.grant(payload.get("cache"), payload.get("sid", "analysis"))
    async with bus_for(payload, *spec.data.urls().values()) as bus:
        data = await open_source(spec, bus)
    try:
        place = (payload["cluster"], payload["node"], payload.get("device", "cpu"))
        topology = analyse(payload["job"], spec, data, *place)
    finally:
        data.close()
    return {"topology": topology.model_dump(mode="json")}


def analyse(
    job: str, spec: JobSpec, data: BatchSource, cluster: str, node: str, device: str = "cpu"
) -> ModelTopology:
    """The job's layer graph with measured costs.

    Raises:
        BadModel: The factory fails, the layers can't be trained here, don't fit together, or don't fit the
            loss.
        BadData: See `open_source` and `BatchSource.batch`.
    """
    training = spec.training
    compute_exactly(training.compute_threads, training.seed)
    layers = build(spec.model, training.seed)
    for name, layer in layers:
        check_trained((f"{name}.{own}", weight) for own, weight in layer.named_parameters())
    loss = loss_function(spec.model)
    sample = data.batch("train", 0, 0)
    profiles, inexact = _profile(Profiler(spec, layers, loss, device), sample)
    factories = [
        spec.model.factory,
        *([spec.model.loss] if ":" in spec.model.loss else []),
        *spec.data.user_code(),
    ]
    unique = {id(weight): weight.numel() for _, layer in layers for weight in layer.parameters()}
    return ModelTopology(
        job=job,
        cluster=cluster,
        node=node,
        layers=tuple(profiles),
        parameters=sum(unique.values()),
        input_bytes=sum(tensor.nbytes for tensor in sample.values()),
        data_tokens=data.tokens,
        code_digest=code_digest(*factories),
        device=device,
        tied=tied_layers(layers),
        inexact=f"{inexact} on {device}" if inexact else "",
    )


def _profile(profiler: Profiler, sample: Batch) -> tuple[list[LayerProfile], str]:
    """The layer profiles, and the operation without a deterministic form, in words; empty: none."""
    try:
        return profiler.run(sample), ""
    except BadModel as error:
        operation = inexact_operation(error)
        if operation is None:
            raise
        where = error.text.partition(")")[0] + ")" if error.text.startswith("layer ") else "the loss"
    with tolerant():
        return profiler.run(sample), f"{where} uses {operation}, which has no deterministic form"
