"""Requests and answers of the completion doors, in OpenAI's shapes (API of 2024 and later).

What is not here is refused by name: a parameter that is ignored changes an answer, and nobody learns of it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from schemas.aggregation import AggregatedBy, Aggregation
from schemas.base import Part
from schemas.services.generation import MOST_STOPS

MOST_CHOICES = 16
"""Most answers of one request: prompts times `n`."""
MOST_ANSWER_TOKENS = 1 << 20
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
PromptTokens = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


class StreamOptions(Part):
    include_usage: bool = False


class SampledBody(Part):
    """What both kinds of request have. With a `seed` the same request has the same answer."""

    model: ModelName = Field(description="a service, or one version of it: SERVICE@VERSION")
    temperature: float = Field(1.0, ge=0, le=100, description="0: the likeliest token")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: all; not in OpenAI's API")
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[tuple[StopText, ...], Field(max_length=MOST_STOPS)] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    user: str | None = Field(None, max_length=200, description="whose requests go to one version; not logged")
    digests: bool = Field(False, description="tell a digest of the logits of each token; not in OpenAI's API")
    aggregation: Aggregation | None = Field(
        None, description="`first` or `vote`: several are asked; not in OpenAI's API"
    )

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(SampledBody):
    """`POST /v1/completions`. `prompt`: a text, tokens, or several of either."""

    prompt: str | PromptTokens | Annotated[tuple[str | PromptTokens, ...], Field(min_length=1)]
    max_tokens: int = Field(16, ge=0, le=MOST_ANSWER_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if all(isinstance(token, int) for token in self.prompt):
            return (self.prompt,)  # type: ignore[return-value]  # all of them are tokens
        return self.prompt  # type: ignore[return-value]  # none of them is one


class TextPart(Part):
    type: Literal["text"]
    text: str


class ChatMessage(Part):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[TextPart, ...]
    name: str | None = Field(None, max_length=200)

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(each.text for each in self.content)


class ChatBody(SampledBody):
    """`POST /v1/chat/completions`. `max_completion_tokens` goes before its older name, `max_tokens`."""

    messages: Annotated[tuple[ChatMessage, ...], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=0, le=MOST_ANSWER_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=0, le=MOST_ANSWER_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


# --- answers ------------------------------------------------------------------------------------------------


class TokenUsage(Part):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ServedBy(Part):
    """Who answered. `exact`: the bits are independent of company, replicas and kills; else `inexact_because`.

    `generation` names a stream that any gateway goes on with (`GET /v1/generations/{id}/events`).
    """

    service: str
    version: str
    exact: bool = False
    inexact_because: str = ""
    generation: str = ""
    digests: tuple[str, ...] | None = Field(None, description="of the logits of each token, if asked for")
    aggregation: AggregatedBy | None = Field(
        None, description="whose answers are in it, if several were asked"
    )


class TextLogprobs(Part):
    tokens: tuple[str, ...] = ()
    token_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[str, float], ...] | None = None
    text_offset: tuple[int, ...] = ()


class TextChoice(Part):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class Completion(Part):
    """An answer, or a piece of one in a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[TextChoice, ...]
    usage: TokenUsage | None = None
    dmsc: ServedBy


class LikelyToken(Part):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None


class ChatToken(LikelyToken):
    top_logprobs: tuple[LikelyToken, ...] = ()


class ChatLogprobs(Part):
    content: tuple[ChatToken, ...]
    refusal: None = None


class AnswerMessage(Part):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Part):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(Part):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChatChoice, ...]
    usage: TokenUsage
    dmsc: ServedBy


class MessageDelta(Part):
    role: Literal["assistant"] | None = None
    content: str | None = None


class DeltaChoice(Part):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class ChatChunk(Part):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[DeltaChoice, ...]
    usage: TokenUsage | None = None
    dmsc: ServedBy


class ServedModel(Part):
    """A service, or one version of it, as OpenAI's list of models has it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ServedModels(Part):
    object: Literal["list"] = "list"
    data: tuple[ServedModel, ...]
