"""What to do next about a service: one line for each thing that needs somebody, with its command."""

from __future__ import annotations

from dmsc.commands.services.advice import FIRST, of_list, of_service, of_status
from schemas.services.model_service import (
    ModelService,
    ServedVersion,
    ServiceState,
    TrafficChange,
    VersionState,
)


def version(name: str, state: VersionState = VersionState.READY, **more: object) -> ServedVersion:
    return ServedVersion.model_validate(
        {"version": name, "job": f"j-{name}", "weights": "bus://w", "state": state} | more
    )


def service(*versions: ServedVersion, **more: object) -> ModelService:
    fields = {"service": "chat", "user": "ruth", "versions": versions, "weights": {"v1": 10_000}}
    return ModelService.model_validate(fields | {"stable": "v1", "state": ServiceState.SERVING} | more)


def test_a_service_that_is_well_needs_nobody() -> None:
    assert of_service(service(version("v1"))) == []
    assert of_list([service(version("v1"))]) == []
    assert of_list([]) == [FIRST]


def test_each_trouble_has_its_command() -> None:
    troubled = service(
        version("v1", VersionState.IMPAIRED),
        version("v2", VersionState.DEPLOYING, reason="waits for 2 slots"),
        version("v3", VersionState.REFUSED, reason="the weights differ"),
        version("v4"),
        version("v5"),
        shadow=("v5",),
    )
    lines = of_service(troubled)
    assert [line.split()[0] for line in lines] == ["v1", "v2", "v3", "v4"]
    for line, words in zip(
        lines,
        ("dmsc faults", "(waits for 2 slots): dmsc queue explain j-v2", "--version NAME", "v1=95 v4=5"),
        strict=True,
    ):
        assert words in line
    assert all(line.startswith("chat: v") for line in of_list([troubled]))
    assert [line.split()[2] for line in of_status([troubled])] == ["v1", "v2"]
    assert of_service(service(version("v1"), weights={})) == ["nobody answers: dmsc service promote chat v1"]


def test_a_version_that_went_back_is_not_to_be_tried_again() -> None:
    figures = "v2 against v1: 9 of 40 requests to v2 failed, 0 of 900 to v1 in the same time"
    shared = TrafficChange(at=1.0, by="ruth", weights={"v1": 9_500, "v2": 500}, action="traffic")
    back = TrafficChange(
        at=2.0, by="canary-judge", why=figures, weights={"v1": 10_000}, action="rollback", revision=7
    )
    judged = service(version("v1"), version("v2"), history=(shared, back))
    line, last = of_service(judged)
    assert line.startswith(f"v2 went back (canary-judge): {figures}; mend it, and deploy it under another")
    assert last.startswith("traffic as canary-judge set it; all changes"), "the figures are said once"
    idle = service(version("v1"), version("v2", VersionState.IDLE), history=(shared, back))
    assert of_service(idle) == [line, last], "scaled to zero, it has gone back all the same"
    tried = judged.model_copy(update={"history": (shared, back, shared), "weights": shared.weights})
    assert not any("went back" in line for line in of_service(tried))


def test_versions_beside_whom_the_stable_one_gets_nothing_are_compared_with_nobody() -> None:
    shared = service(version("v1"), version("v2"), version("v3"), weights={"v2": 5_000, "v3": 5_000})
    assert any(line.startswith("nobody is compared") for line in of_service(shared))


def test_an_idle_version_is_deployed() -> None:
    (line,) = of_service(service(version("v1"), version("v2", VersionState.IDLE)))
    assert line.startswith("v2 is idle and gets no traffic: dmsc service traffic chat v1=95 v2=5")
    nobody = service(version("v1", VersionState.IDLE), weights={})
    assert of_list([nobody]) == ["chat: nobody answers: dmsc service promote chat v1"]


def test_who_set_the_traffic_last_is_told() -> None:
    change = TrafficChange(at=1.0, by="ruth", why="better", weights={"v1": 10_000})
    (line,) = of_service(service(version("v1"), history=(change,)))
    assert line.startswith("traffic as ruth set it: better;")
    stopped = service(version("v1"), state=ServiceState.STOPPED)
    assert "is stopped" in of_service(stopped)[0]
