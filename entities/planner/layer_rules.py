"""What users say of layers, and what of it a plan can keep: `spread, together, apart, pin, order` (ADR-0078).

Said of layers, since a user knows layers, and stages are what a plan makes of them (draft §4.5(2)). With the
scope `stage`, `together` forbids cuts and `apart` demands one; with `node` and `cluster` they are about the
places of the instances. Layers that are apart are never in one stage, whatever the scope. A need of memory
is a pin, to the slots that have so much. Hard ones are kept or there is no plan. Preferred ones on places are
priced before the busiest link; those on cuts are kept unless what is hard, or the number of stages, forbids
it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from entities.planner.plan_request import LayerRule, NoPlan, PlanRequest
from schemas.plain_text import shown


def with_rules(request: PlanRequest, rules: Iterable[LayerRule]) -> PlanRequest:
    """The request with these rules: where it may be cut, what is parted, which slots layers are pinned to.

    Raises:
        NoPlan: some hard rule can't be kept whatever is planned, or two contradict each other, both named.
    """
    rules = list(rules)
    hard = [rule for rule in rules if rule.hard]
    pinned = _pinned(hard)
    _check_order(request, hard)
    _check_pins(request, [rule for rule in hard if rule.kind == "pin"], pinned)
    _check_places(request, hard, pinned)
    cut = _cut_by(request, hard)
    preferred = [rule for rule in rules if not rule.hard and (rule.kind == "order" or rule.scope == "stage")]
    of_cuts = [rule for rule in preferred if rule.kind != "order"]
    dropped = [rule for rule in preferred if rule.kind == "order" and _out_of_order(rule)]
    try:
        cut = _cut_by(cut, of_cuts)
    except NoPlan:  # they can't all be kept: as many as can, in their order
        for rule in of_cuts:
            try:
                cut = _cut_by(cut, [rule])
            except NoPlan:
                dropped.append(rule)
    unkept = [rule.shown for rule in preferred if rule in dropped]
    both: dict[tuple[tuple[str, ...], frozenset[str]], tuple[str, ...]] = {}
    layers = list(request.layers)
    for index, labels in pinned.items():
        key = layers[index].pinned_to, labels
        if (wanted := both.get(key)) is None:
            wanted = both[key] = tuple(sorted(labels.union(key[0])))
        layers[index] = replace(layers[index], pinned_to=wanted)
    of_places = [
        rule
        for rule in rules
        if rule.kind != "order" and rule.scope != "stage" and not (rule.kind == "pin" and rule.hard)
    ]
    return replace(cut, layers=tuple(layers), rules=tuple(of_places), unkept=(*request.unkept, *unkept))


def least_stages(request: PlanRequest) -> int:
    """The fewest stages that the request's parted layers allow."""
    edges = _edges(request)
    reach = reaches(request.parted, edges[-1])
    stages, first = 0, 0
    while first < edges[-1]:
        last = edges[bisect_right(edges, reach[first]) - 1]
        first = last if last > first else edges[-1]
        stages += 1
    return stages


def reaches(parted: Sequence[tuple[int, int, str]], count: int) -> list[int]:
    """How far a stage may go that begins with each layer: the first layer that it may not have."""
    reach = [count] * (count + 1)
    for lower, upper, _ in parted:
        reach[lower] = min(reach[lower], upper)
    for layer in reversed(range(count)):
        reach[layer] = min(reach[layer], reach[layer + 1])
    return reach


def in_words(label: str) -> str:
    """`region=eu`, or what stands for a node, a cluster, or memory: `node a1`."""
    if label.startswith(MEMORY):
        return f"a slot of {shown(int(label[len(MEMORY) :]))}"
    if label.startswith("@"):
        return label[1:].replace("=", " ", 1)
    return f"the label {label}"


NODE, CLUSTER, MEMORY = "@node=", "@cluster=", "@memory="
"""Labels of slots for what is no label of their nodes. Operators' labels have no @."""
MOST_PAIRS = 20_000
"""Pairs of ordered layers among which a cycle is looked for."""


def _edges(request: PlanRequest) -> tuple[int, ...]:
    return request.edges or tuple(range(len(request.layers) + 1))


def _pieces(edges: Sequence[int]) -> list[int]:
    """The number of the piece that each layer is in: a cut may part two layers of different pieces."""
    return [number for number, (first, last) in enumerate(pairwise(edges)) for _ in range(first, last)]


def _cut_by(request: PlanRequest, rules: Sequence[LayerRule]) -> PlanRequest:
    """The request with the edges and the parted layers of these rules, beside those that it has.

    Raises:
        NoPlan: they contradict each other, those of the request, or its number of stages.
    """
    edges, before = _edges(request), _edges(request)
    ties = [rule for rule in rules if rule.kind == "together" and rule.scope == "stage"]
    for rule in ties:
        low, high = rule.layers[0], rule.layers[-1]
        edges = tuple(edge for edge in edges if not low < edge <= high)
    piece, piece_before = _pieces(edges), _pieces(before)
    reach = reaches(request.parted, before[-1])
    parted: dict[tuple[int, int], str] = {}
    for rule in rules:
        if rule.kind != "apart":
            continue
        for lower, upper in _borders(rule, request):
            if piece[lower] == piece[upper]:
                names = f"{request.layers[lower].name} and {request.layers[upper].name}"
                if piece_before[lower] == piece_before[upper]:
                    raise NoPlan(
                        f"{rule.shown} parts {names}, between which the model can't be cut (a layer that "
                        "changes in place what another made stays with it): leave them in one stage"
                    )
                tie = next(tie for tie in ties if tie.layers[0] <= lower and upper <= tie.layers[-1])
                raise contradiction(rule, tie, f"{names} would be in one stage and in different stages")
            if upper < reach[lower]:  # else another pair is between them: whoever keeps that one keeps this
                parted.setdefault((lower, upper), rule.shown)
    if ties:
        for lower, upper, name in request.parted:
            if piece[lower] == piece[upper]:
                names = f"{request.layers[lower].name} and {request.layers[upper].name}"
                who = ", ".join(tie.shown for tie in ties)
                raise NoPlan(
                    f"{who} leaves no cut between {names}, which {name} parts: drop one, or prefer it"
                )
    more = ((lower, upper, name) for (lower, upper), name in parted.items())
    nearest = _nearest((*request.parted, *more)) if parted else request.parted
    found = replace(request, edges=edges, parted=nearest)
    least = least_stages(found)
    if request.stages is not None and request.stages < least:
        who = ", ".join(dict.fromkeys(name for _, _, name in found.parted))
        raise NoPlan(
            f"parallel.stages is {request.stages}, but {who} needs {least}: set parallel.stages to at least "
            f"{least}"
        )
    if request.stages is not None and request.stages > len(edges) - 1:
        who = ", ".join(rule.shown for rule in ties) or "layers that stay together"
        raise NoPlan(
            f"parallel.stages is {request.stages}, but {who} leaves {len(edges) - 1} parts to be cut: set "
            f"parallel.stages to at most {len(edges) - 1}"
        )
    return found


def _nearest(parted: Iterable[tuple[int, int, str]]) -> tuple[tuple[int, int, str], ...]:
    """Those pairs that have no other pair between them: whoever keeps these keeps all."""
    found: list[tuple[int, int, str]] = []
    least: int | None = None
    for lower, upper, name in sorted(parted, key=lambda pair: (-pair[0], pair[1])):
        if least is None or upper < least:
            found.append((lower, upper, name))
            least = upper
    return tuple(reversed(found))


def _borders(rule: LayerRule, request: PlanRequest) -> list[tuple[int, int]]:
    """Neighbours of different groups: whatever interval has layers of two groups has such a pair."""
    group_of: dict[int, int] = {}
    for number, group in enumerate(rule.groups):
        for layer in group:
            if group_of.setdefault(layer, number) != number:
                raise NoPlan(
                    f"{rule.shown} has {request.layers[layer].name} in two groups: name it in one of them"
                )
    return [(low, high) for low, high in pairwise(rule.layers) if group_of[low] != group_of[high]]


def _pinned(rules: Iterable[LayerRule]) -> dict[int, frozenset[str]]:
    """The labels that each pinned layer wants. Layers that want the same share one set."""
    pins = [rule for rule in rules if rule.kind == "pin"]
    masks: dict[int, int] = defaultdict(int)
    for number, rule in enumerate(pins):
        for layer in rule.layers:
            masks[layer] |= 1 << number
    sets = {
        mask: frozenset(rule.label for number, rule in enumerate(pins) if mask >> number & 1)
        for mask in set(masks.values())
    }
    return {layer: sets[masks[layer]] for layer in sorted(masks)}


def contradiction(first: LayerRule, second: LayerRule, why: str) -> NoPlan:
    return NoPlan(f"{first.shown} and {second.shown} contradict each other: {why}: drop one, or prefer it")


def _check_pins(
    request: PlanRequest, pins: Sequence[LayerRule], pinned: Mapping[int, frozenset[str]]
) -> None:
    if not request.slots:
        return
    have = {frozenset(slot.labels) for slot in request.slots}
    there = frozenset[str]().union(*have)
    for rule in pins:
        if rule.label not in there:
            raise NoPlan(_lacking(request, rule, there))
    layer_of = {labels: layer for layer, labels in pinned.items()}
    for labels, layer in layer_of.items():
        if any(labels <= slot for slot in have):
            continue
        mine = [rule for rule in pins if layer in rule.layers]
        for first, second in combinations(mine, 2):
            if not any({first.label, second.label} <= slot for slot in have):
                both = f"no slot is {in_words(first.label)} and {in_words(second.label)}".replace(
                    "is the", "has the"
                )
                raise contradiction(first, second, f"{request.layers[layer].name} wants both, and {both}")
        raise NoPlan(
            f"no slot has all that {request.layers[layer].name} wants by "
            f"{', '.join(rule.shown for rule in mine)}: drop one, or prefer it"
        )


def _lacking(request: PlanRequest, rule: LayerRule, there: frozenset[str]) -> str:
    name = request.layers[rule.layers[0]].name
    if rule.label.startswith(MEMORY):
        wanted = int(rule.label[len(MEMORY) :])
        largest = max(slot.memory_bytes for slot in request.slots)
        return (
            f"{rule.shown} wants {shown(wanted)} for {name}, the largest slot has "
            f"{shown(largest)} ({shown(wanted - largest)} too little): ask for less, "
            "join a larger node, or have fewer slots share its memory"
        )
    if rule.label.startswith("@"):
        kind = rule.label[1:].partition("=")[0]
        places = sorted(
            {slot.host or slot.node if kind == "node" else slot.cluster for slot in request.slots}
        )
        there_are = ", ".join(places[:8]) + (" …" if len(places) > 8 else "")
        return (
            f"{rule.shown} pins {name} to {in_words(rule.label)}, which has no slot for it (there are "
            f"{there_are}): name one of these"
        )
    key = rule.label.partition("=")[0]
    labels = ", ".join(sorted(label for label in there if not label.startswith("@"))) or f"none with {key}"
    return (
        f"{rule.shown} pins {name} to {in_words(rule.label)}, which no slot has (labels here: {labels}): "
        "name one of these, or give it to a node (dmsc join --label)"
    )


def _out_of_order(rule: LayerRule) -> tuple[int, int] | None:
    """Layers of two groups that follow each other the other way round in the model."""
    for first, second in pairwise(rule.groups):
        if first and second and max(first) >= min(second):
            return max(first), min(second)
    return None


def _check_order(request: PlanRequest, hard: Sequence[LayerRule]) -> None:
    orders = [rule for rule in hard if rule.kind == "order"]
    strange = [(rule, pair) for rule in orders if (pair := _out_of_order(rule)) is not None]
    if not strange:
        return  # all of them are the model's order, which has no cycle
    size = sum(len(first) * len(second) for rule in orders for first, second in pairwise(rule.groups))
    if size <= MOST_PAIRS:
        _check_cycles(request, orders)
    rule, pair = strange[0]
    earlier, later = (request.layers[layer].name for layer in pair)
    raise NoPlan(
        f"{rule.shown} wants {earlier} before {later}, but the model computes {later} first: stages follow "
        "the model's order; define them the other way round, or drop it"
    )


def _check_cycles(request: PlanRequest, orders: Sequence[LayerRule]) -> None:
    before: dict[int, dict[int, LayerRule]] = defaultdict(dict)
    for rule in orders:
        for first, second in pairwise(rule.groups):
            for layer in first:
                before[layer].update(dict.fromkeys(second, rule))
    if cycle := _cycle(before):
        names = " before ".join(request.layers[layer].name for layer in cycle)
        rules = list(dict.fromkeys(before[low][high].shown for low, high in pairwise(cycle)))
        what = "contradict each other" if len(rules) > 1 else "has a cycle"
        raise NoPlan(f"{' and '.join(rules)} {what}: {names}: drop one")


def _cycle(before: Mapping[int, Mapping[int, LayerRule]]) -> list[int]:
    """Layers of a cycle, the first once more at the end; empty: there is none."""
    done: set[int] = set()
    for start in before:
        path, walk = [start], [iter(before.get(start, {}))]
        while walk and start not in done:
            after = next(walk[-1], None)
            if after is None:
                done.add(path.pop())
                walk.pop()
            elif after in path:
                return [*path[path.index(after) :], after]
            elif after not in done:
                path.append(after)
                walk.append(iter(before.get(after, {})))
    return []


def _mask(layers: Iterable[int]) -> int:
    return sum(1 << layer for layer in set(layers))


def _check_places(
    request: PlanRequest, hard: Sequence[LayerRule], pinned: Mapping[int, frozenset[str]]
) -> None:
    together = [rule for rule in hard if rule.kind == "together" and rule.scope != "stage"]
    apart = [rule for rule in hard if rule.kind == "apart" and rule.scope != "stage"]
    masks = [[_mask(group) for group in other.groups] for other in apart]
    for rule in together:
        mine = _mask(rule.layers)
        for other, mask in zip(apart, masks, strict=True):
            groups = [group for group in mask if group & mine]
            if len(groups) > 1 and (rule.scope == "node" or other.scope == "cluster"):
                why = (
                    f"layers of {len(groups)} groups would be in one {rule.scope} and in different "
                    f"{other.scope}s"
                )
                raise contradiction(rule, other, why)
    pins = [rule for rule in hard if rule.kind == "pin"]
    by_scope: dict[str, dict[str, set[frozenset[str]]]] = {
        "node": defaultdict(set),
        "cluster": defaultdict(set),
    }
    for slot in request.slots if pins and together else ():
        by_scope["node"][slot.node].add(frozenset(slot.labels))
        by_scope["cluster"][slot.cluster].add(frozenset(slot.labels))
    for rule in together:
        wanted = {pinned[layer] for layer in rule.layers if layer in pinned}
        places = by_scope[rule.scope]
        if (
            wanted
            and places
            and not any(
                all(any(labels <= slot for slot in slots) for labels in wanted) for slots in places.values()
            )
        ):
            other = next(pin for pin in pins if set(pin.layers) & set(rule.layers))
            raise contradiction(
                rule, other, f"no {rule.scope} has slots for all that its layers are pinned to"
            )
