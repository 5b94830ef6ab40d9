"""A version's state, by its job's record and by what its instances say of themselves in the registry. Pure.

An instance's tags say what it serves: `serve.kind=generate`, `serve.exact=true`, `serve.inexact_because=…`,
`serve.cached=false`, `serve.uncached_because=…`, `serve.context=2048`, `serve.vocabulary=256`,
`serve.fingerprint=…` (of its arithmetic), `serve.unit=4` (batches of single passes have a multiple of so many
samples).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from schemas.job import ENDED, JobRecord, JobState
from schemas.registry import InstanceState, ServiceRecord
from schemas.services.model_service import VERSION_TRANSITIONS, ServedVersion, VersionState

TAG = "serve."
KINDS = ("generate", "predict")
"""What a stage may say that it answers."""
OVER = frozenset(state for state, later in VERSION_TRANSITIONS.items() if not later)
"""States that a version does not leave."""


def facts_of(record: ServiceRecord) -> dict[str, str]:
    """What an instance says of itself, by name: `kind`, `exact`, `context`, …"""
    told = (tag.removeprefix(TAG).partition("=") for tag in record.tags if tag.startswith(TAG))
    return {name: value for name, _, value in told}


def observed(
    version: ServedVersion, job: JobRecord | None, registered: Sequence[ServiceRecord]
) -> ServedVersion:
    """The version as it is now.

    Args:
        version: As its service's record has it.
        job: The record of its job; None: nobody knows it any more.
        registered: The registrations of its job's instances.
    """
    if version.state in OVER:
        return version
    if job is None:
        return _over(version, VersionState.RETIRED, "its job is not known any more")
    if job.state in ENDED or job.ends_as is not None:  # it may still be cleaned up
        failed = JobState.FAILED in (job.state, job.ends_as)
        state = VersionState.REFUSED if failed else VersionState.RETIRED
        return _over(version, state, job.reason if job.state in ENDED else job.ends_because)
    active = [record for record in registered if record.state is InstanceState.ACTIVE]
    stages = 1 + max((unit.stage for unit in job.graph.units), default=0) if job.graph else version.stages
    replicas = tuple(sum(record.stage == stage for record in active) for stage in range(stages))
    changes: dict[str, Any]
    if job.dormant:  # its instances leave, if they have not left
        changes = {"state": VersionState.IDLE, "reason": f"{job.held}; the next request starts it"}
    elif why := of_different_kinds(active):  # its run ends with that
        changes = {"reason": why}
    elif all(replicas) and job.graph is not None:
        changes = {"state": VersionState.READY, "reason": "", **_facts(active, version)}
    elif version.state is VersionState.IDLE and not job.held:
        changes = {"reason": f"starts: {job.state}: {job.reason}" if job.reason else f"starts: {job.state}"}
    elif version.state is VersionState.DEPLOYING:
        changes = {"reason": f"{job.state}: {job.reason}" if job.reason else str(job.state)}
    else:
        bare = [str(stage) for stage, count in enumerate(replicas) if not count]
        why = f"stage {', '.join(bare)} has no instance; its job is {job.state}"
        why += f": {job.reason}" if job.state is not JobState.RECOVERING else ""
        changes = {"state": VersionState.IMPAIRED, "reason": why}
    return version.model_copy(update={"stages": stages, "replicas": replicas, **changes})


def of_different_kinds(registered: Iterable[ServiceRecord]) -> str:
    """Which stages answer with tokens, and which with tensors, in one line; empty: all are of one kind.

    Each stage finds its own kind, and one of a large model has not all weights to find it by.
    """
    stages: defaultdict[str, set[int]] = defaultdict(set)
    for record in registered:
        kind = facts_of(record).get("kind", "")
        if record.state is InstanceState.ACTIVE and kind in KINDS and record.stage is not None:
            stages[kind].add(record.stage)
    if len(stages) < 2:
        return ""
    named = {kind: ", ".join(map(str, sorted(stages[kind]))) for kind in KINDS}
    return (
        f"its stages are of different kinds: {named['generate']} generates tokens, "
        f"{named['predict']} predicts tensors; say serve.kind in the job file"
    )


def _over(version: ServedVersion, state: VersionState, reason: str) -> ServedVersion:
    return version.model_copy(update={"state": state, "reason": reason, "replicas": ()})


def _facts(active: Sequence[ServiceRecord], version: ServedVersion) -> dict[str, Any]:
    told = [facts_of(record) for record in active]
    found: dict[str, Any] = {}
    if kinds := {each["kind"] for each in told if each.get("kind") in KINDS}:
        (found["kind"],) = kinds
    if contexts := _numbers(told, "context"):
        found["context"] = min(contexts)
    if vocabularies := _numbers(told, "vocabulary"):
        found["vocabulary"] = max(vocabularies)
    if any("exact" in each for each in told):
        why = _why_inexact(active)
        fingerprints = sorted({each.get("fingerprint", "") for each in told} - {""})
        found |= {"exact": not why, "inexact_because": why, "fingerprint": ",".join(fingerprints)}
    if any("cached" in each for each in told):  # one stage without a cache has all compute whole histories
        bare = next((each for each in told if each.get("cached") == "false"), None)
        found["cached"] = bare is None
        found["uncached_because"] = "" if bare is None else bare.get("uncached_because", "")
    return found


def _numbers(told: Sequence[Mapping[str, str]], name: str) -> list[int]:
    return [int(each[name]) for each in told if each.get(name, "").isdecimal()]


def _why_inexact(active: Sequence[ServiceRecord]) -> str:
    """Why bits may depend on which replica computes; empty: they don't.

    Stages may compute in different arithmetic; replicas of one may not.
    """
    by_stage: dict[int | None, set[str]] = {}
    for record in sorted(active, key=lambda each: each.sid):
        told = facts_of(record)
        if told.get("exact") != "true":
            return f"{record.sid}: {told.get('inexact_because') or 'it did not say why'}"
        by_stage.setdefault(record.stage, set()).add(told.get("fingerprint", ""))
    units = {told["unit"] for told in map(facts_of, active) if told.get("unit")}
    if len(units) > 1:  # each found it with its own weights
        return f"its stages need batches of different sizes: multiples of {', '.join(sorted(units))}"
    for stage, prints in sorted(by_stage.items(), key=str):
        if len(prints) > 1:
            return f"replicas of stage {stage} compute in different arithmetic: {', '.join(sorted(prints))}"
    return ""
