"""Plans of a job on slots that someone names: its own shape, the best shape, and how many slots a deadline
takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dmsc.console.durations import in_units
from dmsc.planning.plan_judge import simulated_step_ms
from entities.orchestrator.planning.placement import OpenRoom
from entities.orchestrator.planning.plan_requests import OpenShape, request_for
from entities.orchestrator.planning.shape_choice import one_stage
from entities.planner.network_topology import NetworkTopology
from entities.planner.plan_at_once import is_exact, is_small, plan_at_once
from entities.planner.plan_request import NoPlan, PlanAnswer, PlanRequest
from entities.planner.search.plan_search import search_plan
from schemas.cluster import NodeStatus, Slot
from schemas.errors import BadInput
from schemas.job import JobSpec
from schemas.task_graph import ModelTopology

MOST_FOR_DEADLINE = 64
"""Slots that are tried, at most, for a deadline."""


@dataclass(frozen=True)
class SlotOffer:
    """Slots that are alike: how many, at which speed, with how much memory (0: enough for all)."""

    count: int
    speed: float = 1.0
    memory_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """A plan on so many slots; `hours` and `price` of the whole job, None without a number of steps or a
    price."""

    slots: int
    answer: PlanAnswer
    hours: float | None
    price: float | None


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """`price`: of a slot and hour; `steps`: of the job, None where it has no number; `network`: between
    nodes."""

    price: float | None = None
    steps: int | None = None
    network: NetworkTopology | None = None


def plans_without_a_mesh(
    spec: JobSpec,
    model: ModelTopology,
    options: PlanOptions,
    *,
    counts: tuple[int, int] | None = None,
    deadline: float | None = None,
    offers: Sequence[SlotOffer] = (),
    compare: bool = False,
) -> list[PricedPlan]:
    """What `dmsc plan` shows: one plan, or one for each number of slots that is used.

    Args:
        spec: the job.
        model: its layers, as measured.
        options: price, steps and network.
        counts: numbers of slots, from and to, of speed 1.
        deadline: hours, on the fewest slots that keep them.
        offers: the slots that are there; none: as many of speed 1 as the file asks for.
        compare: the file's own shape and the best one on its slots.

    Raises:
        BadInput: nothing fits, or ends in time.
    """
    if counts is not None:
        return plans_by_slots(spec, model, counts_between(*counts), SlotOffer(1), options)
    if deadline is not None:
        return [plan_in_time(spec, model, deadline, options)]
    own = sum(spec.parallel.replicas_per_stage()) + sum(spec.parallel.standbys_per_stage())
    there = offers or [SlotOffer(own)]
    is_free = bool(offers or spec.parallel.auto)
    asked = [] if is_free and not compare else [plan_as_asked(spec, model, there, options)]
    return asked + ([plan_chosen(spec, model, there, options)] if compare or is_free else [])


def plan_as_asked(
    spec: JobSpec, model: ModelTopology, offers: Sequence[SlotOffer], options: PlanOptions
) -> PricedPlan:
    """The job with the stages and replicas of its file.

    Raises:
        BadInput: it does not fit: what stands against it.
    """
    request = _request(spec, model, offers, options)
    return _priced(request, _answer(request), options)


def plan_chosen(
    spec: JobSpec, model: ModelTopology, offers: Sequence[SlotOffer], options: PlanOptions
) -> PricedPlan:
    """The job with the stages and replicas that the planner chooses.

    Raises:
        BadInput: it does not fit whatever its shape.
    """
    whole = one_stage(spec, max(1, sum(offer.count for offer in offers)))
    request = _request(whole, model, offers, options, OpenShape())
    return _priced(request, _answer(request), options)


def plans_by_slots(
    spec: JobSpec, model: ModelTopology, counts: Iterable[int], offer: SlotOffer, options: PlanOptions
) -> list[PricedPlan]:
    """Plans on at most so many slots each, one for each number that is used; not those on which nothing fits.

    Raises:
        BadInput: nothing fits on any of them.
    """
    found, refusal = [], None
    for count in counts:
        try:
            found.append(plan_chosen(spec, model, [replace(offer, count=count)], options))
        except BadInput as refused:
            refusal = refused
    if not found and refusal is not None:
        raise refusal
    return list({priced.slots: priced for priced in reversed(found)}.values())[::-1]


def plan_in_time(
    spec: JobSpec, model: ModelTopology, hours: float, options: PlanOptions, most: int = MOST_FOR_DEADLINE
) -> PricedPlan:
    """The plan on the fewest slots, at most `most`, on which the job ends within so many hours.

    `options.steps` says how many steps it has.

    Raises:
        BadInput: it fits on no number of slots that is tried, or ends in time on none.
    """
    taking: dict[int, float] = {}
    planned_on = 0
    refusal = BadInput("")
    for count in counts_between(1, most):
        try:
            priced = plan_chosen(spec, model, [SlotOffer(count)], options)
        except BadInput as refused:  # more slots may do
            refusal = refused
            continue
        assert priced.hours is not None
        if priced.hours <= hours:
            return priced
        taking.setdefault(priced.slots, priced.hours)
        planned_on = count
    if not taking:
        raise refusal
    nearest = min(taking, key=taking.__getitem__)
    raise BadInput(
        f"no {planned_on} slots end it in {in_units(3600 * hours)}: the best plan, on {nearest}, takes "
        f"{in_units(3600 * taking[nearest])}: give more time, or train fewer steps"
    )


def counts_between(least: int, most: int) -> list[int]:
    """Numbers of slots that are tried: all up to eight, then some in each doubling, and the last."""
    found = [
        count
        for count in range(least, most + 1)
        if count <= 8 or count % (1 << (count.bit_length() - 3)) == 0
    ]
    return sorted({*found, least, most})


def _request(
    spec: JobSpec,
    model: ModelTopology,
    offers: Sequence[SlotOffer],
    options: PlanOptions,
    shape: OpenShape | None = None,
) -> PlanRequest:
    slots = [
        Slot(index=0, device="cpu", memory_bytes=offer.memory_bytes, speed={"stage": offer.speed})
        for offer in offers
        for _ in range(offer.count)
    ]
    hosts = options.network.hosts if options.network is not None else ()
    if options.network is not None and len(slots) > len(hosts):
        raise BadInput(f"{len(slots)} slots, but the topology has {len(hosts)} hosts: name fewer slots")
    cluster = spec.parallel.clusters[0] if spec.parallel.clusters else "here"
    nodes = [
        NodeStatus(
            sid=f"{cluster}-{number}",
            cluster=cluster,
            node=f"node-{number}",
            incarnation="plan",
            slots=(slot,),
            address="127.0.0.1",
            warm=True,
        )
        for number, slot in enumerate(slots)
    ]
    room = OpenRoom(nodes, [cluster], {node.sid: node.slots for node in nodes}, nodes)
    try:
        request = request_for(spec, model, room, shape=shape)
    except NoPlan as refused:
        raise BadInput(str(refused)) from refused
    if options.network is None:
        return request
    named = tuple(replace(slot, host=host) for slot, host in zip(request.slots, hosts, strict=False))
    links = tuple((first, second, speed) for (first, second), speed in options.network.links.items())
    return replace(request, slots=named, hosts=hosts, links=links)


def _answer(request: PlanRequest) -> PlanAnswer:
    try:
        if is_small(request) and is_exact(answer := plan_at_once(request)):
            return answer
        return search_plan(request, simulated_step_ms)
    except NoPlan:
        try:
            return search_plan(request.relaxed(), simulated_step_ms)
        except NoPlan as refused:
            raise BadInput(str(refused)) from refused


def _priced(request: PlanRequest, answer: PlanAnswer, options: PlanOptions) -> PricedPlan:
    used = len(answer.places)
    hours = None if options.steps is None else options.steps * answer.forecast.step_ms / 3.6e6
    price = None if hours is None or options.price is None else hours * used * options.price
    return PricedPlan(slots=used, answer=answer, hours=hours, price=price)
