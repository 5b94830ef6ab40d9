"""Sessions: a request's way through the stages of a version, and the tokens that come of it.

A session is a microbatch that lives long: one writer (its gateway), a chain of owners (one instance of each
stage), boundary rows that the upstream owner keeps, and fences. Keys and values are a cache, never state:
whoever lacks them asks upstream for the missing rows (`RowsNeeded`), and the first stage has the tokens.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Message, Part, Time, Token
from schemas.marks import PRIVATE
from schemas.step import Member
from schemas.telemetry import SessionLoad

MOST_STOPS = 16


class Sampling(Part):
    """How a token is drawn of its logits: a pure function of these, the request and the position."""

    temperature: float = Field(0.0, ge=0, le=100, description="0: the likeliest token")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: all")
    seed: int = Field(0, ge=0, lt=1 << 63)
    logprobs: int | None = Field(None, ge=0, le=20, description="likeliest tokens to tell; None: none")
    digests: bool = Field(False, description="tell a digest of the logits of each token")
    scored: bool = Field(
        False, description="tell how likely the prompt's last tokens are, with the first one"
    )
    stop_tokens: tuple[int, ...] = Field((), max_length=MOST_STOPS, description="each ends the answer")
    draw: str = Field("", description="names the request in draws: the same one gives the same tokens")


class KeptMessage(Part):
    """A part of a request, or its answer (role `assistant`)."""

    role: str = Field(max_length=32)
    text: Annotated[str, PRIVATE]


class KeptTerms(Part):
    """The terms on which a request is kept once it is answered: its service's, and its user's consent."""

    user: Token = Field(description="pseudonym of the token's user")
    subject: Token = Field(description="pseudonym of whose request it is")
    standing: bool = Field(description="the consent was given before; else with the request")
    messages: tuple[KeptMessage, ...] = Field((), description="what was asked")
    days: int = Field(ge=1)


class Generation(Message, wire="serve.generation"):
    """A request that a gateway answers. In the bucket `generations`; whoever writes it is its one writer.

    `fence` grows with each writer: instances obey no lower one. `prompt` and texts are the user's own.
    """

    id: Token
    service: Token
    version: Token
    job: Token
    user: str
    tenant: str = ""
    writer: Token = Field(description="SID of the gateway")
    fence: int = Field(1, ge=1)
    session: int = Field(ge=0, lt=1 << 63, description="its number in waves")
    prompt: Annotated[tuple[int, ...], PRIVATE] = Field((), description="tokens")
    most_tokens: int = Field(ge=0)
    sampling: Sampling = Sampling()
    stop: Annotated[tuple[str, ...], PRIVATE] = Field(
        (), max_length=MOST_STOPS, description="texts that end the answer"
    )
    model: str = Field("", max_length=200, description="as the request named it")
    shape: Literal["completion", "chat"] = Field("completion", description="of the answer")
    usage: bool = Field(False, description="whether a stream ends with the number of tokens")
    began: Time = 0.0
    ended: Literal["", "stop", "length", "cancelled", "failed"] = ""
    keep: KeptTerms | None = Field(None, description="None: nothing of it is kept")
    mirrored: bool = Field(False, description="a copy, for a version in shadow")
    charged: int | None = Field(
        None, ge=0, description="tokens of its answer that are in its user's account; none: nor is the prompt"
    )


class BindSession(Message, wire="serve.bind"):
    """MG → MI, to each owner of a path: you work for this session from now on. Idempotent.

    A later `attempt` of the same `fence`, or a higher fence, replaces the path; rows and caches that an
    instance has stay valid, for their bits are the same on every path.
    """

    job: Token
    session: int = Field(ge=0, lt=1 << 63)
    generation: Token
    writer: Token
    fence: int = Field(ge=1)
    attempt: int = Field(ge=0)
    path: tuple[Member, ...] = Field(description="an owner of each stage, from the first")
    tokens: Annotated[tuple[int, ...], PRIVATE] = Field(description="of the prompt, and of the answer so far")
    prompt_tokens: int = Field(ge=0)
    most_tokens: int = Field(ge=0, description="of the answer")
    whole: bool = Field(
        False, description="some stage has no cache: all compute, and are sent, a session's whole history"
    )
    sampling: Sampling


class SessionBound(Message, wire="serve.bound"):
    """The instance's answer. `full`: it has no room now; `fenced`: it obeys a newer writer or attempt;
    `uncached`: it has no cache, and the binding was not `whole`.

    `cached`: rows of the session that it has keys and values of; `tokens`: of the answer, that it knows of.
    """

    session: int
    outcome: Literal["bound", "full", "fenced", "too_long", "uncached"]
    cached: int = 0
    tokens: Annotated[tuple[int, ...], PRIVATE] = ()
    load: SessionLoad = SessionLoad()
    text: str = ""


class EndSession(Message, wire="serve.end"):
    """MG → MI: forget this session; its client has its answer, or is gone. Idempotent."""

    job: Token
    session: int
    fence: int


class RowsNeeded(Message, wire="serve.need"):
    """MI → MI, upstream: of this session I have rows up to `first`; send me those from there on."""

    job: Token
    session: int
    fence: int
    attempt: int
    first: int = Field(ge=0)
    member: Member


class GeneratedToken(Part):
    """A token of a session: the one at `position` (counted from the prompt's first), and why it is last."""

    session: int
    fence: int
    position: int = Field(ge=0)
    token: Annotated[int, PRIVATE] = Field(ge=0)
    logprob: Annotated[float | None, PRIVATE] = None
    likeliest: Annotated[tuple[tuple[int, float], ...], PRIVATE] = ()
    digest: Annotated[str, PRIVATE] = Field("", description="blake2b-8 of the logits, fp32, hexadecimal")
    prompt_logprob: Annotated[float | None, PRIVATE] = Field(
        None, description="mean logarithm of the probabilities of the prompt's last tokens, if asked for"
    )
    ends: Literal["", "stop", "length"] = ""
    error: str = Field("", description="why there is none, as `bad_model_output: …`; ends the session")


class WaveTokens(Message, wire="serve.tokens"):
    """MI (last stage) → MG and MI (first stage): what came of one wave; on the stream `GENERATIONS`.

    A repetition is the same; who finds a gap in positions binds the session again, and is told the tokens.
    """

    job: Token
    member: Member
    wave: int
    tokens: tuple[GeneratedToken, ...]
    load: SessionLoad = SessionLoad()
