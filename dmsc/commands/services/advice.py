"""What to do next about a service, in lines below its table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from schemas.services.model_service import (
    DEPLOYED,
    ModelService,
    ServedVersion,
    ServiceState,
    TrafficChange,
    VersionState,
)

REFUSED = VersionState.REFUSED
FIRST = "no model is served; serve what a job has trained: dmsc serve JOB --service NAME"


def of_list(services: Sequence[ModelService]) -> list[str]:
    """The lines below `dmsc service list`: those that need somebody, else how to look closer."""
    if not services:
        return [FIRST]
    living = [service for service in services if service.state is not ServiceState.STOPPED]
    return [f"{service.service}: {line}" for service in living for line in _troubles(service)]


def of_status(services: Sequence[ModelService]) -> list[str]:
    """The lines below `dmsc status`: versions that should answer and don't; refused ones never did."""
    living = [service for service in services if service.state is not ServiceState.STOPPED]
    return [
        f"service {service.service}: {line}"
        for service in living
        for line in _troubles(service, [each for each in service.versions if each.state is not REFUSED])
    ]


def of_service(service: ModelService) -> list[str]:
    """The lines below `dmsc service show`."""
    name = service.service
    if service.state is ServiceState.STOPPED:
        return [f"{name} is stopped; a version begins it anew: dmsc serve FILE --service {name}"]
    lines = list(_troubles(service))
    for version in service.versions:
        if (back := went_back(service, version.version)) is not None:
            lines.append(
                f"{version.version} went back ({back.by}): {back.why}; mend it, and deploy it under another "
                f"name: dmsc serve FILE --service {name} --version NAME"
            )
        elif _lacks_traffic(service, version):
            share = f"{service.stable or 'OTHER'}=95 {version.version}=5"
            lines.append(
                f"{version.version} is {version.state} and gets no traffic: "
                f"dmsc service traffic {name} {share}, or have it answer copies only: "
                f"dmsc service shadow {name} {version.version}"
            )
    if len(service.weights) > 1 and service.stable not in service.weights:
        lines.append(
            f"nobody is compared, for the stable version ({service.stable}) gets no traffic: give it a part "
            f"(dmsc service traffic {name} …)"
        )
    if service.history:
        last = service.history[-1]
        why = f": {last.why}" if last.why and not any(last.why in line for line in lines) else ""
        lines.append(f"traffic as {last.by} set it{why}; all changes: dmsc service show {name} --history")
    return lines


def went_back(service: ModelService, version: str) -> TrafficChange | None:
    """The rollback by which a version that is deployed lost its traffic; None: it was none."""
    found = service.version(version)
    if found is None or not _lacks_traffic(service, found):
        return None
    before: TrafficChange | None = None
    lost_by: TrafficChange | None = None
    for change in service.history:
        if before is not None and before.weights.get(version) and not change.weights.get(version):
            lost_by = change
        before = change
    return lost_by if lost_by is not None and lost_by.action == "rollback" else None


def _troubles(service: ModelService, among: Iterable[ServedVersion] | None = None) -> Iterator[str]:
    name = service.service
    for version in service.versions if among is None else among:
        job, state, why = version.job, version.state.value, f" ({version.reason})" if version.reason else ""
        if state == "deploying":
            yield f"{version.version} is not ready yet{why}: dmsc queue explain {job}, dmsc logs --job {job}"
        elif state == "impaired":
            yield f"{version.version} has a stage without anybody{why}: dmsc faults, dmsc logs --job {job}"
        elif state == "refused":
            yield (
                f"{version.version} was refused{why}; mend that, and deploy it under another name: "
                f"dmsc serve FILE --service {name} --version NAME"
            )
    deployed = [version.version for version in service.versions if version.state in DEPLOYED]
    if not service.weights and deployed:
        yield f"nobody answers: dmsc service promote {name} {deployed[0]}"


def _lacks_traffic(service: ModelService, version: ServedVersion) -> bool:
    is_asked = service.weights.get(version.version) or version.version in service.shadow
    return bool(service.weights) and version.state in DEPLOYED and not is_asked
