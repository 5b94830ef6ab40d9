"""What one wave computes, on the compute thread: the layers, then tokens and their digests (ADR-0144)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bus.logs import get_logger
from schemas.errors import BadModelOutput
from schemas.services.generation import GeneratedToken, Sampling
from workers.serving.retained_rows import Boundary
from workers.serving.runtime.session_table import WaveRows
from workers.serving.sampler import Logits, TokenChoice, sample
from workers.serving.stage_model import StageItem, StageModel, StageOutput, logits_digest
from workers.user_code import describe

log = get_logger("serving")


@dataclass(frozen=True, slots=True)
class WavePart:
    """An item of a wave with its rows: first stage: (rows,) int64 tokens; others: what came."""

    item: WaveRows
    rows: Boundary


@dataclass(frozen=True, slots=True)
class ComputedPart:
    """What came of a part.

    Attributes:
        item: The item.
        boundary: What the next stage takes; empty behind the last.
        drawn: Last stage: the token behind each wanted row; whether it is the last one is not known here.
        scores: Last stage: logarithms of the probabilities of tokens of the prompt, where they are wanted.
        error: Why there is nothing; empty: there is.
    """

    item: WaveRows
    boundary: Boundary = ()
    drawn: tuple[GeneratedToken, ...] = ()
    scores: tuple[float, ...] = ()
    error: str = ""


class ServingStage:
    """A stage's model, and what is done with its logits. All methods run on the compute thread."""

    def __init__(self, model: StageModel) -> None:
        self.model = model

    def compute(self, parts: Sequence[WavePart]) -> list[ComputedPart]:
        """Computes a wave. Where that fails, each part is tried alone: one request must not end others."""
        try:
            return self._compute(parts)
        except Exception as error:  # the model's own code may raise anything
            if len(parts) == 1:
                log.error("a session's rows can't be computed", reason=describe(error))
                return [ComputedPart(parts[0].item, error=f"bad_model_output: {describe(error)}")]
        return [found for part in parts for found in self.compute([part])]

    def _compute(self, parts: Sequence[WavePart]) -> list[ComputedPart]:
        cache = self.model.cache
        for part in parts:
            session = part.item.session
            # the machine has counted its room; a repeated wave overwrites what a failed one left
            cache.reserve(str(session.number), session.most_tokens)
            cache.truncate(str(session.number), part.item.first)
        items = [
            StageItem(str(part.item.session.number), part.item.first, part.rows, part.item.wanted)
            for part in parts
        ]
        outputs = self.model.run(items)
        return [self._finished(part.item, output) for part, output in zip(parts, outputs, strict=True)]

    def _finished(self, item: WaveRows, output: StageOutput) -> ComputedPart:
        if not self.model.is_last or output.logits is None:
            return ComputedPart(item, output.boundary)
        end = item.first + item.rows
        first = end - output.logits.shape[0] + 1
        drawn: list[GeneratedToken] = []
        order = item.session.order
        digests = order.sampling.digests
        known = max(0, order.prompt_tokens - first)
        scores = _scores(output.logits[:known], order.tokens[first : order.prompt_tokens]) if known else ()
        for position, logits in enumerate(output.logits[known:], first + known):
            try:
                digest = logits_digest(logits) if digests else ""
                drawn.append(_token(item, position, logits.numpy(), digest))
            except BadModelOutput as error:
                return ComputedPart(item, drawn=tuple(drawn), error=f"{error.code}: {error.text}")
        return ComputedPart(item, drawn=tuple(drawn), scores=scores)

    def forget(self, session: int, rows: int) -> None:
        """Frees a session's keys and values; `rows` above 0: those behind so many rows."""
        if rows:
            self.model.cache.truncate(str(session), rows)
        else:
            self.model.cache.drop(str(session))


def token_choice(asked: Sampling) -> TokenChoice:
    """How the sampler is asked.

    Raises:
        BadInput: A value is out of its range.
    """
    return TokenChoice(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=asked.seed,
        logprobs=asked.logprobs,
    )


def _scores(logits: Tensor, tokens: Sequence[int]) -> tuple[float, ...]:
    """The logarithms of the probabilities of known tokens, one for each row of (rows, vocabulary) logits.

    Rows that are no numbers are left out: what is drawn behind them fails, and says so.
    """
    found = torch.log_softmax(logits[: len(tokens)], -1).gather(1, torch.tensor(tokens)[: len(logits), None])
    return tuple(value for value in found[:, 0].tolist() if math.isfinite(value))


def _token(item: WaveRows, position: int, logits: Logits, digest: str) -> GeneratedToken:
    order = item.session.order
    asked = order.sampling
    found = sample(logits, token_choice(asked), asked.draw or order.generation, position)
    return GeneratedToken(
        session=order.session,
        fence=order.fence,
        position=position,
        token=found.id,
        logprob=found.logprob,
        likeliest=found.likeliest,
        digest=digest,
    )
