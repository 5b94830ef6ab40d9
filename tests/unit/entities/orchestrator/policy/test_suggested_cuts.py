"""A suggested re-cut is looked at beside the loop: nothing else that is suggested waits for it."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from bus import subjects
from entities.orchestrator.job_state.policy_distribution import PolicyDistribution
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.policy.arbitration import ArbitrationConfig
from entities.orchestrator.policy.module_reputation import ReputationConfig
from entities.orchestrator.policy.policy_service import PolicyService
from entities.orchestrator.transaction.reduction_layout import ReductionLayouts
from schemas.actions import Action, Recut, SetWindow
from schemas.envelope import EntityKind, Envelope, Sender
from schemas.errors import BadMessage, Conflict
from schemas.job import JobState
from schemas.names import MESH
from schemas.policy import ModuleLifecycle, ModuleState, PolicyDecision
from schemas.signals import CommunicationPolicy, StagePolicy
from schemas.step import Member
from tests.builders.graphs import graph, unit
from tests.builders.jobs import job as job_record
from tests.builders.policies import forecast, suggestion
from tests.job_context import job_context
from tests.patience import PATIENCE_S

UNITS = ("j-s0-r0", "j-s1-r0")
CUT = Recut(cuts=((0, 3), (3, 6)), forecast=forecast())
WINDOW = SetWindow(stage=0, in_flight=6, forecast=forecast())


async def confirmed() -> None:
    """It leads."""


def sent(by: str) -> Envelope:
    sender = Sender(kind=EntityKind.FUNCTIONAL_MODULE, name=by, incarnation="i")
    return Envelope(type="x", version=(1, 0), id=f"of-{by}", sender=sender, sent_at=time.time(), body={})


class Desk:
    """Modules m and n beside job j, which looks at a re-cut for as long as `may_look` is not set."""

    def __init__(self) -> None:
        self.decisions: asyncio.Queue[PolicyDecision] = asyncio.Queue()
        self.looked: list[Action] = []
        self.looking, self.may_look = asyncio.Event(), asyncio.Event()
        nobody: Any = SimpleNamespace(gateways=tuple, routers=tuple)
        policies = PolicyDistribution(nobody, nobody)
        fields: dict[str, Any] = {"job": "j", "revision": 1, "entry_gateway": "g", "clusters": ("a",)}
        stages = tuple(StagePolicy(stage=stage, window=4) for stage in range(2))
        policies.issue(CommunicationPolicy(**fields, stages=stages, reason="initial"))
        instances = SimpleNamespace(
            deployed=graph(*map(unit, UNITS)),
            units=(),
            lost=set(),
            layouts=ReductionLayouts(),
            stages=lambda: tuple((Member(sid=sid, incarnation="i"),) for sid in UNITS),
        )
        store = SimpleNamespace(record=job_record("j", JobState.RUNNING), tell=self._tell)
        actions = SimpleNamespace(look=self._look, carry_out=self._carry_out)
        run: Any = SimpleNamespace(
            job=job_context(store=store, policies=policies, instances=instances),
            step=1,
            holding=SimpleNamespace(replicas=1),
            actions=actions,
        )
        bus: Any = SimpleNamespace(bucket=lambda _: None, publish=self._publish)
        queue: Any = None
        self.service = PolicyService(bus, {"j": run}, MeshView(), queue, confirmed, ArbitrationConfig())

    async def _tell(self, kind: str, text: str) -> None:
        assert kind == "policy"

    async def _publish(self, row: object, decision: PolicyDecision, **more: Any) -> None:
        self.decisions.put_nowait(decision)

    async def _look(self, action: Action) -> None:
        self.looking.set()
        await self.may_look.wait()
        self.looked.append(action)

    def _carry_out(self, action: Action, by: str, valid_s: float, reason: str) -> int | None:
        if isinstance(action, Recut) and not any(action is each for each in self.looked):
            raise Conflict("not looked at")
        return 2

    async def suggests(self, module: str, action: Action) -> None:
        said = ModuleLifecycle(
            module=module, version="1", state=ModuleState.ACTIVE, sid=module, incarnation="i"
        )
        await self.service.lifecycle(said, sent(module))
        async with asyncio.timeout(PATIENCE_S):
            await self.service.suggestion(suggestion(action, module=module), sent(module))

    async def answered(self) -> tuple[str, bool]:
        decision = await asyncio.wait_for(self.decisions.get(), PATIENCE_S)
        return decision.module, decision.adopted


async def test_others_are_judged_while_a_re_cut_is_looked_at() -> None:
    desk = Desk()
    await desk.suggests("m", CUT)
    await desk.looking.wait()
    await desk.suggests("n", WINDOW)
    assert await desk.answered() == ("n", True)
    await desk.suggests("m", CUT.model_copy())
    assert await desk.answered() == ("m", False), "one at a time is looked at for each module"
    desk.may_look.set()
    assert await desk.answered() == ("m", True)
    assert desk.looked == [CUT]


async def test_a_module_of_which_nothing_can_be_read_is_suspended_and_the_log_says_so_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    desk = Desk()
    await desk.suggests("m", WINDOW)
    subject = subjects.SUGGESTION(owner=MESH, module="m")
    for _ in range(2 * ReputationConfig().nonsense_limit):
        desk.service.unusable(subject, BadMessage("no action"))
    said = [line for line in capsys.readouterr().out.splitlines() if "module suspended" in line]
    assert len(said) == 1
    assert "the last: no action" in said[0]
