"""Asks functional modules about faults at hand, and waits some milliseconds for their answers (ADR-0099).

Nobody is asked, and nothing waits, while no module says that it answers. The wait ends with the last answer
of those that are active, or with its deadline; a module that was late several times in a row is asked, and
not waited for. Question, answers and decisions are on the stream of policies.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.policy.arbitration import ArbitrationConfig
from entities.orchestrator.policy.faults_at_hand.fault_rules import JudgedAnswer, ReceivedAnswer, rule
from entities.orchestrator.policy.module_reputation import Key, ModuleReputation
from entities.orchestrator.policy.policy_service import PolicyService
from schemas.automation import Automation, lower
from schemas.envelope import Envelope
from schemas.errors import DmscError
from schemas.fault_choices import FaultAnswer, FaultQuestion, FaultRuling
from schemas.policy import ModuleState, PolicyDecision

log = get_logger("orchestrator")

OPEN_AT_ONCE = 64
"""Faults about which modules are asked at a time; of more at once the orchestrator decides by itself."""
CLOSED_KEPT = 256
"""Questions that are remembered, so that an answer that comes late is told so."""


@dataclass(slots=True)
class _OpenQuestion:
    question: FaultQuestion
    modules: Mapping[Key, ModuleReputation]
    awaited: set[Key]
    received: dict[Key, ReceivedAnswer] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class FaultQuestions:
    """Serves one term. `spawn` starts a task of the term."""

    def __init__(
        self,
        bus: Bus,
        policies: PolicyService,
        runs: Mapping[str, JobRun],
        mesh: MeshView,
        spawn: Callable[[Coroutine[None, None, None]], None],
        config: ArbitrationConfig,
    ) -> None:
        self._bus = bus
        self._policies = policies
        self._runs = runs
        self._mesh = mesh
        self._spawn = spawn
        self._config = config
        self._open: dict[str, _OpenQuestion] = {}
        self._closed: OrderedDict[str, float] = OrderedDict()
        self._late: dict[Key, int] = {}
        self._complained: set[tuple[Key, str]] = set()

    async def ask(
        self, job: str, question_of: Callable[[], FaultQuestion], distrusted: Mapping[str, str]
    ) -> FaultRuling | None:
        """What to do about a fault. None, and at once: no module says that it answers, or too many are asked.

        Args:
            job: whose fault it is.
            question_of: makes the question, if anybody is asked.
            distrusted: see `rule`.
        """
        run = self._runs.get(job)
        if run is None or len(self._open) >= OPEN_AT_ONCE:
            return None
        record = run.job.store.record
        automation = lower(self._mesh.automation, record.automated)
        modules = self._policies.answerers(job, record.user)
        if not modules or automation is Automation.OFF:
            return None
        awaited = {
            key
            for key, standing in modules.items()
            if standing.state is ModuleState.ACTIVE and self._late.get(key, 0) < self._config.late_answers
        }
        question = question_of().model_copy(update={"answer_ms": self._config.fault_answer_s * 1e3})
        opened = _OpenQuestion(question, modules, awaited)
        if not awaited or automation is not Automation.ACT:  # nothing can be adopted: nothing waits
            opened.awaited = {key for key in modules if self._late.get(key, 0) < self._config.late_answers}
            self._spawn(self._only_told(opened, automation, distrusted))
            return FaultRuling.as_usual(question, asked=len(modules))
        return await self._gather(opened, automation, distrusted)

    async def _only_told(
        self, opened: _OpenQuestion, automation: Automation, distrusted: Mapping[str, str]
    ) -> None:
        """Asks beside the recovery, so that modules hear what would have become of their answers."""
        await self._gather(opened, automation, distrusted)

    async def _gather(
        self, opened: _OpenQuestion, automation: Automation, distrusted: Mapping[str, str]
    ) -> FaultRuling:
        question = opened.question
        self._open[question.id] = opened
        try:
            await self._bus.publish(subjects.FAULT_QUESTION, question, job=question.job)
            async with asyncio.timeout(self._config.fault_answer_s):
                await opened.complete.wait()
        except TimeoutError:
            pass
        except DmscError as error:
            log.warning("modules not asked about a fault", job=question.job, reason=error.text)
            opened.awaited.clear()
        finally:
            del self._open[question.id]
            self._closed[question.id] = time.monotonic()
            while len(self._closed) > CLOSED_KEPT:
                self._closed.popitem(last=False)
        for key in opened.awaited - opened.received.keys():
            self._late[key] = self._late.get(key, 0) + 1
            if self._late[key] == self._config.late_answers:
                text = "answered late too often: it is asked about faults, and not waited for"
                log.warning(text, module=key[0], version=key[1], late=self._late[key])
        ruling, judged = rule(
            question,
            [opened.received[key] for key in sorted(opened.received)],
            automation=automation,
            agents=self._mesh.nodes.keys(),
            distrusted=distrusted,
            config=self._config,
        )
        self._spawn(self._tell(judged, counts=automation is Automation.ACT))
        return ruling

    async def _tell(self, judged: list[JudgedAnswer], *, counts: bool) -> None:
        """Tells each module what became of its answer, beside the recovery.

        `counts`: answers could be adopted, so that nonsense is held against a module.
        """
        for one in judged:
            answer = one.received.answer
            key = (answer.module, answer.version)
            nonsense = one.reason if one.nonsense and counts else ""
            self._policies.answered(key, adopted=one.adopted, nonsense=nonsense)
            try:
                await self._decide(answer, one.received.id, one.adopted, one.reason)
            except DmscError as error:  # the others are told, and counted
                log.warning("a module was not told about its answer", module=key[0], reason=error.text)

    async def _decide(self, answer: FaultAnswer, id: str, adopted: bool, reason: str) -> None:
        decision = PolicyDecision(
            module=answer.module,
            version=answer.version,
            job=answer.job,
            suggestion=id,
            adopted=adopted,
            reason=reason,
        )
        await self._bus.publish(subjects.POLICY_DECISION, decision, module=answer.module)

    async def answer(self, message: FaultAnswer, envelope: Envelope) -> None:
        """Takes an answer in. One that nobody waits for is counted against its module's rate."""
        key = (message.module, message.version)
        opened = self._open.get(message.question)
        standing = None if opened is None else opened.modules.get(key)
        if refused := self._refusal(message, envelope, opened, standing):
            await self._refuse(message, envelope, refused)
            return
        assert opened is not None
        assert standing is not None
        self._late.pop(key, None)
        opened.received[key] = ReceivedAnswer(answer=message, id=envelope.id, standing=standing)
        if opened.awaited <= opened.received.keys():
            opened.complete.set()

    def _refusal(
        self,
        message: FaultAnswer,
        envelope: Envelope,
        opened: _OpenQuestion | None,
        standing: ModuleReputation | None,
    ) -> str:
        """Why an answer does not count; empty if it does."""
        if opened is None:
            closed_at = self._closed.get(message.question)
            if closed_at is None:
                return "nobody asked that"
            return f"late: it was decided {time.monotonic() - closed_at:.3f} s ago"
        if message.job != opened.question.job:
            return f"the question was about job {opened.question.job}"
        if standing is None or standing.owner != message.owner or standing.sid != envelope.sender.name:
            return "it has not registered as one that answers about faults of this job"
        if (message.module, message.version) in opened.received:
            return "it has answered already"
        return ""

    async def _refuse(self, message: FaultAnswer, envelope: Envelope, reason: str) -> None:
        key, kind = (message.module, message.version), reason.partition(":")[0]
        late = kind == "late"
        sender, nonsense = envelope.sender.name, "" if late else reason
        if not self._policies.unasked(key, sender, nonsense):
            return
        if (key, kind) not in self._complained and len(self._complained) < CLOSED_KEPT:
            self._complained.add((key, kind))
            text = "an answer about a fault does not count"
            log.warning(text, module=message.module, version=message.version, job=message.job, reason=reason)
        await self._decide(message, envelope.id, False, reason)
