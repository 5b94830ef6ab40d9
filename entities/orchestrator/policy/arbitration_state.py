"""The state of arbitration: what was adopted and is in force, by job and knob (ADR-0002, ADR-0092). Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from entities.orchestrator.policy.knobs import ActiveSuggestion, JobKnob
from entities.orchestrator.policy.module_reputation import Key, ModuleReputation
from schemas.actions import SetQueueOrder, knob_of, route_knob, weights_knob
from schemas.policy import PolicySuggestion


@dataclass(frozen=True, kw_only=True, slots=True)
class ArbitrationState:
    """The whole state of arbitration. It is never changed in place, so that a decision can be replayed.

    The weights of a stage are `base`, replaced by adopted weights, and by 0 for each avoided instance.
    `base`: the weights that the orchestrator itself had set before anything was adopted.
    """

    modules: Mapping[Key, ModuleReputation] = field(default_factory=dict)
    base: Mapping[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)
    adopted: Mapping[tuple[str, int], ActiveSuggestion] = field(default_factory=dict)
    promoted: Mapping[str, str] = field(default_factory=dict)
    """Module → its promoted version; all other versions of it count as in shadow."""
    avoided: Mapping[tuple[str, int, str], ActiveSuggestion] = field(default_factory=dict)
    held: Mapping[JobKnob, ActiveSuggestion] = field(default_factory=dict)
    """Who holds the other knobs: windows, replicas, places, …"""


def knob_key(suggestion: PolicySuggestion) -> tuple[str, str]:
    """The job and the name of the knob that it sets; the order of the queue is the mesh's, and no job's."""
    job = "" if isinstance(suggestion.action, SetQueueOrder) else suggestion.job
    return job, knob_of(suggestion.action)


def withdraw(
    state: ArbitrationState, module: str, version: str, now: float, jobs: Collection[str] | None = None
) -> ArbitrationState:
    """Ends the validity of this version's adopted suggestions for these jobs (None: all): they lapse next."""

    def ended(job: str, entry: ActiveSuggestion) -> ActiveSuggestion:
        ours = (entry.module, entry.version) == (module, version) and (jobs is None or job in jobs)
        return replace(entry, until=min(entry.until, now)) if ours else entry

    return replace(
        state,
        adopted={key: ended(key[0], entry) for key, entry in state.adopted.items()},
        avoided={key: ended(key[0], entry) for key, entry in state.avoided.items()},
        held={key: ended(key[0], entry) for key, entry in state.held.items()},
    )


def not_carried_out(
    state: ArbitrationState, suggestion: PolicySuggestion, before: ArbitrationState
) -> ArbitrationState:
    """Notes that the job's run declined an adopted suggestion: its knob is as it was before."""
    key, knob = (suggestion.module, suggestion.version), knob_key(suggestion)
    former = {} if knob not in before.held else {knob: before.held[knob]}
    held = {other: entry for other, entry in state.held.items() if other != knob}
    state = replace(
        state, held=held | former, base=before.base, adopted=before.adopted, avoided=before.avoided
    )
    if (standing := state.modules.get(key)) is None:
        return state
    fewer = replace(standing, adopted=standing.adopted - 1)
    return replace(state, modules={**state.modules, key: fewer})


def free(state: ArbitrationState, job: str, knob: str, by: str, now: float) -> ArbitrationState:
    """Notes that what `by` had set a knob to was taken back. Weights, and avoided instances, lapse next.

    Whoever else holds the knob by now, a person say, goes on to hold it.
    """

    def ended(at: JobKnob, entry: ActiveSuggestion) -> ActiveSuggestion:
        return replace(entry, until=now) if (at, entry.module) == ((job, knob), by) else entry

    holder = state.held.get((job, knob))
    if holder is not None and holder.module == by:
        state = hold(state, job, knob, None)
    return replace(
        state,
        adopted={key: ended((key[0], weights_knob(key[1])), entry) for key, entry in state.adopted.items()},
        avoided={key: ended((key[0], route_knob(key[2])), entry) for key, entry in state.avoided.items()},
    )


def hold(state: ArbitrationState, job: str, knob: str, holder: ActiveSuggestion | None) -> ArbitrationState:
    """Notes who holds a knob from now on; None: nobody."""
    held = {key: entry for key, entry in state.held.items() if key != (job, knob)}
    return replace(state, held=held if holder is None else {**held, (job, knob): holder})


def end_automation(state: ArbitrationState, job: str, now: float) -> ArbitrationState:
    """Ends the validity of all that was adopted for a job, but for what a person has set."""
    modules = {(entry.module, entry.version) for key, entry in _of_job(state, job) if entry.version}
    for module, version in modules:
        state = withdraw(state, module, version, now, (job,))
    return state


def knobs(state: ArbitrationState, job: str) -> dict[str, ActiveSuggestion]:
    """Who holds which knob of a job, by the knobs' names."""
    return dict(sorted(_of_job(state, job)))


def _of_job(state: ArbitrationState, job: str) -> list[tuple[str, ActiveSuggestion]]:
    found = [(weights_knob(key[1]), entry) for key, entry in state.adopted.items() if key[0] == job]
    found += [(route_knob(key[2]), entry) for key, entry in state.avoided.items() if key[0] == job]
    return found + [(key[1], entry) for key, entry in state.held.items() if key[0] == job]


def backups(state: ArbitrationState, job: str) -> frozenset[str]:
    """The instances of a job that others' shares are sent to."""
    return frozenset(entry.backup for key, entry in state.avoided.items() if key[0] == job and entry.backup)


def expired_jobs(state: ArbitrationState, now: float) -> set[str]:
    """The jobs of which something that was adopted has lapsed; "" stands for the order of the queue."""
    found = {key[0] for key, entry in state.adopted.items() if entry.until <= now}
    found |= {key[0] for key, entry in state.avoided.items() if entry.until <= now}
    return found | {key[0] for key, entry in state.held.items() if entry.until <= now}


def forget_job(state: ArbitrationState, job: str) -> ArbitrationState:
    """Drops all adopted suggestions for a job that ended."""
    return replace(
        state,
        base={key: entry for key, entry in state.base.items() if key[0] != job},
        adopted={key: entry for key, entry in state.adopted.items() if key[0] != job},
        avoided={key: entry for key, entry in state.avoided.items() if key[0] != job},
        held={key: entry for key, entry in state.held.items() if key[0] != job},
    )
