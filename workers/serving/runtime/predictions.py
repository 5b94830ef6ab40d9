"""Single passes: samples of many requests through the stages, and back to who asked (ADR-0145).

The first stage puts requests together, the others compute what comes, and the last one sends the outputs to
the first, which answers. Nothing is kept: who gets no answer asks again, on another path.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor

from bus.logs import get_logger
from schemas.data_plane import MicrobatchNotice
from schemas.errors import BadInput, DmscError, MicrobatchFailed, PeerUnreachable, Unavailable
from schemas.serve_spec import ServeSpec
from schemas.services.prediction import (
    MOST_PREDICTED_BYTES,
    Predict,
    Predicted,
    PredictedItem,
    PredictItem,
)
from schemas.step import Member
from schemas.telemetry import SessionLoad
from workers.compute.compute_thread import ComputeThread, Priority
from workers.links.hop_exchange import HopExchange
from workers.links.offers import TensorTransfer
from workers.serving.model_context import NO_LIMITS, SampleLimits
from workers.serving.one_shot import Batch, OneShotModel, batched
from workers.serving.runtime.batch_window import BatchWindow
from workers.serving.runtime.named_tensors import named_answers, samples_of, token_inputs
from workers.user_code import describe

log = get_logger("serving")

Answers = list[dict[str, Tensor]]
_UNPROBED = (
    "inputs of these shapes were not probed at start; serve.exact: required computes each such sample alone"
)
_ANSWER_BYTES, _TENSOR_BYTES = 512, 256
"""What an answer takes in a message beside its tensors' bytes, and a tensor beside its own."""


@dataclass(eq=False, slots=True)
class _Asked:
    samples: list[dict[str, Tensor]]
    path: tuple[Member, ...]
    embed: bool
    answer: asyncio.Future[Answers]


class Predictions:
    """The single passes of one instance.

    Args:
        me: This instance.
        stage: Its stage, of so many `stages`.
        model: Its layers.
        unit: What batches are padded to; 0: each sample alone (`batch_unit`).
        probed: The inputs with which that was found, without the dimension of samples; None: with none.
        serve: The job file's section.
        thread: The thread that computes.
        exchange: Its links.
        track: Runs a coroutine in the background.
        load: What there is to do; each answer says it.
        pass_s: How long the first stage waits for outputs, seconds: then an owner is gone, and nobody said
            so.
        limits: How large a sample may be, and with which the model was tried.
    """

    def __init__(
        self,
        me: Member,
        stage: int,
        stages: int,
        model: OneShotModel,
        unit: int,
        probed: Mapping[str, Tensor] | None,
        serve: ServeSpec,
        thread: ComputeThread,
        exchange: HopExchange,
        track: Callable[[Any], object],
        load: Callable[[], SessionLoad],
        pass_s: float,
        limits: SampleLimits = NO_LIMITS,
    ) -> None:
        self._me, self._stage, self._model, self._unit = me, stage, model, unit
        self._thread, self._exchange, self._track = thread, exchange, track
        self._load, self._pass_s = load, pass_s
        self._limits = limits
        self._tried = {tensor.name: tensor for tensor in limits.tried}
        self._most = serve.batch if unit else 1
        self._probed = None if probed is None else _shapes(probed)
        self._dtypes = {name: tensor.dtype for name, tensor in (probed or {}).items()}
        self._only_exact = serve.exact == "required"
        self._window = BatchWindow[_Asked](
            serve.batch_ms / 1e3, self._most, lambda asked: len(asked.samples), self._answer, stages
        )
        self._numbers = count(1)
        self._passes: dict[int, asyncio.Future[Answers]] = {}
        self.passes = 0
        """Batches so far."""

    async def predict(self, order: Predict, exact: bool) -> Predicted:
        """Answers a request, and others that came with it, beside those of other messages.

        Where others came with it, errors are in the answer; so many are answered as fit into a message.

        Raises:
            BadInput: Its inputs are not what the model takes, or too large; or it fails with them, and was
                tried with others.
            MicrobatchFailed: The model fails with inputs of the shapes that it was tried with.
            Unavailable: An owner of the path can't be reached.
        """
        if len(order.path) <= self._stage or order.path[self._stage] != self._me:
            raise BadInput(f"{self._me.sid} is not the first owner of the path")
        if not order.others:
            found = await self._answered(self._ask(order.path, order), exact)
            return Predicted(generation=order.generation, **found, load=self._load())
        items: tuple[Predict | PredictItem, ...] = (order, *order.others)
        asked = [self._ask_or_error(order.path, item) for item in items]
        try:
            answers: list[dict[str, Any]] = []
            size = 0
            for each in asked:
                found = await self._answered_or_error(each, exact)
                size += _wire_bytes(found)
                if size > MOST_PREDICTED_BYTES and answers:
                    break
                answers.append(found)
        finally:
            for each in asked:
                if isinstance(each, _Asked) and not (each.answer.cancel() or each.answer.cancelled()):
                    each.answer.exception()  # of one that does not fit: it is asked again
        first, *others = answers
        return Predicted(
            generation=order.generation,
            **first,
            load=self._load(),
            others=tuple(
                PredictedItem(generation=item.generation, **found)
                for item, found in zip(order.others, others, strict=False)
            ),
        )

    def _ask(self, path: tuple[Member, ...], item: Predict | PredictItem) -> _Asked:
        """Puts a request into the window; see `predict`."""
        inputs = token_inputs(item.inputs, self._model.inputs) if item.embed else item.inputs
        samples = samples_of(inputs, self._model.inputs, self._dtypes)
        if why := self._limits.refusal(samples[0]):  # all have its shapes
            raise BadInput(why)
        asked = _Asked(samples, path, item.embed, asyncio.get_running_loop().create_future())
        self._window.ask(_likeness(asked), asked)
        return asked

    def _ask_or_error(self, path: tuple[Member, ...], item: Predict | PredictItem) -> _Asked | DmscError:
        try:
            return self._ask(path, item)
        except DmscError as error:
            return error

    async def _answered(self, asked: _Asked, exact: bool) -> dict[str, Any]:
        """The fields of an answer; see `predict`."""
        sample = asked.samples[0]
        try:
            outputs = named_answers(await asked.answer)
        except MicrobatchFailed as error:
            if unlike := self._unlike(sample):
                raise BadInput(f"{error.text}; {unlike}") from error
            raise
        because = ""
        if exact and self._most_of(sample) > 1 and not self._is_probed(sample):
            because = _UNPROBED
        return {"outputs": outputs, "exact": exact and not because, "inexact_because": because}

    async def _answered_or_error(self, asked: _Asked | DmscError, exact: bool) -> dict[str, Any]:
        try:
            if isinstance(asked, DmscError):
                raise asked
            return await self._answered(asked, exact)
        except DmscError as error:
            return {"outputs": (), "error": error.to_reply()}

    def _unlike(self, sample: Mapping[str, Tensor]) -> str:
        """How this sample differs from those that the model was tried with; empty: it does not.

        A failure with others is the fault of whoever asks, and must not count against the version.
        """
        for name, tensor in sample.items():
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            tried = self._tried.get(name)
            if tried is not None and (tried.dtype, tried.shape) != (dtype, shape):
                return (
                    f"a sample of {name} is {dtype} {list(shape)}, and was {tried.dtype} "
                    f"{list(tried.shape)} where the model was tried"
                )
        return ""

    def _is_probed(self, sample: Mapping[str, Tensor]) -> bool:
        return self._probed == _shapes(sample)

    def _most_of(self, sample: Mapping[str, Tensor]) -> int:
        """Samples like this one in a pass. What company does to bits is known of the probed shapes alone."""
        return 1 if self._only_exact and not self._is_probed(sample) else self._most

    async def _answer(self, asked: Sequence[_Asked]) -> Callable[[], None]:
        """Computes a batch; what it returns answers its requests."""
        found = await self._found(asked)

        def answer() -> None:
            for each, answers in zip(asked, found, strict=True):
                if each.answer.done():  # nobody waits for it any more
                    continue
                if isinstance(answers, DmscError):
                    each.answer.set_exception(answers)
                else:
                    each.answer.set_result(answers)

        return answer

    async def _found(self, asked: Sequence[_Asked]) -> Sequence[Answers | DmscError]:
        """What each request of a batch gets. Where it fails, each is tried alone: one must fail no others."""
        samples = [sample for each in asked for sample in each.samples]
        try:
            answers: Answers = []
            most = self._most_of(samples[0])
            for begin in range(0, len(samples), most):
                part = samples[begin : begin + most]
                answers += await self._pass(part, asked[0].path, asked[0].embed)
        except Exception as error:  # the model's own code may raise anything
            if len(asked) > 1 and not isinstance(error, Unavailable):
                return [found for each in asked for found in await self._found([each])]
            return [_said(error)] * len(asked)
        ends = accumulate(len(each.samples) for each in asked)
        return [answers[end - len(each.samples) : end] for each, end in zip(asked, ends, strict=True)]

    async def _pass(
        self, samples: Sequence[dict[str, Tensor]], path: tuple[Member, ...], embed: bool
    ) -> Answers:
        self.passes += 1
        batch = batched(samples, self._model.inputs, self._unit)
        if len(path) == 1:
            return await self._thread.submit(
                Priority.FORWARD, partial(self._last(embed), batch, len(samples))
            )
        boundary = await self._thread.submit(Priority.FORWARD, partial(self._model.run, batch))
        number = next(self._numbers)
        header = {
            "pass": number,
            "samples": len(samples),
            "path": [[m.sid, m.incarnation] for m in path],
            "embed": embed,
        }
        self._passes[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(path[1], header, boundary)
            async with asyncio.timeout(self._pass_s):
                return await self._passes[number]
        except (PeerUnreachable, TimeoutError) as error:
            raise Unavailable(f"the version's stages did not answer: {error}") from error
        finally:
            del self._passes[number]

    def _last(self, embed: bool) -> Callable[[Batch, int], Answers]:
        return self._model.embedded if embed else self._model.answers

    async def _send(self, to: Member, header: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        words = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        await self._exchange.send(
            TensorTransfer(
                direction="wave",
                receiver=to,
                stage=self._stage + 1,
                step=header["pass"],
                transfer=PASS,
                tensors=[words, *(tensor.contiguous() for tensor in tensors)],
            )
        )

    # --- the other stages ---------------------------------------------------------------------------------
    def arrived(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        """Takes a batch from the stage before, or outputs from the last one."""
        header = json.loads(tensors[0].numpy().tobytes())
        if "path" in header:
            self._track(self._go_on(header, tuple(tensors[1:])))
        elif (waiting := self._passes.get(header["pass"])) is not None and not waiting.done():
            if "error" in header:
                asked_wrongly = header.get("bad_input", False)
                waiting.set_exception((BadInput if asked_wrongly else MicrobatchFailed)(header["error"]))
            else:
                waiting.set_result(_unstacked(header["names"], tensors[1:]))

    async def _go_on(self, header: dict[str, Any], batch: tuple[Tensor, ...]) -> None:
        path = [Member(sid=sid, incarnation=incarnation) for sid, incarnation in header["path"]]
        number = header["pass"]
        try:
            if not self._model.is_last:
                boundary = await self._thread.submit(Priority.FORWARD, partial(self._model.run, batch))
                await self._send(path[self._stage + 1], header, boundary)
                return
            samples = header["samples"]
            last = self._last(bool(header.get("embed")))
            found = await self._thread.submit(Priority.FORWARD, partial(last, batch, samples))
            stacked = {name: torch.stack([each[name] for each in found]) for name in found[0]}
            await self._send(path[0], {"pass": number, "names": [*stacked]}, [*stacked.values()])
        except PeerUnreachable as error:
            log.info("owner not reached", peer=error.fields.get("peer"), reason=error.text)
        except Exception as error:  # the model's own code may raise anything
            await self._send_error(path[0], number, _said(error))

    async def _send_error(self, to: Member, number: int, error: DmscError) -> None:
        said = {"pass": number, "error": error.text, "bad_input": isinstance(error, BadInput)}
        try:
            await self._send(to, said, ())
        except PeerUnreachable as unreached:
            log.info("owner not reached", peer=to.sid, reason=unreached.text)


PASS = 1
"""`transfer` of a hop of single passes; that of waves is 0."""


def _likeness(asked: _Asked) -> Hashable:
    """What requests must have in common to be computed together."""
    shapes = _shapes(asked.samples[0])
    return (shapes, asked.embed, tuple((member.sid, member.incarnation) for member in asked.path))


def _shapes(sample: Mapping[str, Tensor]) -> tuple[Hashable, ...]:
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(sample.items()))


def _said(error: Exception) -> DmscError:
    if isinstance(error, DmscError):
        return error
    return MicrobatchFailed(f"the model fails with these inputs: {describe(error)}")


def _unstacked(names: Sequence[str], tensors: Sequence[Tensor]) -> Answers:
    count = int(tensors[0].shape[0])
    return [{name: tensor[at] for name, tensor in zip(names, tensors, strict=True)} for at in range(count)]


def _wire_bytes(fields: Mapping[str, Any]) -> int:
    """At least what an answer with these fields takes in a message."""
    tensors = sum(len(tensor.data) + _TENSOR_BYTES for tensor in fields["outputs"])
    error = fields.get("error")
    return _ANSWER_BYTES + tensors + (len(error.text) if error is not None else 0)
