"""The entrance: a path and a body in, an answer out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from entities.gateway.backflow.consent_rules import Said
from entities.gateway.calls.aggregated import AggregatedCalls, TextBody, no_vote
from entities.gateway.calls.answers import whole_answer
from entities.gateway.calls.bodies import read_request
from entities.gateway.calls.embeddings import embed
from entities.gateway.calls.tensor_values import PredictBody, Prediction, question_of, value_of
from entities.gateway.generation.operations import Answering, GenerationOperations
from schemas.aggregation import Aggregation
from schemas.base import Part
from schemas.errors import BadInput, NotFound
from schemas.services.calls import CallPath
from schemas.services.completion import ChatBody, ChatCompletion, Completion, CompletionBody, ServedBy
from schemas.services.embeddings import EmbeddingsBody, TextVectors
from schemas.services.prediction import NamedTensor
from schemas.signals import AccessDecision

P = ParamSpec("P")
T = TypeVar("T")

INLINE_BYTES = 16 << 10
"""Bodies up to this size are decoded at once: a thread costs more than they do."""
DECODERS = 2
"""Threads that decode large bodies: each may take hundreds of megabytes while it works."""
Allow = Callable[[str], Awaitable[AccessDecision]]
"""From a service's name to the decision that allows the caller to use it. Raises `Refused`."""


class WholeCalls:
    """All kinds of calls, each as a whole. `several`: how more than one version or replica is asked."""

    def __init__(self, operations: GenerationOperations, several: AggregatedCalls | None = None) -> None:
        self.operations = operations
        self._several = several or AggregatedCalls(operations)
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="bodies")

    async def decoded(self, size: int, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """The outcome of `work`, which decodes or writes a body of `size` bytes.

        Large ones are beside the event loop, and few at a time, also those whose client has left.
        """
        if size <= INLINE_BYTES:
            return work(*args, **named)
        return await asyncio.get_running_loop().run_in_executor(self._decoders, partial(work, *args, **named))

    async def answer(self, path: CallPath, text: bytes, allow: Allow, key: str | None) -> Part:
        """The whole answer to this body at this path.

        Args:
            key: The idempotency key: a repetition draws the same tokens.

        Raises:
            BadInput: the body is wrong, or asks for a stream.
            Refused, NotFound, RateLimited, Unavailable: as the path itself.
        """
        if path == "/v1/predict":
            return await self.predict(text, allow, key)
        if path == "/v1/embeddings":
            return await self.embed(text, allow, key)
        body: TextBody
        if path == "/v1/completions":
            body = await self.decoded(len(text), read_request, CompletionBody, text)
        else:
            body = await self.decoded(len(text), read_request, ChatBody, text)
        if body.stream:
            raise BadInput("stream: answers within another request come whole; leave it out", param="stream")
        begun = await self.begin(body, allow, key, "none")
        return await whole_answer(begun) if isinstance(begun, Answering) else begun

    # --- texts ----------------------------------------------------------------------------------------------
    async def begin(
        self, body: TextBody, allow: Allow, key: str | None, said: Said
    ) -> Answering | Completion | ChatCompletion:
        """An answer that has begun, or the whole one where versions vote on it; nothing of a vote is kept.

        `said`: what the request says of being kept.
        """
        access = await allow(service_of(body.model))
        how = body.aggregation or self._usual(body.model)
        if body.aggregation is None and how is not None and how.how != "first" and no_vote(body, how):
            how = None  # what the version's file says does not fit this request: one version answers
        if how is not None and how.how != "first":
            return await self._several.vote(body, access, key, how)
        if how is not None:
            begun = await self._several.first(body, access, key, how, said)
        elif isinstance(body, ChatBody):
            begun = await self.operations.chat(body, access, key, said)
        else:
            begun = await self.operations.complete(body, access, key, said)
        self.operations.keep(begun)
        return begun

    # --- tensors --------------------------------------------------------------------------------------------
    async def predict(self, text: bytes, allow: Allow, key: str | None) -> Prediction:
        """What a model gives for the named tensors of this body."""
        # Lists of a million numbers take half a second; the loop serves others meanwhile.
        body, tensors = await self.decoded(len(text), question_of, text)
        access = await allow(service_of(body.model))
        how = body.aggregation or self._usual(body.model)
        outputs, served = (
            await self._predict_one(body, tensors, access, key)
            if how is None
            else await self._predict_several(body, tensors, access, key, how)
        )
        size = sum(len(each.data) for each in outputs)
        values = await self.decoded(
            size, lambda: {each.name: value_of(each, body.format) for each in outputs}
        )
        return Prediction(model=body.model, outputs=values, dmsc=served)

    async def _predict_one(
        self, body: PredictBody, tensors: list[NamedTensor], access: AccessDecision, key: str | None
    ) -> tuple[tuple[NamedTensor, ...], ServedBy]:
        version, predicted = await self.operations.predict(body.model, tensors, access, key)
        served = ServedBy(
            service=body.model.partition("@")[0],
            version=version.version,
            exact=predicted.exact,
            inexact_because=predicted.inexact_because,
        )
        return predicted.outputs, served

    async def _predict_several(
        self,
        body: PredictBody,
        tensors: list[NamedTensor],
        access: AccessDecision,
        key: str | None,
        how: Aggregation,
    ) -> tuple[tuple[NamedTensor, ...], ServedBy]:
        made = await self._several.predict(body.model, tensors, access, key, how)
        served = ServedBy(
            service=body.model.partition("@")[0],
            version="+".join(dict.fromkeys(each.version for each in made.versions)),
            exact=made.exact,
            inexact_because=made.inexact_because,
            aggregation=made.by,
        )
        return made.outputs, served

    async def embed(self, text: bytes, allow: Allow, key: str | None) -> TextVectors:
        """The vectors of this body's texts."""
        body = await self.decoded(len(text), read_request, EmbeddingsBody, text)
        access = await allow(service_of(body.model))
        return await embed(self.operations, body, access, key)

    def _usual(self, model: str) -> Aggregation | None:
        """What the file of the service's stable version says; nothing where the request names a version.

        Versions that it names and that are no longer there are left out: who asks has named none.
        """
        service = self.operations.book.get(model)
        stable = None if service is None or service.stable is None else service.version(service.stable)
        how = None if stable is None else self.operations.aggregation_of(stable)
        if service is None or how is None or not isinstance(how.over, tuple):
            return how
        there = tuple(name for name in how.over if service.version(name) is not None)
        return how.model_copy(update={"over": there}) if there else None


def service_of(model: str) -> str:
    """The name to check rights for. A text that no service can have is refused as an unknown model."""
    service = model.partition("@")[0]
    if not service or not service.replace("-", "").replace("_", "").isalnum() or not service.isascii():
        raise NotFound(f"the model {model!r} does not exist", reason="model_not_found", param="model")
    return service


def headers_of(served: ServedBy) -> dict[str, str]:
    """What an answer's headers tell of who answered."""
    by = [served.version] if served.aggregation is None else served.aggregation.answered_by
    return {
        "dmsc-answered-by": ", ".join(f"{served.service}@{each}" for each in by),
        "dmsc-exact": "true" if served.exact else "false",
    }
