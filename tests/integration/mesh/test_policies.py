"""A module's life in a running mesh (draft §4.2): ordered about, killed, asked, drained; training goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import nats
import pytest

from bus import subjects
from schemas.automation import Knob
from schemas.changes import JobChange
from schemas.envelope import Envelope
from schemas.errors import NotFound
from schemas.module_status import ModuleStatus
from schemas.names import MESH
from schemas.observation import Observation
from schemas.telemetry import DeadLetter
from tests import bad_messages
from tests.integration.dmsc.command_line import running, wait_for
from tests.integration.mesh.conftest import Mesh, done, padded, tiny_job
from tests.integration.mesh.expected_weights import undisturbed
from tests.integration.mesh.user_jobs import held_job, hold, words
from tests.patience import PATIENCE_S

POLICY = """
from dmsc import Policy

class Watcher(Policy):
    name = "watcher"
    version = "3"
    every_s = 0.1

    def on_observation(self, observation, at): ...

    def decide(self, view, now):
        told = f"{len(view.stages)} stages, {len(view.observed)} observations, graph {view.graph is not None}"
        return self.note(view, told)
"""


def test_a_module_is_ordered_killed_and_comes_back_as_it_was_ordered_to_be(
    mesh: Mesh, tmp_path: Path
) -> None:
    (tmp_path / "watcher.py").write_text(POLICY)
    command = ("policy", "run", "--shadow", "watcher.py", "--state", str(mesh.state))
    gate = tmp_path / "gate"
    parallel = {"stages": 2, "replicas": 1, "segmentation": "uniform"}
    spec = held_job(words(tmp_path), gate, parallel=parallel)
    client = mesh.client

    def status() -> ModuleStatus | None:
        return next((one for one in client.policies() if one.module == "watcher"), None)

    def as_ordered() -> bool:
        """It has said so itself: what it is ordered to be and for which jobs comes to it one by one."""
        now = status()
        return now is not None and (now.state, now.crashes, now.without, now.strikes) == (
            ("active", 1, ("another",), 1)
        )

    job = hold(client, spec, gate)
    with running(*command, cwd=tmp_path) as first:
        first.until("module ready")
        assert client.order_policy("watcher", "activate", reason="a test").state == "active"
        assert client.order_policy("watcher", "disable", jobs=["another"]).without == ("another",)
        client.observe(Observation(source="test", what="weather", job=job))
        wait_for(lambda: "1 observations" in asked(mesh, job))
        before = asked(mesh, job)
        first.process.kill()
        first.wait()
    with running(*command, cwd=tmp_path) as second:
        second.until("module ready")
        wait_for(as_ordered, lambda: str(status()))
        assert asked(mesh, job) == before == "2 stages, 1 observations, graph True"
        letter = unreadable_suggestion(mesh, "watcher")
        assert letter.startswith("invalid body: policy.suggestion: "), letter
        assert "\n" not in letter
        wait_for(lambda: status().strikes == 2, lambda: str(status()))
        listed = json.loads(mesh.printed("policy", "list", "--json"))
        assert {"name": "service-time-weights", "state": "not running"} in listed
        told = json.loads(mesh.printed("policy", "ask", "watcher", job, "--json"))
        assert told["suggestions"][0]["scope"] == "job"
        left = mesh.printed("policy", "order", "watcher", "drain")
        assert left == "watcher 3: draining, all jobs but another\n"
        assert second.wait() == 0
    with pytest.raises(NotFound, match="no module watcher is active"):
        client.ask_policy("watcher", job)
    assert status() is None
    gate.unlink()
    assert done(client, job).recoveries == 0


WORDS = """
from pathlib import Path

from dmsc import Policy
from schemas.changes import Forecast, JobObjective, StepUse

class Words(Policy):
    name = "words"
    every_s = 0.05
    steps = ()
    judged = ()
    declined = ()

    def on_policy_decision(self, decision, at):
        if decision.module == self.name and not decision.adopted:
            print("declined:", decision.reason, flush=True)
            self.declined = (*self.declined, decision.reason)

    def on_job_event(self, event, at):
        if event.result is not None:
            self.steps = (*self.steps, event.result.step_s)
        if event.change is not None and event.change.after_s is not None:
            self.judged, self.steps = (*self.judged, event.change.kind), ()

    def decide(self, view, now):
        if len(self.steps) < 6:
            return None
        before = sorted(self.steps[-4:])[1]
        left = view.total_steps - view.step
        uses = {JobObjective.ENERGY: StepUse(before=90.0, after=50.0)}
        if not self.judged:
            energy = JobObjective.ENERGY
            calm = Forecast.of(before, 0.3, cost_s=0.0, steps_left=left, objective=energy, uses=uses)
            return self.set_rate(view, 14.0, calm, reason="a hot rack")
        if not Path("seen").exists():  # what the first one set has been looked at
            return None
        if not any("forbids" in reason for reason in self.declined):
            slower = Forecast.of(before, 2 * before, cost_s=0.0, steps_left=left)
            return self.set_window(view, 0, 1, slower, reason="nonsense")
        one, other = (f"{view.job}-s0-r{number}" for number in range(2))
        standby = f"{view.job}-s0-r2"
        if "reduction" not in self.judged:
            parts, order = {one: 3.0, other: 1.0}, (other, one)
            faster = Forecast.of(before, 0.8 * before, cost_s=0.0, steps_left=left)
            return self.set_reduction(view, 0, faster, parts=parts, order=order, reason="a slow link")
        if "weights" not in self.judged:
            faster = Forecast.of(before, 0.7 * before, cost_s=0.0, steps_left=left)
            return self.set_weights(view, 0, {one: 3.0, other: 1.0}, forecast=faster, reason="a guess")
        if "avoidance" not in self.judged:
            faster = Forecast.of(before, 0.7 * before, cost_s=0.0, steps_left=left)
            return self.use_backup(view, one, standby, forecast=faster, reason="a bad port")
        return None
"""


def test_what_a_module_sets_is_measured_and_no_bit_depends_on_it(mesh: Mesh, tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(WORDS)
    job = tiny_job(
        "rated",
        training={"steps": 100, "microbatches": 4, "seed": 5},
        parallel={"stages": 1, "replicas": 2, "standbys": 1},
        automation={"mode": "off", "objective": "energy"},
    )
    with running("policy", "run", "words.py", "--state", str(mesh.state), cwd=tmp_path) as module:
        module.until("module ready")
        # 2 microbatches of an instance take less than the rate leaves them, 3 of them surely more
        name = mesh.client.submit(padded(job, 22.0)).job
        module.until(f"declined: automation of job {name} is off: nothing is adopted (`dmsc policy auto")
        mesh.printed("policy", "automation", name, "act")
        changes: list[JobChange] = []
        texts: list[str] = []
        held: list[Knob] = []
        shares: list[dict[str, int]] = []
        for event in mesh.client.events(name):
            changes += [event.change] if event.change is not None else []
            shares += [event.result.shares] if event.result is not None else []
            if not held and any(each.after_s is not None for each in changes):
                held = [knob for knob in mesh.client.automation(name).knobs if knob.holder == "words"]
                (tmp_path / "seen").touch()
            texts += [event.text] if event.text else []
        record = done(mesh.client, name)
    story = "\n".join([*texts, module.output])
    assert [(knob.name, knob.value) for knob in held] == [("admission rate", "14 microbatches a second")]
    forbidden = "its own objective time forbids it: by its forecast a step takes "
    assert forbidden in module.output, story
    rate = next((each for each in changes if each.kind == "rate" and each.after_s is not None), None)
    assert rate is not None, story
    assert (rate.state, rate.by, rate.what) == (
        ("better", "words", "admission rate: no limit → 14 microbatches a second")
    ), story
    assert rate.after_s is not None
    assert rate.after_s >= 0.26, story  # 4 microbatches take 0.286 s
    reduction = next((each for each in changes if each.kind == "reduction" and each.after_s), None)
    assert reduction is not None, story
    first, second = f"{name}-s0-r0", f"{name}-s0-r1"
    assert reduction.what == (
        f"reduction of stage 0: equal parts → {first} 3, {second} 1 in the order {second}, {first}"
    )
    weights = next((each for each in changes if each.kind == "weights" and each.after_s is not None), None)
    assert weights is not None, story
    assert (weights.state, weights.to_stage) == ("no_better", 0), story
    assert weights in record.changes
    detour = next((each for each in changes if each.kind == "avoidance" and each.after_s is not None), None)
    assert detour is not None, story
    assert detour.what == f"route to {first}: by {first[:-1]}2", story
    assert detour.state in ("better", "no_better"), story
    by_standby = [share for share in shares if share.get(f"{first[:-1]}2")]
    assert len(by_standby) >= 8, shares
    assert any(not share.get(first) and share.get(second) for share in by_standby), shares
    if detour.state == "no_better":
        assert f"{first[:-1]}2" not in {sid for sid, count in shares[-1].items() if count}, "it rests again"
    assert record.weights is not None
    assert record.weights.sha256 == undisturbed(mesh.client, record.spec)


def unreadable_suggestion(mesh: Mesh, module: str) -> str:
    """Sends what no suggestion is on a module's subject; why the orchestrator has buried it."""

    async def sent() -> str:
        async with mesh.bus("witness", token=mesh.token) as bus:
            letters: asyncio.Queue[DeadLetter] = asyncio.Queue()

            async def take(letter: DeadLetter, envelope: Envelope) -> None:
                if letter.subject.endswith(f".{module}"):
                    letters.put_nowait(letter)

            await bus.subscribe(subjects.DEAD_LETTER, take)
            raw = await nats.connect(mesh.servers[0], token=mesh.token)
            body = {"module": module, "action": {"action": "set_window", "stage": "first"}}
            row = subjects.SUGGESTION
            await raw.publish(row(owner=MESH, module=module), bad_messages.envelope(row, body=body))
            await raw.close()
            return (await asyncio.wait_for(letters.get(), PATIENCE_S)).reason

    return asyncio.run(sent())


def asked(mesh: Mesh, job: str) -> str:
    """What the module says of the job now."""
    answer = mesh.client.ask_policy("watcher", job)
    return answer.suggestions[0].reason if answer.suggestions else ""


def test_what_may_not_be_is_one_line(mesh: Mesh) -> None:
    for command, said in (
        (
            ("policy", "enable", "nobody", "--job", "j"),
            "no module nobody runs: `dmsc policy list` shows which do",
        ),
        (("policy", "order", "nobody", "dance"), "dance: activate, shadow or drain"),
        (("policy", "ask", "nobody", "j", "--inputs", "none.json"), "none.json: No such file or directory"),
    ):
        assert mesh.dmsc(*command).stderr == f"dmsc: {said}\n"
