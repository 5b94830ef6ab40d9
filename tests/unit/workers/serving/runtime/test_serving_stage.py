"""How likely a model finds a prompt's last tokens is told beside the answer, and changes none of it."""

from __future__ import annotations

import pytest
import torch

from schemas.services.generation import BindSession, Sampling
from schemas.step import Member
from tests.unit.workers.serving.runtime.test_stage_loading import loaded, order
from workers.serving.runtime.serving_stage import ServingStage, WavePart
from workers.serving.runtime.session_machine import SessionMachine
from workers.serving.runtime.session_table import SCORED_TOKENS, ServingLimits
from workers.serving.stage_model import StageItem, StageModel

PROMPT = tuple((7 * place + 3) % 256 for place in range(50))
ME = Member.of("j-s0-r0", "i1")


def answered(
    model: StageModel, chunk: int, *, scored: bool = True, known: tuple[int, ...] = ()
) -> tuple[list[int], list[float]]:
    """The tokens of an answer, and the logarithms of the probabilities of the prompt's last tokens."""
    limits = ServingLimits(stage=0, stages=1, chunk_rows=chunk, context=80, vocabulary=256)
    machine, stage = SessionMachine(ME, "j", limits), ServingStage(model)
    asked = BindSession(
        job="j",
        session=1,
        generation="g",
        writer="gateway-a",
        fence=1,
        attempt=0,
        path=(ME,),
        tokens=PROMPT + known,
        prompt_tokens=len(PROMPT),
        most_tokens=4,
        sampling=Sampling(scored=scored),
    )
    machine.bind(asked, 0.0)
    tokens, scores = list(known), []
    while wave := machine.take_wave():
        rows = [item.session.tokens[item.first : item.first + item.rows] for item in wave]
        parts = [WavePart(item, (torch.tensor(own),)) for item, own in zip(wave, rows, strict=True)]
        for part in stage.compute(parts):
            assert not part.error
            assert machine.computed(part.item, 0.0)
            scores += part.scores
            for drawn in part.drawn:
                ends = machine.ends(part.item.session, drawn.position, drawn.token)
                machine.sampled(part.item.session, drawn.model_copy(update={"ends": ends}), 0.0)
                tokens.append(drawn.token)
    stage.forget(1, 0)
    return tokens, scores


@pytest.mark.parametrize("chunk", [64, 16, 7])
async def test_the_prompts_last_tokens_are_scored_in_whatever_pieces_it_comes(chunk: int) -> None:
    model = (await loaded(order())).model
    assert model is not None
    plain, nothing = answered(model, chunk, scored=False)
    assert nothing == []
    tokens, scores = answered(model, chunk)
    assert tokens == plain
    model.cache.reserve("alone", len(PROMPT))
    [whole] = model.run([StageItem("alone", 0, (torch.tensor(PROMPT),), wanted=len(PROMPT))])
    assert whole.logits is not None
    logs = torch.log_softmax(whole.logits, -1)
    first = len(PROMPT) - SCORED_TOKENS
    expected = [float(logs[place - 1, PROMPT[place]]) for place in range(first, len(PROMPT))]
    assert scores == pytest.approx(expected)


async def test_what_is_computed_anew_is_not_scored_again() -> None:
    model = (await loaded(order())).model
    assert model is not None
    tokens, _ = answered(model, 64)
    again, scores = answered(model, 64, known=tuple(tokens[:2]))
    assert (again, scores) == (tokens, [])
