"""What an order, or a change of its versions' states, makes of a service's record. Pure (ADR-0142).

Weights are ten-thousandths of the traffic; their sum is 10,000, or the map is empty: nothing is ready yet.
Which users they are is in the record, too, as runs of buckets (ADR-0149).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from entities.orchestrator.job.services.version_state import OVER
from entities.services.traffic import TrafficShares
from schemas.actions import RollBack, ServiceAction
from schemas.errors import BadInput, Conflict, NotFound
from schemas.services.model_service import (
    MOST_WHY,
    WHOLE,
    ModelService,
    OrderService,
    ServedVersion,
    ServiceState,
    TrafficAction,
    TrafficChange,
    VersionState,
)

MOST_CHANGES = 64
"""Changes of traffic that a record keeps: the latest."""
MOST_OVER = 32
"""Versions that are over and stay in a record: the latest."""
MOST_VERSIONS = 64
"""Versions of a service that are not over."""


def named(service: ModelService, version: str | None) -> ServedVersion:
    """The version of this name.

    Raises:
        BadInput: none was named.
        NotFound: there is none of this name; the text says which there are.
    """
    if version is None:
        raise BadInput("name a version of the service")
    if (found := service.version(version)) is None:
        there = ", ".join(each.version for each in service.versions) or "none"
        raise NotFound(f"service {service.service} has no version {version}; there is {there}")
    return found


def check_new(service: ModelService, version: str) -> None:
    """Refuses a version of this name if there is one already.

    Raises:
        Conflict: a version of this name is there, or there are too many.
    """
    known = service.version(version)
    if known is not None and known.state not in OVER:
        raise Conflict(
            f"service {service.service} has a version {version}, which is {known.state} (job {known.job}): "
            "give serve.version another name, or stop that one first"
        )
    if len(_living(service)) >= MOST_VERSIONS:
        raise Conflict(f"service {service.service} has {MOST_VERSIONS} versions: stop some of them")


def with_version(service: ModelService, version: ServedVersion) -> ModelService:
    """The service with one more version, in the place of one of this name that is over.

    Raises:
        Conflict: see `check_new`.
    """
    check_new(service, version.version)
    others = [each for each in service.versions if each.version != version.version]
    over = [each for each in others if each.state in OVER]
    gone = {each.version for each in over[: max(0, len(over) - MOST_OVER)]}
    kept = tuple(each for each in others if each.version not in gone)
    return settled(service.model_copy(update={"versions": (*kept, version)}), 0.0)


def ordered(service: ModelService, order: OrderService, now: float) -> ModelService:
    """What an order about traffic makes of the record.

    Raises:
        BadInput: weights do not add up.
        NotFound: there is no such version.
        Conflict: a version that is to answer is not ready; or the record is another one by now.
    """
    if order.expected is not None and order.expected != service.revision:
        raise Conflict(
            f"service {service.service} was changed meanwhile: it is at revision {service.revision}, not "
            f"{order.expected}; look again (dmsc service show {service.service})"
        )
    match order.action:
        case "traffic":
            weights = _weights(service, order.weights)
            stable = _compared_with(service, weights)
            return _told(service, order, now, **_shared(service, weights), stable=stable)
        case "promote":
            version = _ready(service, order.version)
            return _told(
                service,
                order,
                now,
                **_shared(service, {version.version: WHOLE}),
                stable=_former(service, version.version),
                shadow=tuple(name for name in service.shadow if name != version.version),
            )
        case "rollback":
            if service.stable is None:
                raise Conflict(f"service {service.service} has no former version to go back to")
            back = _ready(service, service.stable)
            return _told(service, order, now, **_shared(service, {back.version: WHOLE}))
        case "shadow":
            version = _ready(service, order.version)
            if service.weights.get(version.version):
                raise Conflict(f"version {version.version} gets traffic: a shadow answers copies only")
            names = dict.fromkeys((*service.shadow, version.version))
            return _told(service, order, now, shadow=tuple(names))
        case "unshadow":
            version = named(service, order.version)
            left = tuple(name for name in service.shadow if name != version.version)
            return _told(service, order, now, shadow=left)
        case _:
            raise BadInput(f"{order.action} is no change of traffic")


def suggested(service: ModelService, action: ServiceAction, by: str, why: str, now: float) -> ModelService:
    """What an adopted suggestion makes of the record. `by`: the module, or the orchestrator's own loop.

    Raises:
        As `ordered`; and `Conflict` if there is no other version to go back to.
    """
    if not isinstance(action, RollBack):
        order = OrderService(
            user=by,
            service=service.service,
            action="traffic",
            weights=action.weights,
            expected=action.expected,
            why=why[:MOST_WHY],
        )
        return ordered(service, order, now)
    name, weight = named(service, action.version).version, service.weights.get(action.version, 0)
    shadow = tuple(each for each in service.shadow if each != name)
    if service.stable in (None, name):
        raise Conflict(f"service {service.service} has no version that {name} could go back to")
    if not weight and shadow == service.shadow:
        return service
    changes: dict[str, Any] = {"shadow": shadow}
    if weight:
        back = _ready(service, service.stable).version
        others = {each: share for each, share in service.weights.items() if each != name}
        changes |= _shared(service, {**others, back: others.get(back, 0) + weight})
    after = service.model_copy(update=changes)
    did: TrafficAction = "rollback" if weight else "unshadow"
    told = {"weights": after.weights, "shadow": after.shadow}
    return _noted(after, TrafficChange(at=now, by=by, why=why, action=did, **told))


def retired(service: ModelService, order: OrderService, now: float) -> ModelService:
    """The service without one of its versions, or, if none is named, stopped.

    Raises:
        NotFound: there is no such version.
        Conflict: it gets traffic, and is not the only one.
    """
    leaving = {named(service, order.version).version} if order.version is not None else None
    if leaving is not None:
        (name,) = leaving
        if service.weights.get(name) and len(_living(service)) > 1:
            raise Conflict(
                f"version {name} gets {service.weights[name] / 100:g} % of the traffic: move that first "
                f"(dmsc service traffic {service.service} …), or stop the service"
            )
    reason = f"stopped by {order.user}" + (f": {order.why}" if order.why else "")
    over = {"state": VersionState.RETIRED, "reason": reason, "replicas": ()}
    versions = tuple(
        each.model_copy(update=over)
        if each.state not in OVER and (leaving is None or each.version in leaving)
        else each
        for each in service.versions
    )
    return settled(service.model_copy(update={"versions": versions}), now, by=order.user, why=reason)


def settled(service: ModelService, now: float, *, by: str = "orchestrator", why: str = "") -> ModelService:
    """The service as its versions' states make it.

    The first version that is ready gets all traffic. One that is over loses its traffic: to the stable
    version, or else to the others by their shares.
    """
    states = {each.version: each.state for each in service.versions}
    living = {name for name, state in states.items() if state not in OVER}
    ready = [name for name, state in states.items() if state is VersionState.READY]
    weights, stable = dict(service.weights), service.stable if service.stable in living else None
    shadow = tuple(name for name in service.shadow if name in living)
    lost = [name for name in weights if name not in living]
    if lost:
        idle = states.get(stable or "") is VersionState.IDLE
        weights = _without(weights, lost, stable if stable in ready or idle else None)
    if not weights and ready:
        weights = {ready[0]: WHOLE}
        why = why or f"{ready[0]} is the first that is ready"
    if stable is None and weights:
        stable = max(weights, key=lambda name: weights[name])
    if lost:
        gone = next(each for each in service.versions if each.version == lost[0])
        why = why or f"{gone.version} is {gone.state}: {gone.reason}"
    state = ServiceState.STOPPED if not living else ServiceState.DEPLOYING
    answers = (VersionState.READY, VersionState.IMPAIRED, VersionState.IDLE)
    if any(states[name] in answers for name in living):
        state = ServiceState.SERVING
    after = service.model_copy(update={"state": state, "stable": stable, "shadow": shadow})
    if (weights, shadow) == (service.weights, service.shadow):
        return after
    after = after.model_copy(update=_shared(service, weights))
    did: TrafficAction = "stop" if lost else "deploy"
    return _noted(after, TrafficChange(at=now, by=by, why=why, action=did, weights=weights, shadow=shadow))


def _without(weights: Mapping[str, int], lost: list[str], heir: str | None) -> dict[str, int]:
    """The weights without lost versions: theirs go to `heir`, or to the others by their shares."""
    left = {name: weight for name, weight in weights.items() if name not in lost and weight}
    if heir is not None:
        return {**left, heir: left.get(heir, 0) + WHOLE - sum(left.values())}
    if not left:
        return {}
    whole = sum(left.values())
    shares = {name: weight * WHOLE // whole for name, weight in left.items()}
    most = max(shares, key=lambda name: shares[name])
    return {**shares, most: shares[most] + WHOLE - sum(shares.values())}


def _shared(service: ModelService, weights: Mapping[str, int]) -> dict[str, Any]:
    """The fields of a record with these weights; no more users meet another version than have to."""
    if not weights:
        return {"weights": {}, "runs": ()}
    shares = TrafficShares.of_service(service) or TrafficShares.of(next(iter(weights)))
    return {"weights": dict(weights), "runs": shares.change(weights, weights).runs}


def _compared_with(service: ModelService, weights: Mapping[str, int]) -> str | None:
    """The stable version under other weights: others are compared with it, and go back to it.

    Who had all traffic becomes it by sharing that with a new version; not by sharing it with the stable one,
    whose successor it is.
    """
    if len(weights) == 1:
        (only,) = weights
        return service.stable if only == service.stable else _former(service, only)
    alone = next((name for name, weight in service.weights.items() if weight == WHOLE), None)
    return alone if alone in weights and service.stable not in weights else service.stable


def _weights(service: ModelService, asked: Mapping[str, int]) -> dict[str, int]:
    whole = sum(asked.values())
    if any(weight < 0 for weight in asked.values()) or whole != WHOLE:
        raise BadInput(
            f"weights are ten-thousandths of the traffic, each at least 0, {WHOLE:,} (100 %) in all; these "
            f"add up to {whole:,} ({whole / 100:g} %)"
        )
    weights = {name: weight for name, weight in asked.items() if weight}
    for name in asked:
        named(service, name)
    for name in weights:
        _ready(service, name)
    return weights


def _ready(service: ModelService, version: str | None) -> ServedVersion:
    found = named(service, version)
    if found.state not in (VersionState.READY, VersionState.IDLE):  # an idle one answers once it is asked
        why = f": {found.reason}" if found.reason else ""
        raise Conflict(f"version {found.version} of {service.service} is {found.state}, not ready{why}")
    return found


def _former(service: ModelService, version: str) -> str | None:
    """What a rollback goes back to once this version has all traffic: who had most of it before."""
    heaviest = max(service.weights, key=lambda name: service.weights[name], default=None)
    return service.stable if heaviest in (None, version) else heaviest


def _living(service: ModelService) -> list[ServedVersion]:
    return [each for each in service.versions if each.state not in OVER]


def _told(service: ModelService, order: OrderService, now: float, **changes: Any) -> ModelService:
    after = service.model_copy(update=changes)
    if after == service:
        return service
    why, told = order.why or order.action, {"weights": after.weights, "shadow": after.shadow}
    change = {"at": now, "by": order.user, "why": why, "action": order.action, **told}
    return _noted(after, TrafficChange.model_validate(change))


def _noted(service: ModelService, change: TrafficChange) -> ModelService:
    # Its revision is that of the record that is written next. Reasons of modules and jobs have no bound.
    change = change.model_copy(update={"revision": service.revision + 1, "why": change.why[:MOST_WHY]})
    return service.model_copy(update={"history": (*service.history, change)[-MOST_CHANGES:]})
