"""Several versions or replicas of a service are asked, and one answer comes of it (ADR-0153)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from entities.gateway.backflow.consent_rules import Said
from entities.gateway.calls.answers import whole_answer
from entities.gateway.calls.asking_several import Ask, gathered, hedged
from entities.gateway.calls.latencies import ServiceLatencies
from entities.gateway.generation.operations import Answering, GenerationOperations
from entities.gateway.generation.service_book import ANSWERING, RequestKey
from entities.gateway.generation.session_machine import Path
from entities.gateway.generation.single_passes import because_of
from schemas.aggregation import MOST_ASKED, AggregatedBy, Aggregation
from schemas.errors import BadInput, NotFound, Unavailable
from schemas.services.completion import ChatBody, ChatCompletion, Completion, CompletionBody
from schemas.services.model_service import ModelService, ServedVersion
from schemas.services.prediction import NamedTensor, Predicted
from schemas.signals import AccessDecision
from schemas.step import Member

TextBody = CompletionBody | ChatBody


@dataclass(frozen=True, kw_only=True)
class AggregationConfig:
    """When another one is asked beside the first, in seconds."""

    hedge_s: float = 1.0  # until the service's p95 is known
    least_hedge_s: float = 0.02  # a service that answers sooner is asked twice at most this early


@dataclass(frozen=True, slots=True)
class AggregatedPrediction:
    """What a prediction came to. `versions`: those whose answers are in it; `exact`: all of these are."""

    versions: tuple[ServedVersion, ...]
    exact: bool
    inexact_because: str
    outputs: tuple[NamedTensor, ...]
    by: AggregatedBy


class AggregatedCalls:
    """Asks several. The bearer's right to use the service was checked before."""

    def __init__(
        self, operations: GenerationOperations, config: AggregationConfig = AggregationConfig()
    ) -> None:
        self._operations = operations
        self._config = config
        self._latencies = ServiceLatencies()

    @contextmanager
    def _timed(self, service: str) -> Iterator[None]:
        """The block's time is one of the service's; an answer that is cancelled would have taken so long."""
        began = time.monotonic()
        try:
            yield
        except asyncio.CancelledError:
            self._latencies.add(service, time.monotonic() - began)
            raise
        self._latencies.add(service, time.monotonic() - began)

    # --- tensors --------------------------------------------------------------------------------------------
    async def predict(
        self,
        model: str,
        tensors: Sequence[NamedTensor],
        access: AccessDecision,
        key: str | None,
        how: Aggregation,
    ) -> AggregatedPrediction:
        """What several answers to these tensors amount to.

        Raises:
            BadInput: the service generates tokens, or its outputs can't be mixed.
            Unavailable: fewer than `min_voters` answered in time.
        """
        operations, sticky = self._operations, RequestKey.of(access.user, None, key)
        service, version = operations.book.version(model, sticky.text)
        if version.kind == "generate":
            raise BadInput(f"{model} generates tokens; ask it at /v1/completions", param="model")
        if how.over != "replicas":  # a version that is asked beside others was not drawn: nobody judges by it
            versions, weights = _versions(service, model, how)
            asks: dict[str, Ask[Predicted]] = {
                name: partial(self._pass, service, each, access, None, tensors)
                for name, each in versions.items()
            }
            return await self._predicted(service, how, asks, versions, weights)
        service, version = await operations.held.until_awake(service, version, access.user)
        with operations.observed(operations.book.draw(model, service, version, sticky)):
            paths = operations.passes.paths_of(service, version, access)[:MOST_ASKED]
            asks = {
                f"{version.version}#{number}": partial(self._pass, service, version, access, path, tensors)
                for number, path in enumerate(paths)
            }
            replicas, alike = dict.fromkeys(asks, version), dict.fromkeys(asks, 1.0)
            return await self._predicted(service, how, asks, replicas, alike)

    async def _predicted(
        self,
        service: ModelService,
        how: Aggregation,
        asks: Mapping[str, Ask[Predicted]],
        versions: Mapping[str, ServedVersion],
        weights: Mapping[str, float],
    ) -> AggregatedPrediction:
        """What these answers amount to. `versions`, `weights`: of each one who is asked."""
        if how.how == "first":
            number, predicted = await hedged([*asks.values()], self._hedge_s(service))
            name = [*asks][number]
            by = AggregatedBy(how="first", answered_by=(name,), shares={name: 1.0})
            because = predicted.inexact_because
            return AggregatedPrediction((versions[name],), predicted.exact, because, predicted.outputs, by)
        answers, errors = await gathered(asks, how.wait_s)
        if errors and not answers:
            raise next(iter(errors.values()))
        outputs = {name: each.outputs for name, each in answers.items()}
        mixed, by = await asyncio.to_thread(_combined, how, outputs, weights, tuple(asks))
        exact = all(each.exact for each in answers.values())
        because = because_of(answers.values())
        answered = tuple(versions[name] for name in by.answered_by)
        return AggregatedPrediction(answered, exact, because, mixed, by)

    async def _pass(
        self,
        service: ModelService,
        version: ServedVersion,
        access: AccessDecision,
        path: Path | None,
        tensors: Sequence[NamedTensor],
    ) -> Predicted:
        """What these instances give; without a path the version's with the most room, once it is awake."""
        operations = self._operations
        if path is None:
            service, version = await operations.held.until_awake(service, version, access.user)
            if version.state not in ANSWERING:
                text = f"{service.service}@{version.version} is {version.state}"
                raise Unavailable(text, retry_after_s=1.0)
            path = operations.passes.paths_of(service, version, access)[0]
        with self._timed(service.service):
            return await operations.passes.through(service, version, access, path, tensors)

    def _hedge_s(self, service: ModelService) -> float:
        known = self._latencies.p95_s(service.service)
        return self._config.hedge_s if known is None else max(self._config.least_hedge_s, known)

    # --- texts ----------------------------------------------------------------------------------------------
    async def first(
        self, body: TextBody, access: AccessDecision, key: str | None, how: Aggregation, said: Said
    ) -> Answering:
        """Begins an answer, and another beside it wherever the first token takes longer than the service's
        95th percentile; the one whose first token comes first goes on.
        """
        key = key or secrets.token_hex(16)  # all of them draw the same
        service, version = self._operations.chosen(body, access, key)
        asks: dict[str, Ask[Answering]] = {}
        if how.over == "replicas":
            service, version = await self._operations.held.until_awake(service, version, access.user)
            paths = self._operations.passes.paths_of(service, version, access)[:MOST_ASKED]
            everyone = frozenset(member for path in paths for member in path)
            for number, path in enumerate(paths):
                avoid = everyone.difference(path)
                ask = partial(self._begun, service, body, access, key, said, avoid, hedges=number > 0)
                asks[f"{version.version}#{number}"] = ask
        else:
            for name in _versions(service, body.model, how)[0]:
                pinned = body.model_copy(update={"model": f"{service.service}@{name}"})
                hedges = bool(asks)
                ask = partial(self._begun, service, pinned, access, key, said, frozenset(), hedges=hedges)
                asks[name] = ask
        number, answering = await hedged([*asks.values()], self._hedge_s(service), Answering.cancel)
        name = [*asks][number]
        by = AggregatedBy(how="first", answered_by=(name,), shares={name: 1.0})
        return replace(answering, aggregation=by)

    async def _begun(
        self,
        service: ModelService,
        body: TextBody,
        access: AccessDecision,
        key: str,
        said: Said,
        avoid: frozenset[Member],
        *,
        hedges: bool = False,
    ) -> Answering:
        with self._timed(service.service):
            if isinstance(body, ChatBody):
                answering = await self._operations.chat(body, access, key, said, avoid, hedges)
            else:
                answering = await self._operations.complete(body, access, key, said, avoid, hedges)
            try:
                for session in answering.sessions:
                    await session.spoken()
            except BaseException:
                answering.cancel()
                raise
        return answering

    async def vote(
        self, body: TextBody, access: AccessDecision, key: str | None, how: Aggregation
    ) -> Completion | ChatCompletion:
        """The whole answer of the heaviest version whose choice won.

        Raises:
            BadInput: the request is none that can be voted on.
            Unavailable: fewer than `min_voters` answered in time.
        """
        if why := no_vote(body, how):
            raise BadInput(f"aggregation: {why}", reason="unsupported_parameter", param="aggregation")
        key = key or secrets.token_hex(16)
        service, _ = self._operations.chosen(body, access, key)
        versions, weights = _versions(service, body.model, how)
        asks: dict[str, Ask[Completion | ChatCompletion]] = {
            name: partial(
                self._whole,
                service,
                body.model_copy(update={"model": f"{service.service}@{name}"}),
                access,
                key,
            )
            for name in versions
        }
        answers, errors = await gathered(asks, how.wait_s)
        if errors and not answers:
            raise next(iter(errors.values()))
        texts = {name: text_of(answer) for name, answer in answers.items()}
        winner, by = await asyncio.to_thread(_elected, how, texts, weights, tuple(versions))
        won = answers[winner]
        served = won.dmsc.model_copy(update={"aggregation": by})
        return won.model_copy(update={"model": body.model, "dmsc": served})

    async def _whole(
        self, service: ModelService, body: TextBody, access: AccessDecision, key: str
    ) -> Completion | ChatCompletion:
        return await whole_answer(await self._begun(service, body, access, key, "none", frozenset()))


def no_vote(body: TextBody, how: Aggregation) -> str:
    """Why answers to this request are not voted on; empty if they are."""
    if how.how in ("weighted", "attention"):
        return f"{how.how} mixes distributions of /v1/predict; for texts there are first and vote"
    if how.over == "replicas":
        return "replicas of a version give the same text; vote over versions"
    if body.stream:
        return "a vote is over once all have answered; leave out stream"
    if body.temperature or body.n > 1:
        return "only likeliest texts are voted on; set temperature to 0 and n to 1"
    if isinstance(body, CompletionBody) and len(body.prompts) > 1:
        return "one prompt at a time is voted on"
    return ""


def text_of(answer: Completion | ChatCompletion) -> str:
    if isinstance(answer, Completion):
        return answer.choices[0].text
    return answer.choices[0].message.content


def _versions(
    service: ModelService, model: str, how: Aggregation
) -> tuple[dict[str, ServedVersion], dict[str, float]]:
    """The versions that are asked, by name, and their weights.

    Raises:
        NotFound: the request names one that there is not.
        BadInput: `model` names one version alone.
    """
    if "@" in model:
        raise BadInput(
            f"aggregation: {model} is one version; name the service alone, or aggregate over replicas",
            param="aggregation",
        )
    named = how.over if isinstance(how.over, tuple) else None
    shares = service.weights
    # The heaviest is asked first where the first answer counts; sums go by name anyway.
    sharing = [name for name in shares if shares[name]]
    names = named or tuple(sorted(sharing, key=lambda name: (-shares[name], name)))
    found: dict[str, ServedVersion] = {}
    for name in names:
        version = service.version(name)
        if version is None:
            there = ", ".join(each.version for each in service.versions) or "none"
            raise NotFound(
                f"aggregation.over: {service.service} has no version {name}; there are: {there}",
                reason="model_not_found",
                param="aggregation",
            )
        found[name] = version
    if not found:
        raise Unavailable(f"service {service.service} gives no version traffic", retry_after_s=2.0)
    # Who is named has the same say, whatever share of traffic it gets: a canary has hardly any.
    return found, {name: 1.0 if named else float(shares[name]) for name in found}


def _combined(
    how: Aggregation,
    outputs: Mapping[str, Sequence[NamedTensor]],
    weights: Mapping[str, float],
    asked: Sequence[str],
) -> tuple[tuple[NamedTensor, ...], AggregatedBy]:
    from entities.gateway.calls.combining import combined  # numpy, which other gateways need not load

    return combined(how, outputs, weights, asked)


def _elected(
    how: Aggregation, texts: Mapping[str, str], weights: Mapping[str, float], asked: Sequence[str]
) -> tuple[str, AggregatedBy]:
    """The heaviest version whose choice won, and what is told of the vote."""
    from entities.gateway.calls.combining import answered_by
    from entities.services.aggregation import EXTRACTORS, VersionAnswer, vote

    extract = EXTRACTORS[how.extract]
    answers = [
        VersionAnswer(version=name, value=text, weight=weights[name]) for name, text in sorted(texts.items())
    ]
    result = vote(answers, asked, choice_of=extract, min_voters=how.min_voters)
    winners = [each for each in answers if extract(each.value) == result.value]
    winner = min(winners, key=lambda each: (-each.weight, each.version))
    return winner.version, answered_by(how, result)
