"""What policies learnt: the same bytes from the same events, also over restarts; misfits leave it empty."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bus import subjects
from dmsc.process.policy_loading import BUILT_IN, load_policy
from policies.built_in.device_risk import DeviceRisk
from policies.built_in.link_trend import LinkTrend
from policies.built_in.routing_bandit import TILTS, RoutingBandit
from policies.built_in.transience import Transience
from policies.kit.engine import Engine, EngineConfig, Event
from policies.kit.policy import Policy
from policies.numerics.conservative_bandit import ArmPrior, ConservativeBandit
from policies.scoring.replay import PolicyReplay
from schemas.errors import BadInput
from schemas.job import JobEvent, JobState
from schemas.learnt_state import (
    MOST_LEARNT_BYTES,
    LearntState,
    canonical_json,
    digest_of,
    parsed_json,
)
from schemas.policy import PolicySuggestion
from schemas.telemetry import DeviceSample, LinkFigures, LinkSample
from tests.builders.jobs import step_result
from tests.builders.services import ended, served_by, told_of
from tests.builders.telemetry import sample

SEED = 11
BEGAN = 1_790_000_000.0
LEARNING = [
    "canary-judge",
    "checkpoint-interval",
    "device-risk",
    "link-trend",
    "port-faults",
    "routing-bandit",
    "topology-scoring",
    "transience",
]
ONLY_TRAINED = {"port-faults", "topology-scoring"}
"""Those that learn nothing while they run."""


class Counting(Policy):
    """Learns how many samples each instance has sent, and says it."""

    name = "counting"
    state_version = 2

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def learnt_state(self) -> Any:
        return self.counts

    def restore(self, state: Any) -> None:
        if not all(isinstance(count, int) for count in state.values()):
            raise ValueError("counts that are none")
        self.counts = dict(state)

    def on_instance_sample(self, message, at):
        self.counts[message.sid] = self.counts.get(message.sid, 0) + 1

    def decide(self, view, now):
        return self.set_weights(view, 0, dict(self.counts), reason=str(sum(self.counts.values())))


def event(at: float, **more: Any) -> Event:
    return Event(row=subjects.INSTANCE_SAMPLE, message=sample(**more), id=f"e{at}", at=BEGAN + at)


def kept(data: str, **more: Any) -> LearntState:
    fields = {
        "module": "counting",
        "version": "1",
        "schema_version": 2,
        "revision": 1,
        "digest": digest_of(data),
        "data": data,
        "at": BEGAN,
        "by": "i1",
    }
    return LearntState(**{**fields, **more})


def recorded(at: float, state: LearntState) -> Event:
    return Event(row=subjects.LEARNT_STATE, message=state, id=f"l{at}", at=BEGAN + at)


def bytes_of(suggestions: list[PolicySuggestion]) -> list[str]:
    return [suggestion.model_dump_json() for suggestion in suggestions]


def busy_events(seed: int, seconds: int = 500) -> list[Event]:
    """A job with unequal instances, links that swing, a warm device, silences, recoveries; and a service."""
    noise, events = np.random.default_rng(seed), []
    served, asked = served_by(weights={"v1": 8_000, "v2": 2_000}, stable="v1"), np.random.default_rng(seed)
    for second in range(seconds):
        at = BEGAN + second
        requests = [
            ended("v2" if asked.random() < 0.2 else "v1", first_token_s=float(asked.exponential()), key=key)
            for key in (None, int(asked.integers(500)))
        ]
        told = told_of(served, *requests)
        events.append(Event(row=subjects.SERVICE_OUTCOMES, message=told, id=f"o{second}", at=at))
        for number, sid in enumerate(("j-s0-r0", "j-s1-r0", "j-s1-r1")):
            if number == 2 and second % 97 < 9:
                continue  # falls silent for nine seconds
            links = ()
            if number == 0:
                figures = (8 + 3 * np.sin(second / 45 + peer) + noise.normal(0, 0.2) for peer in range(2))
                links = tuple(
                    LinkSample(peer=f"j-s1-r{peer}", transfers=1, figures=LinkFigures(transfer_ms=float(ms)))
                    for peer, ms in enumerate(figures)
                )
            device = DeviceSample(device="cuda:0", ecc_errors=second // 200, temperature_c=82.0)
            told = sample(
                sid,
                step=second,
                service_ms=10.0 * (1 + number),
                links=links,
                device=device if number else None,
            )
            events.append(Event(row=subjects.INSTANCE_SAMPLE, message=told, id=f"s{second}-{number}", at=at))
        result = step_result(second, step_s=float(1 + noise.normal(0, 0.02)))
        told = JobEvent(job="j", kind="step", at=at, result=result)
        events.append(Event(row=subjects.JOB_EVENT, message=told, id=f"e{second}", at=at))
        if second % 120 == 60:
            told = JobEvent(job="j", kind="recovery", at=at, text="planned again")
            events.append(Event(row=subjects.JOB_EVENT, message=told, id=f"r{second}", at=at))
    return events


def test_a_suggestion_names_the_state_that_it_was_made_from() -> None:
    engine = Engine(Counting(), EngineConfig())
    engine.take([event(0.0), event(0.1, sid="j-s0-r1")])
    output = engine.decide(BEGAN + 1)
    assert output.learnt == '{"j-s0-r0":1,"j-s0-r1":1}'
    assert [suggestion.state for suggestion in output.suggestions] == [digest_of(output.learnt)]


def test_a_policy_without_a_state_names_none() -> None:
    class Plain(Policy):
        name = "plain"

        def decide(self, view, now):
            return self.note(view, "hello")

    engine = Engine(Plain(), EngineConfig())
    engine.take([event(0.0)])
    output = engine.decide(BEGAN)
    assert (output.learnt, [suggestion.state for suggestion in output.suggestions]) == (None, [""])


def test_an_attribute_of_the_author_s_own_by_the_name_of_a_hook_is_left_alone() -> None:
    class Drifting(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.drift = 0.3  # type: ignore[assignment]

    engine = Engine(Drifting(), EngineConfig())
    engine.take([event(0.0)])
    output = engine.decide(BEGAN)
    assert (len(output.suggestions), output.problems) == (1, [])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ('{"a":"b"}', "ValueError: counts that are none"),
        ("[1]", "AttributeError: "),
        ("{", "JSONDecodeError: "),
        ('{"a":NaN}', "ValueError: NaN in a learnt state"),
    ],
)
def test_a_state_that_does_not_fit_leaves_it_empty_and_says_why(data: str, reason: str) -> None:
    engine = Engine(Counting(), EngineConfig())
    engine.take([event(0.0)])
    with pytest.raises(ValueError, match=f"^{reason}[^\n]*$"):
        engine.restore(data)
    assert engine.learnt(into=[]) == "{}"


@pytest.mark.parametrize("state", [{"a": float("nan")}, {"a": object()}, {"a": "x" * MOST_LEARNT_BYTES}])
def test_a_state_that_can_t_be_kept_is_an_error_of_the_policy_and_its_suggestion_stays(state: Any) -> None:
    class Odd(Counting):
        def learnt_state(self) -> Any:
            return state if self.counts else {}

    engine = Engine(Odd(), EngineConfig())
    engine.take([event(0.0)])
    output = engine.decide(BEGAN)
    assert len(output.suggestions) == 1
    assert {problem.where for problem in output.problems} == {"learnt_state"}


def test_a_state_that_can_t_be_kept_is_said_once_and_suspends_nothing() -> None:
    class Growing(Counting):
        def learnt_state(self) -> Any:
            return {"a": "x" * MOST_LEARNT_BYTES} if self.counts else {}

    engine, problems = Engine(Growing(), EngineConfig(max_errors=2)), []
    engine.take([event(0.0)])
    assert [engine.learnt(into=problems) for _ in range(9)] == [None] * 9
    assert (len(problems), engine.suspended) == (1, "")
    assert len(engine.decide(BEGAN).suggestions) == 1


def test_a_policy_that_can_t_go_on_from_nothing_is_refused_before_it_starts() -> None:
    class Strict(Counting):
        def restore(self, state: Any) -> None:
            self.counts = {"j-s0-r0": state["j-s0-r0"]}

    with pytest.raises(
        BadInput, match=r"^counting: learnt_state and restore do not fit together: KeyError: 'j"
    ):
        Engine(Strict(), EngineConfig())


def test_a_policy_whose_restore_fails_again_says_so_and_goes_on() -> None:
    class Once(Counting):
        failing = False

        def restore(self, state: Any) -> None:
            if self.failing:
                raise RuntimeError("never again")
            super().restore(state)

    policy = Once()
    engine = Engine(policy, EngineConfig())
    policy.failing = True
    with pytest.raises(ValueError, match=r"^RuntimeError: never again$"):
        engine.restore('{"a":1}')


def test_link_trend_keeps_the_slowest_of_more_links_than_fit() -> None:
    """200 links of 12 minutes; those of a job that nobody heard of for an hour are left out."""
    policy = LinkTrend()
    ended = (LinkSample(peer="k-s1-r0", transfers=1, figures=LinkFigures(transfer_ms=5.0)),)
    policy.on_instance_sample(sample("k-s0-r0", job="k", links=ended), BEGAN - 4000.0)
    for slot in range(148):
        for sender in range(10):
            links = tuple(
                LinkSample(
                    peer=f"j-stage1-replica{peer:04}",
                    transfers=1,
                    figures=LinkFigures(transfer_ms=100 + sender * 20 + peer + slot / 1e4 + 0.1234),
                )
                for peer in range(20)
            )
            policy.on_instance_sample(sample(f"j-s0-r{sender}", links=links), BEGAN + 5.0 * slot)
    state = policy.learnt_state()
    text = canonical_json(state)
    assert len(text.encode()) <= MOST_LEARNT_BYTES
    assert state["links"].keys() == state["slots"].keys() == {"j"}
    kept = [(sender, receiver) for sender, receiver, _, _ in state["links"]["j"]["links"]]
    assert len(kept) >= 80
    assert {sender for sender, _ in kept} <= {f"j-s0-r{sender}" for sender in range(5, 10)}, "the slowest"
    again = LinkTrend()
    again.restore(parsed_json(text))
    assert canonical_json(again.learnt_state()) == text


def test_transience_and_device_risk_forget_what_nobody_has_heard_of_for_an_hour() -> None:
    flaps, risk = Transience(), DeviceRisk()
    for job, began in (("old", BEGAN - 4000.0), ("j", BEGAN)):
        for at in (0.0, 10.0, 20.0):
            device = DeviceSample(device="cuda:0", ecc_errors=int(at))
            told = sample(f"{job}-s0-r0", job=job, device=device)
            flaps.on_instance_sample(told, began + at)
            risk.on_instance_sample(told, began + at)
    assert [job for job, *_ in flaps.learnt_state()["flapping"]] == ["j"]
    assert [suspect["job"] for suspect in risk.learnt_state()["suspects"]] == ["j"]
    for number in range(900):
        for at in (0.0, 10.0):
            flaps.on_instance_sample(sample(f"j-s0-r{number}", incarnation="i2"), BEGAN + at)
    assert len(flaps.learnt_state()["flapping"]) == 500


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_built_in_policy_goes_on_from_its_state_with_the_same_bytes(name: str) -> None:
    """A kill of its process at any time: the rest of the events gives the state of a life without it."""
    policy = load_policy(name)
    assert (policy.state_version > 0) == (name in LEARNING)
    if not policy.state_version:
        return
    print("seed", SEED)
    events = busy_events(SEED)
    whole, cut = Engine(policy, EngineConfig()), len(events) * 2 // 3
    whole.take(events[:cut])
    middle = whole.learnt(into=[])
    again = Engine(load_policy(name), EngineConfig())
    again.take(events[cut - 900 : cut])  # the last minutes of the streams
    assert middle is not None
    again.restore(middle)
    assert again.learnt(into=[]) == middle
    whole.take(events[cut:])
    again.take(events[cut:])
    assert again.learnt(into=[]) == whole.learnt(into=[])
    assert (again.learnt(into=[]) == middle) == (name in ONLY_TRAINED)
    again.restore("")
    assert again.learnt(into=[]) == Engine(load_policy(name), EngineConfig()).learnt(into=[])


def test_a_replay_goes_on_from_recorded_states_and_gives_the_same_bytes() -> None:
    """The module is killed at 10 s and starts again from what was kept; a person resets it at 20 s."""
    live, said = Engine(Counting(), EngineConfig()), []
    record: list[Event] = [recorded(0.0, kept('{"j-s0-r0":40}'))]
    live.restore('{"j-s0-r0":40}')
    for second in range(1, 30):
        if second == 10:
            data = live.learnt(into=[])
            assert data is not None
            record.append(recorded(second - 0.5, kept(data, revision=2, through=BEGAN + second - 0.5)))
            live = Engine(Counting(), EngineConfig())
            live.restore(data)
        if second == 20:
            live.restore("")
            record.append(
                recorded(second - 0.5, kept("", revision=3, source="reset", through=BEGAN + second - 0.5))
            )
        record.append(event(float(second), step=second))
        live.take([record[-1]])
        said += live.decide(BEGAN + second).suggestions
    assert [suggestion.reason for suggestion in said][8:21:11] == ["49", "1"]
    for _ in range(2):
        replay = PolicyReplay(Counting())
        replayed = [one.suggestion for one in replay.run(record)]
        assert bytes_of(replayed) == bytes_of(said)
        assert replay.problems == []


def test_a_replay_of_another_version_begins_with_what_was_learnt_and_learns_by_itself() -> None:
    class Later(Counting):
        version = "2"

    record = [
        recorded(0.0, kept('{"j-s0-r0":40}')),
        event(1.0),
        recorded(2.0, kept('{"j-s0-r0":90}')),
        event(3.0),
    ]
    assert [one.suggestion.reason for one in PolicyReplay(Later()).run(record)] == ["41", "42"]

    class Other(Counting):
        version, state_version = "2", 3

    replay = PolicyReplay(Other())
    assert [one.suggestion.reason for one in replay.run(record)] == ["1", "2"]
    assert replay.problems[0].text.startswith("recorded state 1 of version 1 does not fit: schema version 2")


def test_events_that_a_recorded_state_lacks_are_folded_again() -> None:
    """The module wrote what it knew at 5 s, and the state is in the record half a second later."""
    record = [event(float(second), step=second) for second in range(1, 6)]
    record += [event(5.2), recorded(5.5, kept('{"j-s0-r0":40}', through=BEGAN + 5.0)), event(8.0, step=8)]
    replay = PolicyReplay(Counting())
    assert replay.run(record)[-1].suggestion.reason == "42"
    assert replay.problems == []
    engine = Engine(Counting(), EngineConfig())
    engine.take([event(float(second)) for second in range(0, 300, 10)])
    assert engine.restore('{"j-s0-r0":40}', BEGAN) == []
    assert engine.learnt(into=[]) == '{"j-s0-r0":47}', "those of the last minute"


def test_a_replay_goes_on_from_no_other_user_s_states() -> None:
    record = [
        recorded(0.0, kept('{"j-s0-r0":40}', through=BEGAN)),
        recorded(0.1, kept('{"j-s0-r0":900}', owner="eve", through=BEGAN)),
        event(1.0),
    ]
    assert [one.suggestion.reason for one in PolicyReplay(Counting()).run(record)] == ["41"]
    mine = [recorded(0.0, kept('{"j-s0-r0":40}', owner="ada", through=BEGAN)), event(1.0)]
    assert [one.suggestion.reason for one in PolicyReplay(Counting()).run(mine)] == ["41"], "one's own"


def test_the_text_of_a_state_is_canonical() -> None:
    text = canonical_json({"b": [1, 0.1, 1e300], "a": {"ü": None}})
    assert text == '{"a":{"ü":null},"b":[1,0.1,1e+300]}'
    assert canonical_json(parsed_json(text)) == text
    assert kept(text).damage == ""
    assert kept(text, digest=digest_of("")).damage.startswith("damaged: its digest is")


def test_what_one_job_has_shown_of_an_arm_is_tried_sooner_in_the_next() -> None:
    """Without a prior, a trial has to be paid for by `RISK`; a good arm is affordable at once."""
    prior = (ArmPrior(1.0, 9.0), ArmPrior(1.3, 9.0), ArmPrior(0.8, 9.0), ArmPrior(1.3, 9.0))

    def first_trial(bandit: ConservativeBandit) -> tuple[int, int]:
        for turn in range(1, 1000):
            if arm := bandit.choose():
                return turn, arm
            bandit.cost(0, 1.0)
        raise AssertionError("it never tries")

    turn, arm = first_trial(ConservativeBandit(arms=len(TILTS), prior=prior))
    assert arm == 2
    assert turn < first_trial(ConservativeBandit(arms=len(TILTS)))[0]


def test_the_bandit_remembers_ended_jobs_as_priors() -> None:
    policy = RoutingBandit()
    engine = Engine(policy, EngineConfig())
    engine.take(busy_events(SEED, 200))
    before = policy.learnt_state()
    assert before["priors"] == {}
    ended = JobEvent(job="j", kind="state", at=BEGAN, state=JobState.DONE)
    engine.take([Event(row=subjects.JOB_EVENT, message=ended, id="end", at=BEGAN + 201)])
    after = policy.learnt_state()
    assert after["jobs"] == {}
    assert after["priors"].keys() == before["jobs"]["j"]["bandits"].keys()
    assert {arms[0][0] for arms in after["priors"].values()} == {1.0}
    assert max(arms[0][1] for arms in after["priors"].values()) > 0
