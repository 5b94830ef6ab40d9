"""What to do next about a service: one line for each thing that needs somebody, with its command."""

from __future__ import annotations

from dmsc.commands.services.advice import FIRST, of_list, of_service
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
        ("dmsc faults", "(waits for 2 slots): dmsc queue j-v2", "--version NAME", "v1=95 v4=5"),
        strict=True,
    ):
        assert words in line
    assert all(line.startswith("chat: v") for line in of_list([troubled]))
    assert of_service(service(version("v1"), weights={})) == ["nobody answers: dmsc service promote chat v1"]


def test_who_set_the_traffic_last_is_told() -> None:
    change = TrafficChange(at=1.0, by="ruth", why="better", weights={"v1": 10_000})
    (line,) = of_service(service(version("v1"), history=(change,)))
    assert line.startswith("traffic as ruth set it: better;")
    stopped = service(version("v1"), state=ServiceState.STOPPED)
    assert "is stopped" in of_service(stopped)[0]
