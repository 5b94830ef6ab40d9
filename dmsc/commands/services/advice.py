"""What to do next about a service, in lines below its table. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from schemas.services.model_service import ModelService, ServedVersion, ServiceState

FIRST = "no model is served; serve what a job has trained: dmsc serve JOB --service NAME"


def of_list(services: Sequence[ModelService]) -> list[str]:
    """The lines below `dmsc service list`: those that need somebody, else how to look closer."""
    if not services:
        return [FIRST]
    living = [service for service in services if service.state is not ServiceState.STOPPED]
    return [f"{service.service}: {line}" for service in living for line in _troubles(service)]


def of_service(service: ModelService) -> list[str]:
    """The lines below `dmsc service show`."""
    name = service.service
    if service.state is ServiceState.STOPPED:
        return [f"{name} is stopped; a version begins it anew: dmsc serve FILE --service {name}"]
    lines = list(_troubles(service))
    for version in service.versions:
        if _is_idle(service, version):
            share = f"{service.stable or 'OTHER'}=95 {version.version}=5"
            lines.append(
                f"{version.version} is ready and gets no traffic: dmsc service traffic {name} {share}, "
                f"or have it answer copies only: dmsc service shadow {name} {version.version}"
            )
    if service.history:
        last = service.history[-1]
        why = f": {last.why}" if last.why else ""
        lines.append(f"traffic as {last.by} set it{why}; all changes: dmsc service show {name} --history")
    return lines


def _troubles(service: ModelService) -> Iterator[str]:
    name = service.service
    for version in service.versions:
        job, state, why = version.job, version.state.value, f" ({version.reason})" if version.reason else ""
        if state == "deploying":
            yield f"{version.version} is not ready yet{why}: dmsc queue {job}, dmsc logs --job {job}"
        elif state == "impaired":
            yield f"{version.version} has a stage without anybody{why}: dmsc faults, dmsc logs --job {job}"
        elif state == "refused":
            yield (
                f"{version.version} was refused{why}; mend that, and deploy it under another name: "
                f"dmsc serve FILE --service {name} --version NAME"
            )
    if not service.weights and any(_is_ready(version) for version in service.versions):
        ready = next(version.version for version in service.versions if _is_ready(version))
        yield f"nobody answers: dmsc service promote {name} {ready}"


def _is_ready(version: ServedVersion) -> bool:
    return version.state.value == "ready"


def _is_idle(service: ModelService, version: ServedVersion) -> bool:
    asked = service.weights.get(version.version) or version.version in service.shadow
    return bool(service.weights) and _is_ready(version) and not asked
