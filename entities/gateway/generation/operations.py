"""What services are asked: models, completions, predictions, and going on with an answer."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bus.connection import Bus
from entities.gateway.backflow.consent_rules import Said
from entities.gateway.backflow.request_keeping import RequestKeeping, with_messages
from entities.gateway.generation.answer_text import text_of
from entities.gateway.generation.held_requests import HeldRequests, HoldConfig
from entities.gateway.generation.prompts import Prompts, of_chat, of_completion, tokens_of
from entities.gateway.generation.service_book import RequestKey, ServiceBook
from entities.gateway.generation.session import GenerationSession
from entities.gateway.generation.session_keeper import SessionKeeper
from entities.gateway.generation.shadowing import Shadows
from entities.gateway.generation.single_passes import SinglePasses
from entities.gateway.generation.token_rates import TokenBuckets, TokenRate
from entities.gateway.outcomes.outcome_reports import OutcomeReports, is_judged, is_shared
from entities.gateway.outcomes.request_outcome import MEASURED, RequestDraw
from entities.tokens.byte_tokens import Tokenizer
from schemas.aggregation import AggregatedBy, Aggregation
from schemas.errors import BadInput, DmscError, NotFound, RateLimited
from schemas.services.completion import MOST_CHOICES, ChatBody, CompletionBody, SampledBody, ServedModel
from schemas.services.generation import Generation, KeptTerms, Sampling
from schemas.services.model_service import ModelService, ServedVersion
from schemas.services.prediction import NamedTensor, Predicted
from schemas.signals import AccessDecision
from schemas.step import Member

USE = "service.use"
_SEED = 1 << 63


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """`predict_s`: how long a prediction may take.

    `chat_tokens`: most tokens of a chat's answer whose request names no number. `most_shadows`: copies of
    requests that versions in shadow answer at a time.
    """

    predict_s: float = 60.0
    chat_tokens: int = 4_096
    most_shadows: int = 32
    rate: TokenRate = field(default_factory=TokenRate)
    hold: HoldConfig = field(default_factory=HoldConfig)


@dataclass(frozen=True, slots=True)
class Answering:
    """A request that is being answered: a session for each answer, `choices` per prompt, in order.

    `aggregation`: whose answer it is, if several were asked.
    """

    service: ModelService
    version: ServedVersion
    tokenizer: Tokenizer
    sessions: tuple[GenerationSession, ...]
    aggregation: AggregatedBy | None = None

    @property
    def first(self) -> Generation:
        return self.sessions[0].generation

    @property
    def is_measured(self) -> bool:
        """Whether versions are compared by it."""
        return bool(self.sessions[0].owed)

    async def begun(self, most_s: float) -> bool:
        """Waits for its first token, its end, or so long. True."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self.sessions[0].until(1)
        return True

    def cancel(self) -> None:
        """Its client is gone, or has all that it wants. Sessions that are over stay as they are."""
        for session in self.sessions:
            session.leave()


class GenerationOperations:
    """What the HTTP routes call. The bearer's right to `service.use` was checked before."""

    def __init__(
        self,
        bus: Bus,
        gateway: str,
        book: ServiceBook,
        keeper: SessionKeeper,
        prompts: Prompts,
        config: GenerationConfig = GenerationConfig(),
    ) -> None:
        self.book = book
        self.keeper = keeper
        self._bus = bus
        self._gateway = gateway
        self._prompts = prompts
        self._config = config
        self.held = HeldRequests(bus, book, keeper.is_staffed, config.hold)
        """Requests that wait for a version to start."""
        keeper.needed = self.held.needed
        self.passes = SinglePasses(bus, gateway, book, keeper, config.predict_s)
        self._rates = TokenBuckets(config.rate)
        self.outcomes = OutcomeReports(bus, gateway, self.book.living)
        self._shadows = Shadows(keeper, self.outcomes, config.most_shadows)
        self.keeping: RequestKeeping | None = None  # of whoever makes the gateway; None: nothing is kept

    def models(self) -> tuple[ServedModel, ...]:
        """Each service, and each of its versions. Raises `Unavailable` until they were read."""
        self.book.must_be_current()
        found: list[ServedModel] = []
        for service in self.book.living():
            made = int(service.created_at)
            found.append(ServedModel(id=service.service, created=made, owned_by=service.user))
            found += [
                ServedModel(
                    id=f"{service.service}@{each.version}", created=int(each.since), owned_by=service.user
                )
                for each in service.versions
            ]
        return tuple(found)

    def model(self, name: str) -> ServedModel:
        """One of `models`. Raises `NotFound` with the names that there are."""
        found = next((each for each in self.models() if each.id == name), None)
        if found is None:
            self.book.version(name, "")
            raise NotFound(f"the model {name!r} does not exist", reason="model_not_found", param="model")
        return found

    async def complete(
        self,
        body: CompletionBody,
        access: AccessDecision,
        key: str | None,
        said: Said = "",
        avoid: frozenset[Member] = frozenset(),
        hedges: bool = False,
    ) -> Answering:
        """Begins the answers to a completion. They are kept, if at all, once `keep` is called.

        Args:
            key: The request's idempotency key.
            said: What it says of being kept.
            avoid: Instances that work for the same request already.
            hedges: Whether it is begun beside another answer to the same request, which versions in shadow
                answer already.
        """
        if (answers := len(body.prompts) * body.n) > MOST_CHOICES:  # before any text is tokenized
            text = f"n: prompts times n are {answers} answers, and {MOST_CHOICES} are the most of one request"
            raise BadInput(text, param="n")
        sticky = RequestKey.of(access.user, body.user, key)
        service, version = await self._awake(*self._version(body, access, sticky), access)
        tokenizer = await self._prompts.tokenizer(version)
        prompts = await of_completion(body, tokenizer, version.vocabulary)
        sampling = self._sampling(body, access, key, tokenizer, body.logprobs)
        template = self._generation(body, access, service, version, sampling, body.max_tokens)
        draw = self.book.draw(body.model, service, version, sticky)

        def asked() -> list[list[tuple[str, str]]]:
            texts = (each if isinstance(each, str) else tokenizer.decode(each) for each in body.prompts)
            return [[("user", text)] for text in texts]

        keep = await self._terms(template, said, body.user, asked)
        return await self._begin(draw, tokenizer, template, prompts, body.n, keep, avoid, hedges)

    async def chat(
        self,
        body: ChatBody,
        access: AccessDecision,
        key: str | None,
        said: Said = "",
        avoid: frozenset[Member] = frozenset(),
        hedges: bool = False,
    ) -> Answering:
        """Begins the answers to a conversation; see `complete`."""
        sticky = RequestKey.of(access.user, body.user, key)
        service, version = await self._awake(*self._version(body, access, sticky), access)
        tokenizer = await self._prompts.tokenizer(version)
        prompt = await of_chat(body, tokenizer, version.vocabulary)
        likeliest = (body.top_logprobs or 0) if body.logprobs else None
        sampling = self._sampling(body, access, key, tokenizer, likeliest)
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if most is None:
            room = version.context - len(prompt) if version.context else self._config.chat_tokens
            most = max(1, min(room, self._config.chat_tokens))
        template = self._generation(body, access, service, version, sampling, most).model_copy(
            update={"shape": "chat"}
        )
        draw = self.book.draw(body.model, service, version, sticky)

        def asked() -> list[list[tuple[str, str]]]:
            return [[(message.role, message.text) for message in body.messages]]

        keep = await self._terms(template, said, body.user, asked)
        return await self._begin(draw, tokenizer, template, (prompt,), body.n, keep, avoid, hedges)

    async def resume(self, id: str, access: AccessDecision) -> Answering:
        """Goes on with an answer that another gateway, or another connection, began.

        Raises:
            NotFound: there is none of this user, or not any more.
            Unavailable: the services were not read yet.
        """
        self.book.must_be_current()
        session = await self.keeper.take_over(id, lambda generation: generation.user == access.user)
        generation = session.generation
        service = self.book.get(generation.service)
        version = None if service is None else service.version(generation.version)
        if service is None or version is None:
            session.cancel()
            raise NotFound(f"{generation.service}@{generation.version} is no longer there")
        tokenizer = await self._prompts.tokenizer(version)
        answering = Answering(service, version, tokenizer, (session,))
        self.keep(answering)
        return answering

    def keep(self, answering: Answering) -> None:
        """Has answers stored once they are whole, as far as the request's terms say so.

        It is called for the answer that the client gets: of those that work beside it nothing is kept.
        """
        keeping = self.keeping
        for session in answering.sessions:
            if keeping is not None and session.generation.keep is not None:
                session.on_end(partial(_keep_answer, keeping, session, answering.tokenizer))

    async def predict(
        self, model: str, inputs: Sequence[NamedTensor], access: AccessDecision, key: str | None
    ) -> tuple[ServedVersion, Predicted]:
        """What a model gives for these tensors.

        Raises:
            BadInput: the service generates tokens.
            Unavailable: a stage has nobody, or the answer did not come in time.
        """
        sticky = RequestKey.of(access.user, None, key)
        service, version = self.book.version(model, sticky.text)
        if version.kind == "generate":
            raise BadInput(f"{model} generates tokens; ask it at /v1/completions", param="model")
        service, version = await self._awake(service, version, access)
        with self.observed(self.book.draw(model, service, version, sticky)):
            answer = await self.passes.anywhere(service, version, access, inputs)
        return version, answer

    @contextmanager
    def observed(self, draw: RequestDraw) -> Iterator[None]:
        """The outcome of a prediction, which the block makes, counts for its version."""
        now = asyncio.get_running_loop().time
        try:
            yield
        except DmscError as error:
            self.outcomes.predicted(draw, now(), error)
            raise
        except asyncio.CancelledError:  # its client is gone, and has waited so long
            self.outcomes.predicted(draw, now())
            raise
        self.outcomes.predicted(draw, now())

    async def tokens(
        self,
        model: str,
        texts: Sequence[str | tuple[int, ...]],
        access: AccessDecision,
        key: str,
        param: str,
    ) -> tuple[ModelService, ServedVersion, tuple[tuple[int, ...], ...]]:
        """The tokens of texts for the version that answers `model`; they count towards the user's rate.

        `key`: whose requests stay with one version. `param`: what errors name.
        """
        self._check_rate(access)
        service, version = await self._awake(*self.book.version(model, key), access)
        tokenizer = await self._prompts.tokenizer(version)
        found = await tokens_of(texts, tokenizer, version.vocabulary, param)
        for tokens in found:
            _check_length(len(tokens), 0, version)
        self._rates.charge(access.user, sum(map(len, found)), time.monotonic())
        return service, version, found

    def chosen(
        self, body: SampledBody, access: AccessDecision, key: str
    ) -> tuple[ModelService, ServedVersion]:
        """The version that answers this request, which may be idle: always the same one for its user, or its
        key.

        Raises:
            RateLimited: the user has had more tokens than the rate allows.
            BadInput: the version takes tensors.
        """
        return self._version(body, access, RequestKey.of(access.user, body.user, key))

    def aggregation_of(self, version: ServedVersion) -> Aggregation | None:
        """What the version's file says of several answers."""
        serve = self._prompts.serve_spec(version)
        return None if serve is None else serve.aggregation

    # --- parts ----------------------------------------------------------------------------------------------
    async def _awake(
        self, service: ModelService, version: ServedVersion, access: AccessDecision
    ) -> tuple[ModelService, ServedVersion]:
        """The version once it has instances: one that gave its slots back starts with this request.

        Raises:
            Unavailable: it did not start in time, or too many requests wait already.
        """
        return await self.held.until_awake(service, version, access.user)

    def _version(
        self, body: SampledBody, access: AccessDecision, key: RequestKey
    ) -> tuple[ModelService, ServedVersion]:
        self._check_rate(access)
        service, version = self.book.version(body.model, key.text)
        if version.kind == "predict":
            raise BadInput(f"{body.model} takes tensors; ask it at /v1/predict", param="model")
        return service, version

    def _check_rate(self, access: AccessDecision) -> None:
        wait_s = self._rates.wait_s(access.user, time.monotonic())
        if wait_s > 0:
            raise RateLimited(
                f"{access.user} has had more tokens than {self._config.rate.per_s:g} a second allow",
                retry_after_s=wait_s,
            )

    def _sampling(
        self,
        body: SampledBody,
        access: AccessDecision,
        key: str | None,
        tokenizer: Tokenizer,
        likeliest: int | None,
    ) -> Sampling:
        if body.seed is not None:
            seed = body.seed % _SEED
        elif key is not None:  # a repetition of the request gets the same answer
            seed = int.from_bytes(hashlib.sha256(f"{access.user}\0{key}".encode()).digest()[:8]) % _SEED
        else:
            seed = secrets.randbits(62) if body.temperature else 0
        return Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=seed,
            logprobs=likeliest,
            digests=body.digests,
            stop_tokens=tokenizer.stop_tokens,
        )

    def _generation(
        self,
        body: SampledBody,
        access: AccessDecision,
        service: ModelService,
        version: ServedVersion,
        sampling: Sampling,
        most_tokens: int,
    ) -> Generation:
        """All of a request's generations but their ids, prompts and draws."""
        return Generation(
            id="none",
            service=service.service,
            version=version.version,
            job=version.job,
            user=access.user,
            tenant=service.tenant,
            writer=self._gateway,
            session=0,
            most_tokens=most_tokens,
            sampling=sampling.model_copy(update={"scored": is_judged(service)}),
            stop=body.stops,
            model=body.model,
            usage=body.include_usage,
            began=time.time(),
        )

    async def _begin(
        self,
        draw: RequestDraw,
        tokenizer: Tokenizer,
        template: Generation,
        prompts: Sequence[tuple[int, ...]],
        choices: int,
        keep: Sequence[KeptTerms | None],
        avoid: frozenset[Member],
        hedges: bool,
    ) -> Answering:
        for prompt in prompts:
            _check_length(len(prompt), template.most_tokens, draw.version)
        generations = [
            template.model_copy(
                update={
                    **_new_names(),
                    "prompt": prompt,
                    "sampling": template.sampling.model_copy(update={"draw": str(choice)}),
                    "keep": keep[place] if keep else None,
                }
            )
            for place, prompt in enumerate(prompts)
            for choice in range(choices)
        ]
        now = time.monotonic()
        self._rates.charge(template.user, sum(len(each.prompt) for each in generations), now)
        begun = await _all_or_cancelled([self.keeper.begin(each, avoid) for each in generations])
        sessions = tuple(each for each in begun if isinstance(each, GenerationSession))
        answering = Answering(draw.service, draw.version, tokenizer, sessions)
        for session in sessions[:1]:  # one draw, one outcome
            session.on_over(partial(self.outcomes.ended, draw))
            session.owed = MEASURED if draw.is_drawn and is_shared(draw.service) else 0
        try:
            for each in begun:
                if isinstance(each, BaseException):
                    raise each
            for session in sessions:
                await session.started()
        except BaseException:
            answering.cancel()
            raise
        if not hedges:
            self._shadows.mirror(draw, sessions[::choices])
        for session in sessions:
            session.on_end(lambda tokens: self._rates.charge(template.user, tokens, time.monotonic()))
        return answering

    async def _terms(
        self,
        template: Generation,
        said: Said,
        subject: str | None,
        asked: Callable[[], list[list[tuple[str, str]]]],
    ) -> tuple[KeptTerms | None, ...]:
        """The terms on which each of a request's prompts is kept; none: nothing of it is."""
        terms = None if self.keeping is None else await self.keeping.terms(template, said, subject)
        return () if terms is None else tuple(with_messages(terms, messages) for messages in asked())


def _keep_answer(
    keeping: RequestKeeping, session: GenerationSession, tokenizer: Tokenizer, tokens: int
) -> None:
    """An answer that failed, or that its client left, is not kept: nobody has seen it as it is.

    One whose client left becomes whole all the same where its version is judged by it.
    """
    if session.finished is not None and session.finished.ended in ("stop", "length") and not session.is_left:
        generation = session.generation
        keeping.take(generation, partial(text_of, session.tokens, tokenizer, generation.stop))


def _new_names() -> dict[str, Any]:
    return {"id": secrets.token_hex(16), "session": secrets.randbits(62)}


async def _all_or_cancelled(
    work: list[Coroutine[Any, Any, GenerationSession]],
) -> list[GenerationSession | BaseException]:
    """The sessions that begin. If the client leaves meanwhile, they begin all the same, and then end."""
    begun = asyncio.gather(*work, return_exceptions=True)
    try:
        return await asyncio.shield(begun)
    except asyncio.CancelledError:
        begun.add_done_callback(_cancel_each)
        raise


def _cancel_each(begun: asyncio.Future[list[GenerationSession | BaseException]]) -> None:
    for session in () if begun.cancelled() else begun.result():
        if isinstance(session, GenerationSession):
            session.cancel()


def _check_length(prompt: int, answer: int, version: ServedVersion) -> None:
    if version.context and prompt + answer > version.context:
        raise BadInput(
            f"this model's context is {version.context} tokens, and {prompt + answer} are asked for "
            f"({prompt} in the prompt, {answer} for the answer); shorten one of them",
            reason="context_length_exceeded",
            param="prompt",
        )
