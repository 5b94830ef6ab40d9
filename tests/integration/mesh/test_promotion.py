"""Two versions of a module run during a job, one is promoted in mid-run: no step is lost, the weights are
those of an undisturbed run; afterwards the run is exported and replayed without the mesh. What each version
learnt is on the bus and in the record (ADR-0100)."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from bus import subjects
from bus.recording.run_file import RunFile
from dmsc.process.policy_loading import load_policy
from dmsc.replay.scores import live_scores
from dmsc.replay.session import Session
from dmsc.state.settings import BusAddress
from schemas.errors import BadMessage
from schemas.job import JobSpec, JobState
from schemas.policy import PolicyDecision, PolicySwitch
from tests.integration.dmsc.command_line import running
from tests.integration.mesh.conftest import Mesh, done, padded, tiny_job
from tests.patience import PATIENCE_S

STEPS = 24
POLICY = '''
from dmsc import Policy

class Leaning(Policy):
    """Version {version}: most work for replica {favourite}, and it changes its mind a little each time."""
    name = "leaning"
    version = "{version}"
    every_s = 0.7
    state_version = 1

    def __init__(self):
        self.steps = 0

    def learnt_state(self):
        return {{"steps": self.steps}}

    def restore(self, state):
        self.steps = int(state["steps"])

    def on_job_event(self, event, at):
        self.steps += event.result is not None

    def decide(self, view, now):
        sids = sorted(one.sid for one in view.stage(0))
        if len(sids) < 2:
            return None
        weights = dict.fromkeys(sids, 1.0)
        weights[sids[{favourite}]] = 3.0 + 0.5 * (view.step % 3)
        return self.set_weights(view, 0, weights, reason="version {version}", valid_s=30.0)
'''


def shape(name: str, *, pad_ms: float) -> JobSpec:
    """One stage of two replicas; padded, a step takes long enough for somebody to decide something."""
    job = tiny_job(
        name,
        model={"args": {"layers": 1, "width": 32, "heads": 2, "context": 32, "dropout": 0.1}},
        data={"source": __file__},
        training={"steps": STEPS, "microbatches": 6, "microbatch_samples": 2, "seed": 5},
        parallel={"stages": 1, "replicas": 2},
        routing={"algorithm": "least-outstanding"},
    )
    return padded(job, pad_ms)


async def said(mesh: Mesh) -> list[PolicyDecision | PolicySwitch]:
    """Decisions and switches, in the order of their stream."""
    found = []
    async with mesh.bus("t") as bus:
        for row in (subjects.POLICY_DECISION, subjects.POLICY_SWITCH):
            async for item in bus.history(row, module="leaning"):
                found.append((item.sequence, item.message))
    return [message for _, message in sorted(found, key=lambda one: one[0])]


def test_promoted_in_mid_run(mesh: Mesh, tmp_path: Path) -> None:
    plain = done(mesh.client, mesh.client.submit(shape("plain", pad_ms=0.0)).job)
    for version, favourite in (("1", 0), ("2", 1)):
        text = POLICY.format(version=version, favourite=favourite)
        (tmp_path / f"leaning{version}.py").write_text(text)

    state = ("--state", str(mesh.state))
    texts: list[str] = []
    shares: list[dict[str, int]] = []
    with (
        running("policy", "run", "leaning1.py", *state, cwd=tmp_path) as one,
        running("policy", "run", "leaning2.py", "--shadow", *state, cwd=tmp_path) as two,
    ):
        one.until("module ready")
        two.until("module ready")
        job = mesh.client.submit(shape("promoted", pad_ms=30.0)).job
        promoted = False
        for event in mesh.client.events(job):
            texts += [event.text] if event.kind == "policy" else []
            if event.result is not None:
                shares.append(event.result.shares)
            if not promoted and texts and texts[0].startswith("leaning 1: adopted"):
                switch = mesh.client.promote_policy("leaning", "2", reason="for the test")
                assert (switch.version, switch.previous) == ("2", "1")
                promoted = True
        record = mesh.client.wait(job, timeout_s=PATIENCE_S)
        learnt = mesh.client.learnt_states("leaning")
        assert {state.version: state.source for state in learnt.states} == {"1": "learnt", "2": "learnt"}
        shown = mesh.printed("policy", "state", "leaning", "--version", "2", "--reset")
        assert "reset" in shown
        assert "kept aside: replaced by" in shown
        back = mesh.client.roll_back_policy("leaning")
        assert (back.version, back.rollback) == ("1", True)
    story = "\n".join([*texts, one.output, two.output])
    assert record.state is JobState.DONE, story
    assert len(shares) == STEPS, story
    assert all(sum(share.values()) == 6 for share in shares), "nothing lost, nothing twice"
    assert record.recoveries == 0, story
    assert record.weights is not None
    assert record.weights.sha256 == plain.weights.sha256

    history = [one for one in asyncio.run(said(mesh)) if isinstance(one, PolicySwitch) or one.job == job]
    places = [place for place, one in enumerate(history) if isinstance(one, PolicySwitch)]
    before, after = history[: places[0]], history[places[0] + 1 : places[1]]
    adopted = [{one.version for one in part if getattr(one, "adopted", False)} for part in (before, after)]
    assert adopted == [{"1"}, {"2"}], story
    text = "leaning 2 is active instead of 1: for the test"
    switched = texts.index(text)
    assert all(one.startswith("leaning 1: ") for one in texts[:switched]), story
    assert any(one.startswith("leaning 2: adopted") for one in texts[switched:]), story

    address = BusAddress(servers=tuple(mesh.servers), token=mesh.bus_token)
    scores = asyncio.run(live_scores(address, [job])).of("leaning").by_version
    assert sorted(scores) == [("leaning", "1"), ("leaning", "2")]
    assert all(any(one.score is not None for one in found) for found in scores.values()), scores

    mesh.printed("runs", "export", job, "run.dmscrun", cwd=tmp_path)
    session = Session(load_policy(str(tmp_path / "leaning2.py")))
    kept: set[str] = set()
    with RunFile.open(tmp_path / "run.dmscrun") as run:
        assert (run.header.job, run.header.name, run.header.ended) == (job, "promoted", True)
        for frame in run.frames():
            session.feed(frame)
            if frame.row is subjects.LEARNT_STATE:
                with contextlib.suppress(BadMessage):  # other tests of this mesh have sent garbage there
                    kept.add(frame.open()[0].digest)
    replay = session.finish()
    assert {one.suggestion.version for one in replay.recorded} == {"1", "2"}
    assert {one.suggestion.state for one in replay.recorded} <= kept, "each is there before its suggestion"
    assert {one.suggestion.version for one in replay.replayed} == {"2"}
    assert replay.problems == []
    assert any(one.decision is not None and one.decision.adopted for one in replay.replayed)
