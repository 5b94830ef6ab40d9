"""The analysis of a job's model and data, in a short-lived worker of the MIC (draft §5.3).

The control plane has no torch. So this worker builds the model, measures its layers, opens the data and
reports. A model that can't be trained is refused here, with one line.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from bus.connection import Bus
from bus.files.artifacts import open_artifacts
from schemas.errors import BadModel
from schemas.job import JobSpec, kept_spec
from schemas.task_graph import DataSource, LayerProfile, ModelTopology
from schemas.training_length import samples_of, with_steps
from workers.compute.batch_schema import batch_schema
from workers.compute.deferred_model import outlined_graph
from workers.compute.determinism import compute_exactly, inexact_operation, tolerant
from workers.compute.layer_profile import Profiler
from workers.compute.measured_loss import MeasuredLoss
from workers.compute.model import check_trained
from workers.data.batches import Batch, BatchSource
from workers.data.checking import checked_batch, largest_batch
from workers.data.opening import open_source
from workers.data.preprocessing.preprocessed import PreprocessedBatches
from workers.data.storage import node_cache
from workers.data.text.vocabulary import check_logits, embeddings_checked
from workers.graph.model_graph import sharing_layers
from workers.models.hugging_face_folder import is_adapter, library_names, public_names, stand_ins
from workers.recipe.probe import try_recipe
from workers.requirements import check_requirements
from workers.state.initial_weights import check_missing, describe_match, joined, match_weights
from workers.tasks.compiled import check_compiled
from workers.tasks.served import analyse_served, served_sample
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
    check_requirements(spec.code, payload.get("node", ""))
    node_cache.grant(payload.get("cache"), payload.get("sid", "analysis"))
    place = (payload["cluster"], payload["node"], payload.get("device", "cpu"))
    if spec.serve is not None:
        sample = await served_sample(spec, payload)
        topology = analyse_served(payload["job"], spec, sample, *place)
        async with bus_for(payload, spec.weights_url or "") as bus:
            unmatched = await unmatched_by_sample(spec, sample, bus)
    else:
        async with bus_for(payload, *spec.data.urls().values()) as bus:
            data = await open_source(spec, bus, stand_ins=True)
        try:
            topology = analyse(payload["job"], spec, data, *place)
            async with bus_for(payload, spec.weights_url or "") as bus:
                unmatched = await unmatched_weights(spec, data, bus)
        finally:
            data.close()
    topology = topology.model_copy(update={"unmatched_weights": unmatched})
    return {"topology": topology.model_dump(mode="json")}


async def unmatched_weights(spec: JobSpec, data: BatchSource, bus: Bus | None) -> str:
    """What the files of `initial_weights` and the model do not have in common, in one line; empty: nothing.

    Names, shapes and types are compared by the files' headers, before any instance exists.

    Raises:
        BadModel: The files do not fit the model; see `match_weights` and `check_missing`.
    """
    if spec.initial_weights is None:
        return ""
    return await unmatched_by_sample(spec, checked_batch(data, spec.data.evaluation_sets), bus)


async def unmatched_by_sample(spec: JobSpec, sample: Batch, bus: Bus | None) -> str:
    """See `unmatched_weights`; `sample`: of what the model takes."""
    source = spec.initial_weights
    if source is None:
        return ""
    graph = outlined_graph(spec.model, spec.training.seed, sample)
    model, is_new = graph.model, is_adapter(spec.model)
    weights = [*model.named_parameters(), *model.named_buffers()]
    own = {name: weight for name, weight in weights if name not in graph.unsaved and not is_new(name)}
    artifacts = await asyncio.to_thread(open_artifacts, source.url, bus)
    theirs, library = public_names(spec.model), library_names(spec.model)
    aliases = joined(graph.aliases, stand_ins(spec.model))
    matched = await match_weights(own, artifacts, source, theirs, aliases, library)
    check_missing(matched, source, "the model")
    return describe_match(matched, source)


def analyse(
    job: str, spec: JobSpec, data: BatchSource, cluster: str, node: str, device: str = "cpu"
) -> ModelTopology:
    """The job's layer graph with measured costs.

    Raises:
        BadModel: The factory fails, the layers can't be trained here, don't fit together, or don't fit the
            loss.
        BadData: See `open_source` and `BatchSource.batch`.
        BadJob: See `with_steps`.
    """
    epoch_samples = data.size("train") or 0
    spec = with_steps(
        spec, samples_of(spec, epoch_samples, data.tokens)
    )  # a user's schedule is called with it
    training = spec.training
    compute_exactly(training.compute_threads, training.seed)
    sample = largest_batch(checked_batch(data, spec.data.evaluation_sets), spec.data.largest)
    graph = outlined_graph(spec.model, training.seed, sample)
    check_trained(graph.model.named_parameters(), scaled=spec.loss_scale is not None)
    optimizer_bytes = try_recipe(training, [*graph.model.named_parameters()])
    loss = MeasuredLoss(spec, [*graph.outputs], [*sample], graph.inputs, tries=True)
    travels = graph.batch_crossing(0, [*sample], loss.batch)
    with embeddings_checked(data.vocabulary, graph.model, sample):
        profiler = Profiler(spec, graph, loss, device)
        profiles, inexact = _profile(profiler, sample)
    compiler = check_compiled(spec, graph, sample, node, device)
    if spec.model.loss == "cross_entropy":
        check_logits(data.vocabulary, profiles)
    weights = [weight for layer in range(len(graph)) for weight in graph.parameters(layer).values()]
    unique = {id(weight): weight.numel() for weight in weights}
    return ModelTopology(
        job=job,
        cluster=cluster,
        node=node,
        layers=tuple(profiles),
        edges=profiler.edges(),
        parameters=sum(unique.values()),
        input_bytes=sum(sample[name].nbytes for name in travels),
        data_tokens=data.tokens,
        code_digest=code_digest(*spec.user_callables),
        data_digest=data.digest,
        epoch_samples=epoch_samples,
        device=device,
        shared=sharing_layers(graph),
        batch=batch_schema(sample, travels),
        sources=tuple(
            DataSource(name=seen.name, epoch_samples=seen.epoch_samples, feed=seen.feed)
            for seen in data.account(0)
        ),
        records=data.records() if isinstance(data, PreprocessedBatches) else (),
        optimizer_bytes=optimizer_bytes,
        auto=training.auto,
        compiler=compiler,
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
