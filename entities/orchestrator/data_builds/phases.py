"""The orders of each phase, from the build's file and the results of the phases before. Pure.

How a phase is cut never depends on who works: so each leader, and each build of the same work, has the same
orders with the same keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.units import (
    MOST_UNITS,
    PHASES,
    UnitOrder,
    UnitPhase,
    UnitResult,
    digest_of,
    groups_of,
    parts_of_hashes,
)
from schemas.errors import BadData

Results = Mapping[UnitPhase, Sequence[UnitResult]]
"""By phase, in order of index."""


def phases_of(spec: DataBuildSpec) -> tuple[UnitPhase, ...]:
    """The phases of a build, in order."""
    return tuple(phase for phase in PHASES if phase != "duplicates" or spec.duplicates is not None)


def orders_of(phase: UnitPhase, spec: DataBuildSpec, results: Results) -> dict[str, UnitOrder]:
    """Key → order of each unit of a phase, in order of index. It may take seconds.

    Args:
        phase: the phase.
        spec: the build's file.
        results: those of the phases before, without units that were left out.

    Raises:
        BadData: the plan has no units, or more than there may be.
    """
    if phase == "plan":
        return _keyed([UnitOrder(phase=phase)], "")
    (plan,) = results["plan"]
    count, facts = len(plan.units), _facts(plan)
    orders: list[UnitOrder] = []
    if phase == "records":
        _check_count(spec, plan)
        units = enumerate(plan.units)
        orders += [UnitOrder(phase=phase, index=index, unit=unit) for index, unit in units]
        return _keyed(orders, facts)
    if phase == "duplicates":
        inputs = tuple(_slim(results["records"], "hashes"))
        parts = parts_of_hashes(count, sum(unit.bytes for unit in plan.units))
        indexes = range(parts)
        orders += [UnitOrder(phase=phase, index=index, parts=parts, inputs=inputs) for index in indexes]
        return _keyed(orders, facts)
    dropped = tuple(_slim(results.get("duplicates", ()), "dropped"))
    records = {result.index: result for result in _slim(results["records"], "records")}
    for index, group in enumerate(groups_of(count, spec.group_units)):
        own = tuple(records[unit] for unit in group if unit in records)
        orders.append(UnitOrder(phase=phase, index=index, inputs=(*own, *dropped)))
    return _keyed(orders, facts)


def _facts(plan: UnitResult) -> str:
    """Digest of what units depend on beside the build's file and their sources: code, tokenizers."""
    return digest_of((plan.model_copy(update={"units": (), "outputs": {}}),))


def _check_count(spec: DataBuildSpec, plan: UnitResult) -> None:
    count = len(plan.units)
    if not count:
        raise BadData("source: nothing is there to be read")
    if count > MOST_UNITS:
        total = sum(unit.bytes for unit in plan.units)
        enough = 1 << max(10, (total // MOST_UNITS).bit_length())
        raise BadData(
            f"unit_bytes: {spec.unit_bytes:,} make {count:,} units of {total:,} bytes, at most "
            f"{MOST_UNITS:,} are possible: {enough:,} would do"
        )


def _slim(results: Iterable[UnitResult], output: str) -> list[UnitResult]:
    """The results with what a later phase reads of them, and nothing else: an order is one message."""
    return [
        UnitResult(
            phase=result.phase,
            index=result.index,
            outputs={name: stored for name, stored in result.outputs.items() if name == output},
        )
        for result in results
    ]


def _keyed(orders: Sequence[UnitOrder], facts: str) -> dict[str, UnitOrder]:
    digests: dict[int, str] = {}  # by the identity of inputs, which the parts of a phase have in common
    keyed = {}
    for order in orders:
        inputs_sha256 = digests.get(id(order.inputs))
        if inputs_sha256 is None:
            inputs_sha256 = digests[id(order.inputs)] = digest_of(order.inputs)
        keyed[order.key(inputs_sha256 + facts)] = order
    return keyed
