"""Requests to model services: answers token by token or whole, and tensors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from dmsc.client.gateway_requests import Gateways
from schemas.errors import BadInput
from schemas.services.calls import CallAnswered, CallsAnswered
from schemas.services.completion import (
    Completion,
    ServedModel,
    ServedModels,
    TextChoice,
    TextLogprobs,
)
from schemas.services.embeddings import TextVectors

HowMany = str | Mapping[str, Any]
"""An aggregation: its name, or a mapping with `how`, `over`, `min_voters` (docs/serving.md)."""
GOES_ON = "/v1/generations/{id}/events"
HEADER = "dmsc-generation"
CONSENT = "dmsc-consent"


class GenerationCalls:
    """A part of `AsyncClient`. OpenAI's own client works at the same gateways, for chats too."""

    _gateways: Gateways

    async def served_models(self) -> list[ServedModel]:
        """The model services, and each version of them as SERVICE@VERSION."""
        return list((await self._gateways.ask_for(ServedModels, "GET", "/v1/models")).data)

    async def ask(
        self,
        model: str,
        prompt: str | Sequence[int],
        *,
        tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        digests: bool = False,
        aggregation: HowMany | None = None,
        user: str | None = None,
        consent: bool | None = None,
    ) -> AsyncGenerator[Completion, None]:
        """Yield an answer's pieces as they come, each once, whichever gateways and instances die meanwhile.

        Args:
            model: A service, or one version of it as SERVICE@VERSION.
            prompt: A text, or tokens.
            tokens: The most tokens of the answer.
            temperature: 0 gives the likeliest tokens; above 0 they are drawn, by `seed` if there is one.
            top_p: Draw from the likeliest tokens that have this probability together.
            stop: Texts that end the answer.
            logprobs: How many of the likeliest tokens to tell at each place.
            digests: Tell a digest of the logits of each token.
            aggregation: `first`: another instance is asked beside a slow one.
            user: Whom you ask for: one user's requests go to one version.
            consent: Whether this request may be kept and trained on, if the service keeps requests; None: as
                `give_consent` said before, and else not.

        Raises:
            NotFound: there is no such service or version.
            BadInput: the prompt and the answer are longer than the model's context.
        """
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "stop": list(stop) or None,
            "logprobs": logprobs,
            "digests": digests,
            "aggregation": aggregation,
            "user": user,
            "stream": True,
        }
        said = {} if consent is None else {CONSENT: "train" if consent else "none"}
        answering = self._gateways.answer("/v1/completions", body, GOES_ON, HEADER, said)
        async with aclosing(answering) as pieces:
            async for data in pieces:
                yield Completion.model_validate_json(data)

    async def complete(
        self,
        model: str,
        prompt: str | Sequence[int],
        *,
        tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        digests: bool = False,
        aggregation: HowMany | None = None,
        user: str | None = None,
        consent: bool | None = None,
    ) -> Completion:
        """The whole answer; see `ask`. `aggregation`: also `vote` of versions; nothing of a vote is kept.

        Raises:
            BadInput: consent is given to a vote.
        """
        asked: dict[str, Any] = {
            "tokens": tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "stop": stop,
            "logprobs": logprobs,
            "digests": digests,
            "aggregation": aggregation,
            "user": user,
        }
        how = aggregation if isinstance(aggregation, str | None) else aggregation.get("how")
        if how in (None, "first"):
            pieces = self.ask(model, prompt, consent=consent, **asked)
            return joined([piece async for piece in pieces])
        if consent:
            raise BadInput(f"consent: nothing of aggregation {how} is kept; leave one of them out")
        body = {"model": model, "prompt": prompt if isinstance(prompt, str) else list(prompt), **asked}
        body["max_tokens"] = body.pop("tokens")
        body["stop"] = list(stop) or None
        return await self._gateways.ask_for(Completion, "POST", "/v1/completions", body)

    async def predict(
        self, model: str, inputs: Mapping[str, Any], *, aggregation: HowMany | None = None
    ) -> dict[str, Any]:
        """The outputs of a model for named inputs, by name.

        Args:
            inputs: Nested lists of numbers, or mappings with dtype, shape and data (base64).
            aggregation: `first`, `vote` (gives `choice`), `weighted` or `attention` (give `probabilities`).
        """
        body = {"model": model, "inputs": dict(inputs), "aggregation": aggregation}
        answer = await self._gateways.ask("POST", "/v1/predict", body)
        return {
            name: value["data"] if value.get("values") is None else value["values"]
            for name, value in answer["outputs"].items()
        }

    async def embed(self, model: str, texts: str | Sequence[str]) -> list[list[float]]:
        """The vectors of texts, in their order. Raises `BadInput` if the model has none."""
        body = {"model": model, "input": texts if isinstance(texts, str) else list(texts)}
        answer = await self._gateways.ask_for(TextVectors, "POST", "/v1/embeddings", body)
        return [[float(value) for value in each.embedding] for each in answer.data]

    async def aggregate(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]], *, wait_s: float = 60.0
    ) -> list[CallAnswered]:
        """Up to 16 calls in one request; each answer has a status of its own, and raises nothing.

        Args:
            calls: Path (`/v1/completions`, `/v1/chat/completions`, `/v1/predict`, `/v1/embeddings`) and body.
            wait_s: A call without an answer by then has the status 504.
        """
        body = {"calls": [{"path": path, "body": dict(body)} for path, body in calls], "wait_s": wait_s}
        return list((await self._gateways.ask_for(CallsAnswered, "POST", "/v1/aggregate", body)).answers)


def joined(pieces: Sequence[Completion]) -> Completion:
    """The answer that these pieces make."""
    choices = [piece.choices[0] for piece in pieces]
    told = [choice.logprobs for choice in choices if choice.logprobs is not None]
    logprobs = None
    if told:
        rivals = [each.top_logprobs for each in told if each.top_logprobs is not None]
        logprobs = TextLogprobs(
            tokens=tuple(token for each in told for token in each.tokens),
            token_logprobs=tuple(value for each in told for value in each.token_logprobs),
            top_logprobs=tuple(value for each in rivals for value in each) if rivals else None,
            text_offset=tuple(value for each in told for value in each.text_offset),
        )
    last = pieces[-1]
    choice = TextChoice(
        index=0,
        text="".join(choice.text for choice in choices),
        logprobs=logprobs,
        finish_reason=choices[-1].finish_reason,
    )
    digests = [digest for piece in pieces for digest in piece.dmsc.digests or ()]
    served = last.dmsc.model_copy(update={"digests": tuple(digests) or None})
    return last.model_copy(update={"choices": (choice,), "dmsc": served})
