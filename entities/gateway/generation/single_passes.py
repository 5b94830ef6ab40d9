"""Single passes through a version's instances: tensors in, tensors out, or a text's vector."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from bus.connection import Bus
from entities.gateway.generation.path_choice import disjoint_paths, has_room
from entities.gateway.generation.service_book import ServiceBook
from entities.gateway.generation.session_keeper import SessionKeeper
from entities.gateway.generation.session_machine import Path
from entities.gateway.passes.gathered_passes import GatheredPasses
from schemas.errors import DmscError, Unavailable
from schemas.services.generation import Generation
from schemas.services.model_service import ModelService, ServedVersion
from schemas.services.prediction import NamedTensor, Predicted, PredictItem
from schemas.signals import AccessDecision


def because_of(answers: Iterable[Predicted]) -> str:
    """Why they are not exact, each reason once; empty: all of them are."""
    return "; ".join(dict.fromkeys(each.inexact_because for each in answers if each.inexact_because))


class SinglePasses:
    """The single passes of one gateway. `predict_s`: how long one may take, seconds."""

    def __init__(
        self, bus: Bus, gateway: str, book: ServiceBook, keeper: SessionKeeper, predict_s: float
    ) -> None:
        self._gateway = gateway
        self._book = book
        self._ports = keeper.ports
        self._gathered = GatheredPasses(bus, predict_s)
        self.on_prediction: Callable[[Generation], None] = lambda generation: None
        """Is called with each request for tensors that was answered."""
        self.counted: Callable[[Generation], AbstractContextManager[None]] = lambda _: nullcontext()
        """Surrounds each prediction, and counts it."""

    def paths_of(
        self, service: ModelService, version: ServedVersion, access: AccessDecision
    ) -> tuple[Path, ...]:
        """Paths through the version's instances, the one with the most room first; they share as little as
        they can. Raises `Unavailable` if a stage has nobody.
        """
        return self._paths(self._asked(service, version, access.user))

    def has_room(self, model: str, key: str, share: float, mine: int, fresh_s: float) -> bool:
        """Whether the instances that would answer this request have less than `share` to do; also if none
        would.

        Args:
            key: By which the version is drawn.
            mine: Requests of the asker that were begun.
            fresh_s: For how long what instances said counts, seconds.
        """
        try:
            service, version = self._book.version(model, key)
        except DmscError:
            return True  # who asks is told why
        ports = self._ports
        stages = ports.stages(self._asked(service, version, ""))
        return has_room(stages, ports.loads, share, mine, time.monotonic() - fresh_s)

    async def anywhere(
        self,
        service: ModelService,
        version: ServedVersion,
        access: AccessDecision,
        inputs: Sequence[NamedTensor],
        *,
        embed: bool = False,
    ) -> Predicted:
        """What the instances with the most room give; see `through`."""
        asked = self._asked(service, version, access.user)
        with self.counted(asked):
            path, *_ = self._paths(asked)
            return await self._pass(asked, version, path, inputs, embed=embed)

    async def through(
        self,
        service: ModelService,
        version: ServedVersion,
        access: AccessDecision,
        path: Path,
        inputs: Sequence[NamedTensor],
    ) -> Predicted:
        """What these instances give for the tensors.

        Raises:
            BadInput: the model does not take them.
            Unavailable: the answer did not come in time.
        """
        asked = self._asked(service, version, access.user)
        with self.counted(asked):
            return await self._pass(asked, version, path, inputs, embed=False)

    async def _pass(
        self,
        asked: Generation,
        version: ServedVersion,
        path: Path,
        inputs: Sequence[NamedTensor],
        *,
        embed: bool,
    ) -> Predicted:
        item = PredictItem(generation=asked.id, inputs=tuple(inputs), embed=embed)
        answer = await self._gathered.ask(asked.job, path, item)
        self._ports.said(path[0].sid, answer.load)
        self.on_prediction(asked)
        # The first stage speaks for itself alone; the version's record knows of all, and of other arithmetic
        # at another replica.
        because = answer.inexact_because or version.inexact_because
        exact = answer.exact and bool(version.exact)
        return answer.model_copy(update={"exact": exact, "inexact_because": "" if exact else because})

    def _paths(self, asked: Generation) -> tuple[Path, ...]:
        paths = disjoint_paths(self._ports.stages(asked), self._ports.loads, asked.id)
        if isinstance(paths, str):
            raise Unavailable(paths, retry_after_s=1.0)
        return paths

    def _asked(self, service: ModelService, version: ServedVersion, user: str) -> Generation:
        """What a request without tokens is, where instances are looked for."""
        return Generation(
            id=secrets.token_hex(16),
            service=service.service,
            version=version.version,
            job=version.job,
            user=user,
            writer=self._gateway,
            session=0,
            most_tokens=0,
        )
