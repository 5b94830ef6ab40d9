"""A serving stage from the job file to its probed model: layers, weights, cache, room (ADR-0144)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from bus.connection import Bus
from bus.logs import get_logger
from schemas.cluster import InstanceStart
from schemas.errors import BadModel
from schemas.serve_spec import ServeSpec
from schemas.task_graph import TaskUnit
from workers.compute.batch_schema import empty_batch
from workers.compute.compute_thread import ComputeThread
from workers.compute.deferred_model import WHOLE_BYTES, build_layers
from workers.graph.model_graph import ModelGraph
from workers.graph.stage_module import StageModule, slice_stage
from workers.models.hugging_face_folder import is_adapter, library_names, public_names, stand_ins
from workers.process.url_rules import open_url
from workers.serving.cache_check import CacheCheck, check_cache
from workers.serving.exact_arithmetic import Arithmetic, arithmetic_fingerprint
from workers.serving.model_context import (
    NO_LIMITS,
    SampleLimits,
    model_context,
    otherwise_from,
    recorded_context,
    sample_limits,
)
from workers.serving.one_shot import OneShotModel, batch_unit, probed_batches
from workers.serving.probe import probe_stage
from workers.serving.retained_rows import Boundary
from workers.serving.runtime.session_table import BLOCK_ROWS, ServingLimits
from workers.serving.runtime.whole_model import history_bytes, stage_sample, whole_answer
from workers.serving.stage_model import StageModel
from workers.state.initial_weights import load_initial

log = get_logger("serving")

Kind = Literal["generate", "predict"]

MOST_CONTEXT = 4096
"""Most tokens of a session where neither the job file nor the model says less."""
MOST_TRIED = 512
"""Tokens with which a large model is tried first at start: thousands may take longer than loading it."""
_UNLIMITED = 1 << 62


@dataclass(frozen=True, kw_only=True)
class LoadedStage:
    """A stage that is ready to serve.

    Attributes:
        kind: What it answers.
        exact: Whether bits are independent of company.
        because: Why not; empty: they are.
        uncached: Why each token computes a session's whole history; empty: keys and values are kept, or it
            is one of `predict`.
        fingerprint: Of the arithmetic.
        model: Its layers over rows of sessions; None for `predict`.
        one_shot: Its layers in single passes: those of `predict`, and of vectors of texts.
        unit: Samples of a pass are a multiple of it; 0: each is computed alone.
        probed: The sample with which that was found; None: with none.
        samples: How large a sample of a single pass may be.
        context: Most tokens of a session.
        vocabulary: Tokens are below this; 0: not known.
        rows: Rows that it has room for.
    """

    kind: Kind
    exact: bool
    because: str
    fingerprint: str
    uncached: str = ""
    model: StageModel | None = None
    one_shot: OneShotModel | None = None
    unit: int = 1
    probed: Mapping[str, Tensor] | None = None
    samples: SampleLimits = NO_LIMITS
    context: int = 0
    vocabulary: int = 0
    rows: int = 0

    def tags(self, serve: ServeSpec) -> tuple[str, ...]:
        """What its record in the registry says of it."""
        told = {
            "kind": self.kind,
            "exact": str(self.exact).lower(),
            "inexact_because": " ".join(self.because.split())[:300],
            "cached": "" if self.model is None else str(not self.uncached).lower(),
            "uncached_because": " ".join(self.uncached.split())[:300],
            "context": self.context,
            "vocabulary": self.vocabulary,
            "fingerprint": self.fingerprint,
            "sessions": serve.sessions,
            "rows": self.rows,
            "unit": self.unit if self.kind == "predict" else "",
        }
        return tuple(f"serve.{name}={value}" for name, value in told.items() if value != "")

    def limits(self, start: InstanceStart, serve: ServeSpec) -> ServingLimits:
        """What it takes on."""
        return ServingLimits(
            stage=start.unit.stage,
            stages=start.stages,
            sessions=serve.sessions,
            rows=self.rows,
            context=self.context,
            vocabulary=self.vocabulary,
            chunk_rows=serve.chunk_tokens,
            wave_rows=serve.wave_tokens,
            whole=self.model is None or self.model.layout is None,
        )


async def load_stage(bus: Bus, start: InstanceStart, serve: ServeSpec, thread: ComputeThread) -> LoadedStage:
    """Builds the unit's layers, fills them with the version's weights, and tries them.

    Raises:
        BadModel: The model, its weights or its arithmetic are not what was asked for.
    """
    graph, module = await thread.order(partial(_build, start))
    source = start.spec.initial_weights
    if source is not None:
        model = start.spec.model
        is_new = is_adapter(model)
        await load_initial(
            module,
            await open_url(source.url, bus),
            source,
            run=thread.order,
            public_name=public_names(model),
            is_new=is_new,
            own_names_of=library_names(model),
            stand_ins=stand_ins(model),
            checked=True,
        )
    return await thread.order(partial(_tried, start, serve, graph))


def _build(start: InstanceStart) -> tuple[ModelGraph, StageModule]:
    unit, spec, source = start.unit, start.spec, start.spec.initial_weights
    is_new = is_adapter(spec.model)
    strict = source is not None and source.strict
    given = (lambda name: not is_new(name)) if strict else None
    batch = empty_batch(start.batch, 1)
    graph = build_layers(
        spec.model, spec.training.seed, batch, unit.first_layer, unit.last_layer, given=given
    )
    module = slice_stage(graph, unit.first_layer, unit.last_layer, precision=spec.training.precision)
    module.eval()
    for weight in module.parameters():
        weight.requires_grad_(False)
    return graph, module


@torch.inference_mode()
def _tried(start: InstanceStart, serve: ServeSpec, graph: ModelGraph) -> LoadedStage:
    kind = _kind(start, serve, graph)
    arithmetic = Arithmetic(threads=torch.get_num_threads(), exact=serve.exact != "off")
    if kind == "predict":
        return _of_single_passes(start, serve, graph)
    context = _context(start, serve, graph)
    unit = start.unit
    sample, check = _checked(graph, unit, serve, context, arithmetic)
    model = StageModel(
        graph,
        unit.first_layer,
        unit.last_layer,
        arithmetic=arithmetic,
        layout=check.layout,
        kv_budget_bytes=_UNLIMITED,  # the machine counts rows
    )
    if check.layout is not None:
        model.prepack(sample)
    because = _probed(graph, unit, model, serve, sample)
    if check.layout is None:
        log.info("served without a cache", reason=check.because)
        row_bytes = history_bytes(graph, unit.last_layer, context)
    else:
        row_bytes = sum(site.token_bytes for site in model.cache.sites) + _row_bytes(check.boundary)
    return LoadedStage(
        kind="generate",
        model=model,
        one_shot=OneShotModel(graph, unit.first_layer, unit.last_layer, of_logits=True),
        unit=0,
        exact=not because,
        because=because,
        uncached=check.because,
        samples=SampleLimits(start.batch, graph.recorded, context),
        context=context,
        vocabulary=vocabulary_of(graph),
        rows=rows_within(serve.cache_mib << 20, row_bytes),
        fingerprint=_digest(arithmetic_fingerprint(arithmetic, len(model.prepacked))),
    )


def _checked(
    graph: ModelGraph,
    unit: TaskUnit,
    serve: ServeSpec,
    context: int,
    arithmetic: Arithmetic,
    longest_try_s: float = 20.0,
) -> tuple[Boundary, CacheCheck]:
    """Tries the stage with a cache, on sessions as long as the context; see `tried_tokens` of large models.

    `longest_try_s`: for so long a start may be tried with the whole context, by what the first try took.

    Returns:
        What it was tried with, and what came of it.
    """

    if not serve.cache:
        return (), CacheCheck(None, "serve.cache is false", ())

    def tried_with(tokens: int) -> tuple[Boundary, CacheCheck]:
        first, last, most_rows = unit.first_layer, unit.last_layer, serve.wave_tokens
        sample, because = stage_sample(graph, first, tokens, arithmetic, most_rows)
        if because:
            return sample, CacheCheck(None, because, ())
        check = check_cache(graph, first, last, sample, arithmetic=arithmetic, most_rows=most_rows)
        return sample, check

    size = sum(weight.nbytes for weight in graph.model.parameters())
    tokens = tried_tokens(graph, context) if size > WHOLE_BYTES else context
    began = time.perf_counter()
    sample, check = tried_with(tokens)
    if tokens == context or check.layout is None:
        return sample, check
    whole_s = (time.perf_counter() - began) * (context / tokens) ** 2  # attention grows by the square
    if whole_s > longest_try_s:
        log.info(
            "not tried with the whole context", tokens=tokens, context=context, estimate_s=round(whole_s)
        )
        return sample, check
    return tried_with(context)


def tried_tokens(graph: ModelGraph, context: int) -> int:
    """With how many tokens a large model is tried first.

    They reach beyond each length at which its own config says that it computes otherwise.
    """
    lengths = [each for each in otherwise_from(graph.model) if each < context]
    return min(context, max(MOST_TRIED, *(each + BLOCK_ROWS for each in lengths), 0))


def _probed(graph: ModelGraph, unit: TaskUnit, model: StageModel, serve: ServeSpec, sample: Boundary) -> str:
    """Why bits depend on company; empty: they don't.

    Weights that were laid out are so no longer if bits depend on it.

    Raises:
        BadModel: Exact arithmetic is required, and is not had.
    """
    if serve.exact == "off":
        return "serve.exact is off"
    if (layout := model.layout) is None:  # each session is computed alone
        return ""
    first, last = unit.first_layer, unit.last_layer
    probed = partial(
        probe_stage,
        graph,
        first,
        last,
        layout,
        sample,
        arithmetic=model.arithmetic,
        most_rows=serve.wave_tokens,
    )
    found = probed()
    if found and model.prepacked:
        log.info("weights are taken as they lie", reason=str(found[0]))
        model.unpack()
        found = probed()
    because = str(found[0]) if found else ""
    if because and serve.exact == "required":
        raise BadModel(f"serve.exact is required, but {because}")
    return because


def _of_single_passes(start: InstanceStart, serve: ServeSpec, graph: ModelGraph) -> LoadedStage:
    unit = start.unit
    one_shot = OneShotModel(graph, unit.first_layer, unit.last_layer)
    size, because, sample = 1, "", _sample(start, graph)
    if serve.exact == "off":
        because = "serve.exact is off"
    elif start.stages > 1 and any(weight.is_meta for weight in graph.model.parameters()):
        if serve.exact == "required":
            size = 0  # alone, a sample has no company that its bits could depend on
        else:
            because = "a large model's stages are not probed together; serve.exact: required has them exact"
    elif sample is None:
        because = "no example of its input is known"
    else:
        # A batch goes through all stages as it is: each of them must find the same unit for all layers.
        whole = one_shot if start.stages == 1 else OneShotModel(graph, 0, len(graph))
        size = batch_unit([whole.probe(probed_batches(sample, graph.inputs, serve.batch))], serve.batch)
    if because and serve.exact == "required":
        raise BadModel(f"serve.exact is required, but {because}")
    return LoadedStage(
        kind="predict",
        one_shot=one_shot,
        unit=size,
        probed=sample,
        samples=sample_limits(graph, start.spec.model, start.batch, serve.context or MOST_CONTEXT),
        exact=not because,
        because=because,
        fingerprint=_digest(arithmetic_fingerprint(Arithmetic(threads=torch.get_num_threads()))),
    )


def _sample(start: InstanceStart, graph: ModelGraph) -> dict[str, Tensor] | None:
    """A sample of zeros; None: the analysis did not say what an input looks like."""
    known = {tensor.name: tensor for tensor in start.batch}
    if any(name not in known for name in graph.inputs):
        return None
    return {
        name: torch.zeros(known[name].shape, dtype=getattr(torch, known[name].dtype)) for name in graph.inputs
    }


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _kind(start: InstanceStart, serve: ServeSpec, graph: ModelGraph) -> Kind:
    if serve.kind != "auto":
        return serve.kind
    if len(graph.inputs) != 1:
        return "predict"
    taken = {tensor.name: tensor for tensor in start.batch}.get(graph.inputs[0])
    if taken is not None and (taken.dtype != "int64" or len(taken.shape) != 1):
        return "predict"
    answer = whole_answer(graph)
    if answer.shape is None:  # layers that are elsewhere can't be tried: tokens alone are mostly a text's
        return "generate" if any(weight.is_meta for weight in graph.model.parameters()) else "predict"
    return "generate" if answer.is_logits and not answer.looks_ahead else "predict"


def rows_within(budget_bytes: int, row_bytes: int) -> int:
    """Rows that fit: their keys and values, and what is kept of them for the next stage."""
    return max(1, budget_bytes // (BLOCK_ROWS * max(1, row_bytes))) * BLOCK_ROWS


def _row_bytes(boundary: Boundary) -> int:
    return sum(tensor.nbytes // max(1, int(tensor.shape[0])) for tensor in boundary)


def _context(start: InstanceStart, serve: ServeSpec, graph: ModelGraph) -> int:
    """Most tokens of a session.

    Raises:
        BadModel: The job file says more than the model takes, or than it was recorded for.
    """
    own = model_context(start.spec.model, graph.model)
    if own is not None and serve.context is not None and serve.context > own:
        raise BadModel(f"serve.context is {serve.context}, but {start.spec.model.factory} takes {own} tokens")
    context = serve.context or min(own or MOST_CONTEXT, MOST_CONTEXT)
    if start.unit.stage:  # the version's is the least of all stages
        return context
    known, because = recorded_context(graph, start.spec.model, start.batch, context)
    if because and serve.context is not None:
        raise BadModel(f"serve.context is {context}, but {because}; with serve.context: {known} it is served")
    if because:
        log.info("sessions are shorter than the model's own context", tokens=known, reason=because)
    return known


def vocabulary_of(graph: ModelGraph) -> int:
    """Tokens of the first table, which is that of tokens in every family; 0: there is none."""
    tables = (module for module in graph.model.modules() if isinstance(module, nn.Embedding))
    return next((table.num_embeddings for table in tables), 0)
