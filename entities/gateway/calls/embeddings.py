"""Texts in, vectors out: one single pass per text, through the version that answers (ADR-0154)."""

from __future__ import annotations

import asyncio
import base64
from array import array

from entities.gateway.generation.operations import GenerationOperations
from entities.gateway.generation.service_book import RequestKey
from entities.gateway.generation.single_passes import because_of
from schemas.errors import BadInput
from schemas.services.completion import ServedBy
from schemas.services.embeddings import EmbeddingsBody, TextVector, TextVectors, VectorUsage
from schemas.services.prediction import NamedTensor, Predicted
from schemas.signals import AccessDecision

AT_ONCE = 16
"""Texts of one request that are computed at a time."""


async def embed(
    operations: GenerationOperations, body: EmbeddingsBody, access: AccessDecision, key: str | None
) -> TextVectors:
    """The vectors of the body's texts.

    Raises:
        BadInput: a text has no tokens or too many, or the model has no vectors of texts.
        Unavailable: a stage has nobody, or the answer did not come in time.
    """
    sticky = RequestKey.of(access.user, body.user, key).text
    service, version, prompts = await operations.tokens(body.model, body.inputs, access, sticky, "input")
    room = asyncio.Semaphore(AT_ONCE)

    async def vector_of(tokens: tuple[int, ...]) -> Predicted:
        async with room:
            given = NamedTensor(
                name="tokens", dtype="int64", shape=(1, len(tokens)), data=array("q", tokens).tobytes()
            )
            return await operations.passes.anywhere(service, version, access, (given,), embed=True)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(vector_of(tokens)) for tokens in prompts]
    except ExceptionGroup as failures:
        error = failures.exceptions[0]
        if isinstance(error, BadInput):
            raise BadInput(f"{body.model}: {error.text}", reason="unsupported_model", param="model") from None
        raise error from None
    found = [task.result() for task in tasks]
    vectors = [each.outputs[0] for each in found]
    width = vectors[0].shape[-1]
    if body.dimensions not in (None, width):
        raise BadInput(
            f"dimensions: the vectors of {body.model} have {width}; leave it out",
            reason="unsupported_parameter",
            param="dimensions",
        )
    tokens = sum(map(len, prompts))
    return TextVectors(
        data=tuple(
            TextVector(index=index, embedding=_told(each, body.encoding_format))
            for index, each in enumerate(vectors)
        ),
        model=body.model,
        usage=VectorUsage(prompt_tokens=tokens, total_tokens=tokens),
        pooled=vectors[0].name,
        dmsc=ServedBy(
            service=service.service,
            version=version.version,
            exact=all(each.exact for each in found),
            inexact_because=because_of(found),
        ),
    )


def _told(vector: NamedTensor, form: str) -> tuple[float, ...] | str:
    if form == "base64":
        return base64.b64encode(vector.data).decode()
    values = array("f")
    values.frombytes(vector.data)
    return tuple(values)
