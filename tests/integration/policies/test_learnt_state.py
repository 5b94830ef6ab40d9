"""What a module has learnt survives kills of its process and of the server; one process writes (ADR-0100)."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bus import subjects
from bus.server.embedded import EmbeddedServer
from dmsc.process.policy_loading import load_policy
from entities.orchestrator.policy.learnt_state_service import MOST_VERSIONS, LearntStateService
from policies.module.service import FunctionalModule
from policies.module.state_keeper import StateKeeper, StateTimes
from schemas.envelope import EntityKind
from schemas.errors import BadInput, Conflict, NotFound
from schemas.learnt_state import DirectLearnt, KeepLearnt, LearntState, LearntStates, digest_of
from schemas.names import MESH
from schemas.policy import ModuleState, PolicySuggestion
from tests.integration.policies.test_module import Mesh, end, mesh
from tests.patience import PATIENCE_S
from tests.waiting import eventually

__all__ = ["mesh"]

COUNTING = '''
from dmsc import Policy


class Counting(Policy):
    """Learns how many samples it has seen, and says it."""

    name = "counting"
    every_s = 0.05
    state_version = 1

    def __init__(self):
        self.count = 0

    def learnt_state(self):
        return {"count": self.count}

    def restore(self, state):
        if state["count"] < 0:
            raise ValueError("fewer than none")
        self.count = state["count"]

    def on_instance_sample(self, sample, at):
        self.count += 1

    def decide(self, view, now):
        return self.note(view, str(self.count))
'''


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    file = tmp_path / "counting.py"
    file.write_text(COUNTING)
    return file


@pytest.fixture
def running() -> dict[tuple[str, str], ModuleState]:
    """The registered versions, as the orchestrator's part is told."""
    return {("counting", "1"): ModuleState.ACTIVE}


@pytest.fixture
async def service(mesh: Mesh, running: dict[tuple[str, str], ModuleState]) -> LearntStateService:
    """The orchestrator's part, at the arbiter's door."""
    bus = mesh.arbiter.bus
    service = LearntStateService(bus, lambda: running, lambda module, version: MESH)
    await bus.serve(subjects.LEARNT_QUERY, service.query)
    await bus.serve(subjects.KEEP_LEARNT, service.keep)
    return service


async def ask(service: LearntStateService, **fields: object) -> LearntStates:
    return await service.direct(DirectLearnt(module="counting", user="ada", **fields), None)


async def kept(service: LearntStateService) -> LearntState:
    [state] = (await ask(service)).states
    return state


@contextlib.asynccontextmanager
async def process(file: Path, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`dmsc policy run`, killed at the end."""
    command = (sys.executable, "-m", "dmsc", "policy", "run", str(file), "--bus", url)
    child = await asyncio.create_subprocess_exec(*command, cwd=file.parent)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def said(mesh: Mesh, count: int) -> PolicySuggestion:
    """The module's suggestion that names this count."""
    of_count = [one for one in mesh.arbiter.suggestions if one.reason == str(count)]
    await mesh.arbiter.until(lambda: any(one.reason == str(count) for one in mesh.arbiter.suggestions))
    return [*of_count, *(one for one in mesh.arbiter.suggestions if one.reason == str(count))][-1]


async def test_a_killed_module_goes_on_with_what_it_knew_also_after_a_restart_of_the_server(
    mesh: Mesh, service: LearntStateService, counting: Path, own_server: EmbeddedServer
) -> None:
    async with process(counting, mesh.url):
        await mesh.arbiter.until(lambda: "active" in mesh.arbiter.states())
        await mesh.samples(rounds=3, s0_r0=10.0)
        before = await said(mesh, 3)
        assert before.state == digest_of('{"count":3}') == (await kept(service)).digest
        await ask(service, data='{"count":100}', reason="trained on many")
        await mesh.samples(s0_r0=10.0)
        await said(mesh, 101)  # the running process has taken it over
    state = await kept(service)  # it was killed, and has said no more
    assert (state.data, state.source) == ('{"count":101}', "learnt")
    await own_server.restart()
    mesh.arbiter.lifecycles.clear()
    async with process(counting, mesh.url):
        await mesh.arbiter.until(lambda: "active" in mesh.arbiter.states())
        assert (await kept(service)).digest == state.digest
        await mesh.samples(s0_r0=10.0)  # the four before are in the streams, and are not counted again
        after = await said(mesh, 102)
    assert after.state == digest_of('{"count":102}') == (await kept(service)).digest
    assert {one.reason for one in mesh.arbiter.suggestions} <= {"1", "2", "3", "100", "101", "102"}


async def module_of(mesh: Mesh, file: Path) -> tuple[FunctionalModule, asyncio.Task[None]]:
    return await mesh.module(load_policy(str(file)))


async def test_a_reset_module_forgets_and_a_misfit_is_kept_aside(
    mesh: Mesh, service: LearntStateService, counting: Path
) -> None:
    module, task = await module_of(mesh, counting)
    await mesh.samples(rounds=2, s0_r0=10.0)
    await said(mesh, 2)
    states = await ask(service, reset=True)
    assert [(one.source, one.by, one.data) for one in states.states] == [("reset", "ada", "")]
    assert [one.data for one in states.aside] == ['{"count":2}']
    await eventually(lambda: module.engine.policy.count == 0)
    await end(task)  # what it has learnt since is kept at its end
    await ask(service, data='{"count":-5}')
    module, task = await module_of(mesh, counting)
    assert module.engine.learnt(into=[]) != '{"count":-5}'
    await mesh.samples(s0_r0=10.0)
    await eventually(lambda: module.engine.policy.count > 0)
    await end(task)
    states = await ask(service)
    assert '"count":-5' not in states.states[0].data
    assert [(one.data, one.reason) for one in states.aside] == [
        ('{"count":-5}', "ValueError: fewer than none")
    ]


async def test_one_writer_per_state(
    mesh: Mesh, service: LearntStateService, running: dict[tuple[str, str], ModuleState]
) -> None:
    def state(revision: int, count: int, by: str, **more: object) -> KeepLearnt:
        data = f'{{"count":{count}}}'
        fields = {
            "module": "counting",
            "version": "1",
            "schema_version": 1,
            "revision": revision,
            "digest": digest_of(data),
            "data": data,
            "at": 1.0 * count,
            "by": by,
        }
        state = LearntState(**{**fields, **more})
        return KeepLearnt(module="counting", state=state, expected=revision - 1)

    await service.keep(state(1, 5, "i1"), None)
    await service.keep(state(1, 5, "i1"), None)  # repeated, it changes nothing
    with pytest.raises(Conflict, match="counting 1: revision 1 by i1 is kept, not 0"):
        await service.keep(state(1, 6, "i2"), None)
    await service.keep(state(2, 7, "i2"), None)
    with pytest.raises(Conflict, match="revision 2 by i2 is kept, not 1"):
        await service.keep(state(2, 8, "i1"), None)
    assert (await kept(service)).data == '{"count":7}'
    with pytest.raises(BadInput, match="counting 1: damaged: its digest is"):
        await service.keep(state(3, 9, "i2", digest=digest_of("")), None)
    with pytest.raises(BadInput, match="the state is no canonical JSON"):
        await ask(service, data='{"count": 7}')
    with pytest.raises(BadInput, match="counting: 400002 bytes, 262144 are allowed"):
        await ask(service, data=f'"{"é" * 200_000}"')
    with pytest.raises(NotFound, match="no module strange runs, and nothing that it learnt is kept"):
        await service.direct(DirectLearnt(module="strange", user="ada", reset=True), None)
    with pytest.raises(NotFound, match="counting 2: no such module of system's is registered"):
        await service.keep(state(1, 9, "i3", version="2"), None)
    running["counting", "2"] = ModuleState.SHADOW
    await service.keep(state(1, 9, "i3", version="2"), None)
    with pytest.raises(BadInput, match="counting: which version\\? there are 1, 2"):
        await ask(service, reset=True)
    assert [one.version for one in (await ask(service)).states] == ["1", "2"]
    bucket = mesh.arbiter.bus.bucket(subjects.LEARNT_RECORD)
    await _left_by_users(service, bucket, state(1, 5, "i1").state)
    for version in range(3, MOST_VERSIONS + 1):
        former = state(1, 9 + version, "i3", version=str(version)).state
        await bucket.put(former, owner=MESH, module="counting", version=str(version), place="current")
    running["counting", "last"] = ModuleState.ACTIVE
    await service.keep(state(1, 99, "i3", version="last"), None)
    versions = {one.version for one in (await ask(service)).states}
    assert versions == {"1", "2", "last"} | {str(version) for version in range(4, MOST_VERSIONS + 1)}


async def _left_by_users(service: LearntStateService, bucket: Any, state: LearntState) -> None:
    """What modules of users learnt is shown and forgotten after these were retired, too."""

    async def left(owner: str, version: str) -> None:
        former = state.model_copy(update={"owner": owner, "module": "retired", "version": version})
        await bucket.put(former, owner=owner, module="retired", version=version, place="current")

    async def direct(**fields: Any) -> LearntStates:
        return await service.direct(DirectLearnt(module="retired", user="ada", **fields), None)

    await left("ben", "1")
    assert [(one.owner, one.revision) for one in (await direct()).states] == [("ben", 1)]
    [forgotten] = (await direct(reset=True)).states
    assert (forgotten.owner, forgotten.revision, forgotten.data) == ("ben", 2, "")
    await left("eve", "2")
    assert [one.owner for one in (await direct()).states] == ["ben", "eve"]
    with pytest.raises(BadInput, match="retired: modules of ben, eve have left a state; run the one"):
        await direct(reset=True)
    assert [one.data for one in (await direct(reset=True, version="2")).states] == [""]


async def test_of_two_processes_one_writes_and_the_other_takes_over_what_it_learnt(
    mesh: Mesh, service: LearntStateService, counting: Path
) -> None:
    policy = load_policy(str(counting))
    hurried: list[None] = []

    async def keeper(name: str) -> StateKeeper:
        bus = await mesh.bus(name, EntityKind.FUNCTIONAL_MODULE)
        times = StateTimes(takeover_s=0.0, retry_s=0.0)
        return StateKeeper(bus, policy, MESH, times, answer_s=PATIENCE_S, hurry=lambda: hurried.append(None))

    one, two = await keeper("counting"), await keeper("counting-shadow-1")
    assert await one.load() is None
    assert await two.load() is None
    await one.keep('{"count":1}', 1.0)
    await two.keep('{"count":2}', 1.0)
    assert (await kept(service)).data == '{"count":1}'
    pending = two.take_pending()
    assert pending is not None
    assert pending.data == '{"count":1}'
    assert hurried == [None], "its policy has to go on from it at once"
    two.restored(pending)
    await two.keep('{"count":3}', 2.0)  # the first one has said no more
    assert (await kept(service)).data == '{"count":3}'
    await one.keep('{"count":4}', 3.0)
    assert (await kept(service)).data == '{"count":3}', "now that one is not the writer"
    pending = one.take_pending()
    assert pending is not None
    assert (pending.revision, pending.data) == (2, '{"count":3}')
    bucket = mesh.arbiter.bus.bucket(subjects.LEARNT_RECORD)
    await bucket.delete(owner=MESH, module="counting", version="1", place="current")
    await two.keep('{"count":5}', 4.0)  # it finds that nothing is kept any more
    await two.keep('{"count":5}', 4.0)
    state = await kept(service)
    assert (state.revision, state.data) == (1, '{"count":5}')


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"schema_version": 9}, "schema version 9, this module reads 1"),
        ({"digest": digest_of("")}, "damaged: its digest is"),
        ({"module": "another"}, "it is of system's another"),
    ],
    ids=["another schema", "damaged", "of another module"],
)
async def test_a_state_that_does_not_fit_is_not_taken_and_goes_aside_with_the_next(
    mesh: Mesh,
    service: LearntStateService,
    counting: Path,
    fields: dict[str, object],
    reason: str,
) -> None:
    usual = {"module": "counting", "version": "1", "schema_version": 1, "revision": 7, "by": "i0", "at": 1.0}
    state = LearntState(**{**usual, "data": "{}", "digest": digest_of("{}"), **fields})
    bucket = mesh.arbiter.bus.bucket(subjects.LEARNT_RECORD)
    place = {"owner": MESH, "module": "counting", "version": "1", "place": "current"}
    await bucket.put(state, **place)
    bus = await mesh.bus("counting", EntityKind.FUNCTIONAL_MODULE)
    keeper = StateKeeper(
        bus, load_policy(str(counting)), MESH, StateTimes(), answer_s=PATIENCE_S, hurry=lambda: None
    )
    assert await keeper.load() is None
    await keeper.keep('{"count":1}', 2.0)
    current = await bucket.get(**place)
    aside = await bucket.get(**{**place, "place": "aside"})
    assert current is not None
    assert aside is not None
    assert (current.message.revision, current.message.data) == (8, '{"count":1}')
    assert aside.message.reason.startswith(reason)
