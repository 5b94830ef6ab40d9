"""Who may change the number of a version's replicas: its load, unless a person or the mode says otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bus import subjects
from entities.orchestrator.automation.load_scaling import LoadScaling, ScalingTimes
from schemas.automation import Automation, PinnedKnob
from schemas.job import JobState
from schemas.services.figures import ServiceFigures, VersionFigures
from tests.builders.graphs import graph, unit
from tests.builders.jobs import job as job_record
from tests.builders.jobs import spec
from tests.job_context import job_context

PIN = PinnedKnob(knob="replicas", value="2", by="rita", at=1.0)
BUSY = VersionFigures(service="s", version="v1", job="j", sessions=12, requests={"ok": 1})


class Deposed(Exception):
    """The term is over."""


class Version:
    """The run of a version with one replica of at most four, as far as the scaling looks at it."""

    def __init__(self, *pins: PinnedKnob, least: int = 1, **scale: float) -> None:
        given = spec(
            parallel={"stages": 1, "replicas": {"min": least, "want": 1, "max": 4}},
            serve={
                "service": "s",
                "sessions": 8,
                "scale": {"fill": 0.5, "up_s": 0.0, "down_s": 0.0, **scale},
            },
        )
        record = job_record("j", spec=given).model_copy(update={"state": JobState.RUNNING, "pins": pins})
        self.told: list[str] = []
        self.name, self.over, self.replicas = "j", False, 1
        self.preferred: int | None = None
        self.automation = Automation.ACT
        self.holding = self.parking = self
        self.job = job_context(
            record,
            instances=SimpleNamespace(graph=graph(unit("j-s0-r0"))),
            events=SimpleNamespace(changed=self.told.append),
        )

    def prefer(self, replicas: int | None) -> None:
        self.preferred = replicas

    def change_size(self, replicas: int, why: str) -> bool:
        self.told.append(f"{replicas}: {why}")
        self.replicas = replicas
        return True

    async def rest(self, why: str) -> bool:
        self.told.append(f"rests: {why}")
        self.job.store.record = self.job.store.record.model_copy(update={"state": JobState.PARKED})
        return True


async def looked_at(
    version: Version, *told: VersionFigures, looks: int = 2, figures_s: float = 0.0
) -> Version:
    """The version after so many looks, a second apart, of which the first ones come behind these figures."""
    heard: list[Any] = []
    left = [looks]

    async def subscribe(row: Any, handler: Any) -> Any:
        assert row is subjects.SERVICE_FIGURES
        heard.append(handler)

        async def stop(drain: bool) -> None:
            heard.clear()

        return SimpleNamespace(stop=stop)

    async def confirmed() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Deposed
        number = looks - left[0] - 1
        if number < len(told):
            await heard[0](ServiceFigures(gateway="a", since=1.0, versions=(told[number],)), None)

    bus: Any = SimpleNamespace(subscribe=subscribe)
    runs: Any = {"j": version}
    times = ScalingTimes(every_s=0.0, figures_s=figures_s)
    scaling = LoadScaling(bus, runs, confirmed, times, lambda: float(looks - left[0]))
    with pytest.raises(Deposed):
        await scaling.run()
    assert not heard, "it hears nobody after its end"
    return version


async def test_load_brings_replicas_and_their_absence_takes_them() -> None:
    version = await looked_at(Version(), BUSY, looks=1)
    assert version.preferred == 3
    assert version.told == [
        "orchestrator: 3 replicas wanted instead of 1: 12 sessions, of 8 per replica",
    ]
    version.replicas, version.told = 3, []
    await looked_at(version, BUSY.model_copy(update={"sessions": 2}), looks=1)
    assert (version.preferred, version.replicas) == (1, 1)
    assert version.told == ["1: orchestrator: no more than 1 needed for 0 s: 2 sessions, of 8 per replica"]


async def test_what_a_person_has_set_stays() -> None:
    version = await looked_at(Version(PIN), BUSY)
    assert (version.preferred, version.told) == (None, [])


async def test_below_act_nothing_changes_and_advice_is_said_once() -> None:
    version = Version()
    version.automation = Automation.ADVISE
    await looked_at(version, BUSY, looks=3)
    assert version.preferred is None
    assert version.told == [
        "orchestrator advises 3 replicas instead of 1: 12 sessions, of 8 per replica",
    ]
    version = Version()
    version.automation, version.preferred = Automation.OFF, 3
    await looked_at(version, BUSY)
    assert (version.preferred, version.told) == (None, []), "what was adopted has ended"


async def test_an_idle_version_rests_where_its_file_says_so() -> None:
    version = await looked_at(Version(least=0, idle_s=2.0), looks=3)
    assert version.told == ["rests: nobody has asked it for 2 s"]
    assert (await looked_at(Version(idle_s=2.0), looks=3)).told == [], "min is 1"


async def test_a_version_that_is_woken_between_two_looks_does_not_rest_at_the_next_one() -> None:
    """Gateways have not told yet of the requests that woke it."""

    class Woken(Version):
        async def rest(self, why: str) -> bool:
            self.told.append(why)
            return True  # and runs again

    version = Woken(least=0, idle_s=5.0)
    # At a first look it counts as asked for the 2 s in which gateways tell, as one that has just started: so
    # it rests at the seconds 8 and 16, and not before 24.
    await looked_at(version, looks=23, figures_s=2.0)
    assert version.told == ["nobody has asked it for 5 s"] * 2
