"""A module is asked, and told what was seen outside (draft §4.2, Figure 2: RPC in, synchronous output)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bus import subjects
from policies.built_in.service_time_weights import ServiceTimeWeights
from policies.kit.engine import EngineConfig
from policies.kit.inference import Inference, Inferred
from policies.kit.policy import Policy
from policies.kit.view import JobView
from schemas.envelope import EntityKind
from schemas.errors import NoResponders
from schemas.job import JobRecord, JobSpec, JobState
from schemas.module_status import ModuleAnswer, ModuleQuestion
from schemas.observation import Observation
from schemas.policy import ModuleOrder, PolicySuggestion
from schemas.task_graph import TaskEdge, TaskGraph
from tests.integration.policies.test_module import Mesh, mesh
from tests.patience import PATIENCE_S
from tests.waiting import eventually

__all__ = ["mesh"]  # the fixture


async def ask(mesh: Mesh, module: str, version: str = "active", **question: Any) -> ModuleAnswer:
    answer = await mesh.arbiter.bus.request(
        subjects.MODULE_QUESTION,
        ModuleQuestion(**question),
        timeout_s=PATIENCE_S,
        module=module,
        version=version,
    )
    assert isinstance(answer, ModuleAnswer)
    return answer


async def test_a_module_is_asked_over_the_bus_and_says_why_it_has_nothing(mesh: Mesh) -> None:
    module, _ = await mesh.module(ServiceTimeWeights(), engine=EngineConfig(every_s=3600.0))
    await mesh.samples(rounds=4, s0_r0=10.0, s0_r1=30.0)
    await eventually(lambda: mesh.seen_by(module))
    answer = await ask(mesh, "service-time-weights", job="j")
    assert (answer.version, answer.state) == ("1", "active")
    assert [one.scope for one in answer.suggestions] == ["stage 0"]
    answer = await ask(mesh, "service-time-weights", job="k")
    assert (answer.suggestions, answer.reason) == ((), "nothing heard of k yet, or it has ended")
    assert (await ask(mesh, "service-time-weights", "1", job="j")).suggestions
    await asyncio.sleep(0)
    assert len(mesh.arbiter.suggestions) <= 1, "an answer is not published"


async def test_the_active_version_answers_whichever_that_is_now(mesh: Mesh) -> None:
    class Next(ServiceTimeWeights):
        version = "2.0 beta"

    await mesh.module(Next(), shadow=True)
    with pytest.raises(NoResponders):
        await ask(mesh, "service-time-weights", job="j")
    assert (await ask(mesh, "service-time-weights", "2-0-beta", job="j")).state == "shadow"
    sid = "service-time-weights-shadow-2-0-beta"

    async def order(op: str) -> None:
        await mesh.arbiter.bus.command(subjects.MODULE_ORDER, ModuleOrder(op=op), sid=sid)

    await order("activate")
    assert (await ask(mesh, "service-time-weights", job="j")).version == "2.0 beta"
    await order("shadow")
    with pytest.raises(NoResponders):
        await ask(mesh, "service-time-weights", job="j")


class Weather(Policy):
    """Says what it was told of racks, in this question or before."""

    name = "weather"
    every_s = 0.0

    def __init__(self) -> None:
        self.heard = 0

    def on_observation(self, observation: Observation, at: float) -> None:
        self.heard += 1

    def decide(self, view: JobView, now: float) -> PolicySuggestion | None:
        found = {key: one.values["celsius"] for key, one in view.observed.items()}
        return self.note(view, f"{self.heard} heard: {found}") if found else None


def rack(about: str, celsius: float, job: str | None = None) -> Observation:
    return Observation(source="bms", what="rack", about=about, values={"celsius": celsius}, job=job)


async def test_observations_from_outside_come_live_and_with_a_question_and_after_a_restart(
    mesh: Mesh,
) -> None:
    _, task = await mesh.module(Weather())
    outside = await mesh.bus("collector", EntityKind.CLIENT)
    await mesh.samples(s0_r0=10.0)
    await outside.publish(subjects.OBSERVATION, rack("r1", 30.0), source="bms")
    await outside.publish(subjects.OBSERVATION, rack("r1", 31.0), source="bms")
    await mesh.arbiter.until(lambda: any("2 heard" in one.reason for one in mesh.arbiter.suggestions))
    assert mesh.arbiter.suggestions[-1].reason == "2 heard: {('bms', 'rack', 'r1'): 31.0}"
    answer = await ask(mesh, "weather", job="j", inputs=(rack("r2", 40.0, "j"),))
    assert answer.suggestions[0].reason.startswith(
        "3 heard: {('bms', 'rack', 'r1'): 31.0, ('bms', 'rack', 'r2')"
    )
    task.cancel()
    await asyncio.wait({task})
    await mesh.module(Weather())
    [suggestion] = (await ask(mesh, "weather", job="j")).suggestions
    assert suggestion.reason == "2 heard: {('bms', 'rack', 'r1'): 31.0}"  # the question's was on no stream


async def test_a_module_that_starts_late_knows_the_jobs_topology(mesh: Mesh) -> None:
    spec = JobSpec.model_validate({"name": "tiny", "model": {"factory": "m:build"}, "training": {"steps": 9}})
    graph = TaskGraph(units=(), edges=(TaskEdge(upstream=0, downstream=1, bytes_per_microbatch=64),))
    record = JobRecord(
        job="j", spec=spec, state=JobState.RUNNING, submitted_at=1.0, changed_at=1.0, graph=graph, step=5
    )
    await mesh.arbiter.bus.bucket(subjects.JOB_RECORD).put(record, job="j")
    ended = record.model_copy(update={"job": "k", "state": JobState.DONE})
    await mesh.arbiter.bus.bucket(subjects.JOB_RECORD).put(ended, job="k")
    await mesh.samples(s0_r0=10.0)
    module, _ = await mesh.module(ServiceTimeWeights())
    view = module.engine.observations.jobs["j"]
    assert view.graph == graph
    assert (view.state, view.total_steps, view.step) == (JobState.RUNNING, 9, 5)


class Foreseeing(Policy):
    """Its model runs elsewhere; what it answers is news."""

    name = "foreseeing"
    every_s = 0.0

    def __init__(self) -> None:
        self.expected: dict[str, float] = {}

    @staticmethod
    def model():
        return lambda times: {sid: 1.1 * ms for sid, ms in times.items()}

    def infers(self, view: JobView, now: float) -> list[Inference]:
        return (
            []
            if self.expected
            else [self.infer(view, "times", {one.sid: one.service_ms for one in view.stage(0)})]
        )

    def on_inference(self, result: Inferred, at: float) -> None:
        self.expected = result.value

    def decide(self, view: JobView, now: float) -> PolicySuggestion | None:
        return self.note(view, f"expects {self.expected}") if self.expected else None


async def test_a_model_in_its_own_process_answers_like_an_event(mesh: Mesh) -> None:
    module, _ = await mesh.module(Foreseeing())
    await mesh.samples(s0_r0=10.0)
    await mesh.arbiter.until(lambda: mesh.arbiter.suggestions)
    assert mesh.arbiter.suggestions[0].reason == "expects {'j-s0-r0': 11.0}"
    assert module.engine.counters.errors == 0
