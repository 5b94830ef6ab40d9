"""Functional modules for clients: which ones run, their state and figures, and their suggestions."""

from __future__ import annotations

import re

from pydantic import Field

from schemas.base import Message, Part, Token
from schemas.observation import Observation
from schemas.policy import ModuleOp, ModuleState, PolicySuggestion

ACTIVE = "active"
"""In the place of a version: the active version."""


def version_token(version: str) -> str:
    """A version, which may be any text, as one subject token."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", version)[:120] or "-"


class ModuleQuery(Message, wire="policy.query"):
    """MG → SMO: list the functional modules."""


class ModuleStatus(Part):
    """One version of a module, with the orchestrators' counts.

    Strikes count its errors: invalid suggestions, suggestions over its rate, outdated suggestions, crashes.
    """

    module: Token
    version: str
    sid: Token | None = None
    state: ModuleState
    alive: bool = Field(True, description="whether the registry knows it as running")
    jobs: tuple[Token, ...] = Field((), description="enabled for these; empty: all")
    without: tuple[Token, ...] = Field((), description="disabled for these")
    suggestions: int = 0
    adopted: int = 0
    declined: int = 0
    strikes: int = 0
    crashes: int = 0
    suspended_s: float = Field(0.0, description="seconds until it is listened to again")
    reason: str = Field("", description="why it is suspended, or what it said of its state")
    drift: str = Field("", description="why what it learnt no longer fits what happens; empty: it does")


class ModuleList(Message, wire="policy.modules"):
    """Modules in order of name and version."""

    modules: tuple[ModuleStatus, ...]


class ModuleQuestion(Message, wire="policy.question"):
    """Asks a module what it would suggest for a job now (draft §4.2: the output interface, synchronous).

    `inputs` are given to the policy as observations before it answers. They are on no stream: an observation
    that is to be remembered must be posted instead.
    """

    job: Token
    inputs: tuple[Observation, ...] = Field((), max_length=1000)


class ModuleAnswer(Message, wire="policy.answer"):
    """The module's present suggestions. They do not go to the orchestrator: asking changes nothing."""

    module: Token
    version: str
    state: ModuleState
    job: Token
    suggestions: tuple[PolicySuggestion, ...] = ()
    reason: str = Field("", description="why there are none")
    took_ms: float = 0.0


class OrderBody(Part):
    """The body of `POST /v1/policies/{module}/orders`."""

    op: ModuleOp
    version: str | None = Field(None, description="none: the only one that runs")
    jobs: tuple[Token, ...] = ()
    reason: str = Field("", max_length=400)


class QuestionBody(Part):
    """The body of `POST /v1/policies/{module}/questions`."""

    job: Token
    version: str | None = Field(None, description="none: the active one")
    inputs: tuple[Observation, ...] = Field((), max_length=1000)
