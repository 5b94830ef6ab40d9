"""One unit of a build, by its phase."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.units import UnitOrder, UnitResult
from schemas.errors import BadData
from workers.data_builds.duplicates import run_duplicates_unit
from workers.data_builds.pack_unit import run_pack_unit
from workers.data_builds.planning import planned
from workers.data_builds.record_unit import is_record_step, run_record_unit
from workers.data_builds.steps import RecordSteps
from workers.data_builds.stores import UnitStore
from workers.data_builds.token_shards import BuildTokenizer
from workers.user_code import code_digest


def run_unit(
    spec: DataBuildSpec, order: UnitOrder, store: UnitStore, fetched: Mapping[str, Path] = {}
) -> UnitResult:
    """Does the work of one unit. Blocks.

    The result is a function of the sources' bytes, of the outputs of `order.inputs`, and of the build's file.

    Args:
        spec: The build.
        order: The unit.
        store: Where outputs of units are kept.
        fetched: `bus://` URL → file, of those that the build names.

    Raises:
        BadData: In one line: what, where, remedy. The same at every attempt.
        BadModel: A function of the user's can't be loaded here, or fails.
        Unavailable: A source or the store does not answer now.
        OSError: A file can't be read or written now.
    """
    code = code_digest(*spec.user_code()) if spec.user_code() else None
    if order.phase == "plan":
        return _plan(spec, fetched, code)
    if order.phase == "records":
        if order.unit is None:
            raise BadData(f"the order of record unit {order.index} names no unit")
        return run_record_unit(spec, order.index, order.unit, store, fetched, code)
    if order.phase == "duplicates":
        if spec.duplicates is None:
            raise BadData(f"data set {spec.name} has no step that removes duplicates")
        step = spec.steps[spec.duplicates]
        return run_duplicates_unit(step, order.index, order.parts, order.inputs, store)
    return run_pack_unit(spec, order.index, order.inputs, store, fetched, code)


def _plan(spec: DataBuildSpec, fetched: Mapping[str, Path], code: str | None) -> UnitResult:
    """The plan. All that may be wrong with steps and tokenizer is found here, before any record is read."""
    for number, step in enumerate(spec.steps):
        if is_record_step(step.function):
            RecordSteps([step], number, spec.field)
    facts = {} if spec.content == "records" else BuildTokenizer.of(spec, fetched).facts()
    units = planned(spec, fetched)
    return UnitResult(phase="plan", index=0, units=units, code_sha256=code, **facts)
