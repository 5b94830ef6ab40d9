"""Arbitration (draft §4.2, §5.2): functional modules suggest, the orchestrator (SMO) decides and says why.

Pure: `arbitrate(state, suggestion, facts, now) -> (outcome, state)`. The orchestrator keeps the state,
carries adopted weights out as a `CommunicationPolicy`, and puts each answer on the stream as a
`PolicyDecision`.

What is checked, in this order; the first that fails gives the reason:

1. the module: not suspended, not flooding, registered in this version, enabled for the job;
2. the job: running here, of the module's owner where it has one, and the suggestion neither expired nor
   derived from long ago;
3. sense: known stage and instances, finite non-negative weights, someone left to do the work;
4. worth: it is confident enough, changes something, and no suggestion of higher precedence or confidence was
   adopted within the cool-down;
5. shadow: a module in shadow gets the answer that it would have got, and nothing is adopted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from entities.orchestrator.policy import module_reputation
from entities.orchestrator.policy.module_reputation import STRANGERS, Key, ModuleReputation, ReputationConfig
from entities.orchestrator.policy.suggestion_rules import JobFacts, lag_of, nonsense_in, weights_in_force
from schemas import names
from schemas.errors import BadInput
from schemas.policy import (
    AvoidInstance,
    ExpectFailures,
    ModuleLifecycle,
    ModuleState,
    MoveInstance,
    NoAction,
    PolicySuggestion,
    SetWeights,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArbitrationConfig:
    """The limits by which suggestions are adopted."""

    min_confidence: float = 0.5
    """0…1. Lower adopts more and worse suggestions."""

    cooldown_s: float = 5.0
    """Seconds for which an adopted change of one (job, stage) stays: routes that change faster than queues
    drain only oscillate. Another module with a higher precedence or confidence may still replace it."""

    min_share_change: float = 0.01
    """A suggestion that moves at most this part of a stage's work is declined. The part is the sum over all
    instances, not the largest change of one share, which is always small where there are many instances."""

    max_lag_steps: int = 20
    """Most steps between the job's present step and the step from which a suggestion was derived."""

    max_valid_s: float = 600.0
    """Seconds; a longer validity is reduced to this, so that suggestions of a dead module end."""

    precedence: Mapping[str, int] = field(default_factory=dict)
    """Module name → rank, 0 if not named. Within a cool-down, rank is compared first, then confidence."""

    standing: ReputationConfig = field(default_factory=ReputationConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.min_confidence <= 1:
            raise BadInput(f"arbitration: min_confidence is {self.min_confidence}; give 0…1")
        if self.standing.burst < 1 or self.standing.rate_per_s <= 0:
            raise BadInput("arbitration: burst must be at least 1 and rate_per_s above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActiveSuggestion:
    """An adopted suggestion, in force from `at` until `until`, with the weights that it sets."""

    module: str
    version: str
    confidence: float
    at: float
    until: float
    weights: Mapping[str, float]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one suggestion.

    If it is adopted, either `weights` are all new weights of the stage and `revision` is the number of their
    policy, or `passed_on` is the action that the job's run is asked for and may still decline.

    `answer`: False for suggestions of a flood, which are counted but not answered one by one.
    `suspended`: True for the suggestion because of which the module was suspended.
    """

    adopted: bool
    reason: str
    stage: int | None = None
    weights: Mapping[str, float] | None = None
    revision: int | None = None
    passed_on: MoveInstance | ExpectFailures | None = None
    valid_s: float = 0.0
    answer: bool = True
    suspended: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Lapse:
    """The validity of an adopted suggestion has ended: the stage gets these weights."""

    job: str
    stage: int
    weights: Mapping[str, float]
    reason: str


def register(
    state: ArbitrationState,
    lifecycle: ModuleLifecycle,
    now: float,
    config: ReputationConfig = ReputationConfig(),
) -> ArbitrationState:
    """Notes the state that a module reports; suggestions of unregistered modules are declined."""
    return replace(state, modules=module_reputation.register(state.modules, lifecycle, now, config))


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
    )


def not_carried_out(state: ArbitrationState, suggestion: PolicySuggestion) -> ArbitrationState:
    """Notes that the job's run declined an adopted suggestion: it does not count as adopted."""
    key = (suggestion.module, suggestion.version)
    standing = state.modules[key]
    return _keep(state, key, replace(standing, adopted=standing.adopted - 1))


def forget_job(state: ArbitrationState, job: str) -> ArbitrationState:
    """Drops all adopted suggestions for a job that ended."""
    return replace(
        state,
        base={key: entry for key, entry in state.base.items() if key[0] != job},
        adopted={key: entry for key, entry in state.adopted.items() if key[0] != job},
        avoided={key: entry for key, entry in state.avoided.items() if key[0] != job},
    )


def arbitrate(
    state: ArbitrationState,
    suggestion: PolicySuggestion,
    facts: JobFacts | None,
    now: float,
    *,
    sid: str | None = None,
    received_at: float | None = None,
    config: ArbitrationConfig | None = None,
) -> tuple[Outcome, ArbitrationState]:
    """Adopts or declines one suggestion.

    Args:
        state: the state of arbitration.
        suggestion: as received.
        facts: of the suggestion's job; None if no such job is running.
        now: seconds by the orchestrator's own clock.
        sid: the sender's name on the bus; None: unknown.
        received_at: when it arrived, by the same clock; default `now`. The validity begins then.
        config: limits.

    Returns:
        The outcome with its reason, and the new state.
    """
    config = config or ArbitrationConfig()
    key = (suggestion.module, suggestion.version)
    known = state.modules.get(key)
    if known is None or known.owner != suggestion.owner or (sid is not None and known.sid not in (None, sid)):
        key = STRANGERS
    standing, within_rate = module_reputation.heard(
        state.modules.get(key, ModuleReputation()), now, config.standing
    )
    if now < standing.suspended_until:
        rest = f"suspended for another {standing.suspended_until - now:.0f} s: {standing.suspended_for}"
        return replace(_no(rest), answer=within_rate), _keep(state, key, standing)
    nonsense = ""
    if not within_rate:
        reason = f"more than {config.standing.rate_per_s:g} suggestions a second; not each is answered"
        outcome = replace(_no(reason), answer=standing.over_rate == 1)
    elif key == STRANGERS:
        outcome = _no(f"{_name(suggestion)} has not registered (no lifecycle message seen)")
    else:
        nonsense = nonsense_in(suggestion, facts)
        outcome, state = _judge(state, suggestion, standing, facts, now, received_at, nonsense, config)
        standing = module_reputation.judged(
            standing,
            adopted=outcome.adopted,
            nonsense=bool(nonsense),
            lagging=lag_of(suggestion, facts) > config.max_lag_steps,
        )
    why = (
        "" if key == STRANGERS else module_reputation.suspension(standing, config.standing, nonsense=nonsense)
    )
    if why:
        standing = module_reputation.suspend(standing, why, now, config.standing)
        text = f"suspended for {config.standing.suspension_s:.0f} s: {why}"
        outcome = replace(_no(text), suspended=True)
    return outcome, _keep(state, key, standing)


def lapse(
    state: ArbitrationState, facts: Mapping[str, JobFacts], now: float
) -> tuple[list[Lapse], ArbitrationState]:
    """Ends expired suggestions; returns the new weights of their stages. Call it about once a second."""
    reasons: dict[tuple[str, int], list[str]] = {}
    for where, entry in state.adopted.items():
        if entry.until <= now:
            reasons.setdefault(where, []).append(f"the weights of {entry.module} lapsed")
    for (job, stage, sid), entry in state.avoided.items():
        if entry.until <= now:
            reasons.setdefault((job, stage), []).append(f"{entry.module} no longer avoids {sid}")
    if not reasons:
        return [], state
    state = replace(
        state,
        adopted={key: entry for key, entry in state.adopted.items() if entry.until > now},
        avoided={key: entry for key, entry in state.avoided.items() if entry.until > now},
    )
    lapses = [
        Lapse(job=job, stage=stage, weights=_table(state, job, stage, facts[job]), reason="; ".join(why))
        for (job, stage), why in reasons.items()
        if job in facts
    ]
    in_force = {*state.adopted, *((job, stage) for job, stage, _ in state.avoided)}
    return lapses, replace(state, base={key: entry for key, entry in state.base.items() if key in in_force})


# --- the checks --------------------------------------------------------------------------------------
def _judge(
    state: ArbitrationState,
    suggestion: PolicySuggestion,
    standing: ModuleReputation,
    facts: JobFacts | None,
    now: float,
    received_at: float | None,
    nonsense: str,
    config: ArbitrationConfig,
) -> tuple[Outcome, ArbitrationState]:
    """Checks one suggestion of a registered module that is within its rate."""
    standing = module_reputation.as_promoted(
        standing, (suggestion.module, suggestion.version), state.promoted
    )
    job = suggestion.job
    age = 0.0 if received_at is None else now - received_at
    if not module_reputation.serves(standing, job):
        return _no(f"{_name(suggestion)} is not enabled for job {job}"), state
    if standing.state not in (ModuleState.ACTIVE, ModuleState.SHADOW):
        return _no(f"{_name(suggestion)} is {standing.state.value}, not active"), state
    if facts is None:
        return _no(f"job {job} is not running"), state
    if suggestion.owner not in (names.MESH, facts.user):
        return _no(
            f"{_name(suggestion)} is {suggestion.owner}'s, and has a say in {suggestion.owner}'s jobs alone"
        ), state
    if isinstance(suggestion.action, NoAction):
        return _no("an observation, nothing to adopt"), state
    if nonsense:
        return _no(nonsense), state
    if age > suggestion.valid_s:
        return _no(f"expired: valid for {suggestion.valid_s:.1f} s, considered after {age:.1f} s"), state
    if lag_of(suggestion, facts) > config.max_lag_steps:
        return _no(f"derived from step {suggestion.input_revision}, the job is at {facts.step}"), state
    if suggestion.confidence < config.min_confidence:
        least = f"{config.min_confidence:.2f}"
        stage = None if isinstance(suggestion.action, ExpectFailures) else _stage(suggestion, facts)
        return _no(f"confidence {suggestion.confidence:.2f} is below {least}", stage), state
    if isinstance(suggestion.action, MoveInstance | ExpectFailures):
        valid_s = min(suggestion.valid_s, config.max_valid_s) - age
        return _pass_on(suggestion, suggestion.action, standing, valid_s), state
    return _weigh(state, suggestion, standing, facts, now, age, config)


def _pass_on(
    suggestion: PolicySuggestion,
    action: MoveInstance | ExpectFailures,
    standing: ModuleReputation,
    valid_s: float,
) -> Outcome:
    """Passes a move or an expectation of failures on to the job's run, which judges its worth.

    See `planning.stage_moves` and `checkpointing.checkpoint_schedule`.
    """
    stage = action.stage if isinstance(action, MoveInstance) else None
    if standing.state is ModuleState.SHADOW:
        return _no(f"in shadow, would have been passed on: {suggestion.reason}", stage)
    reason = f"adopted: {suggestion.reason}"
    return Outcome(adopted=True, reason=reason, stage=stage, passed_on=action, valid_s=valid_s)


def _weigh(
    state: ArbitrationState,
    suggestion: PolicySuggestion,
    standing: ModuleReputation,
    facts: JobFacts,
    now: float,
    age: float,
    config: ArbitrationConfig,
) -> tuple[Outcome, ArbitrationState]:
    """Decides whether a sensible suggestion is worth a change of routes, and computes the new weights."""
    stage = _stage(suggestion, facts)
    adoption = ActiveSuggestion(
        module=suggestion.module,
        version=suggestion.version,
        confidence=suggestion.confidence,
        at=now,
        until=now - age + min(suggestion.valid_s, config.max_valid_s),
        weights=_weights(suggestion),
    )
    before = weights_in_force(facts, stage)
    changed = _adopt(state, suggestion, stage, adoption, before)
    after = _table(changed, suggestion.job, stage, facts)
    shares_before, shares_after = _shares(before), _shares(after)
    changes = [abs(shares_after.get(sid, 0.0) - share) for sid, share in shares_before.items()]
    shadow = standing.state is ModuleState.SHADOW
    moved = sum(changes) / 2
    if moved <= config.min_share_change:
        least = f"{config.min_share_change:.0%}"
        text = f"would change nothing: at most {least} of the work of stage {stage} would go elsewhere"
        entry = _in_force(state, suggestion, stage)
        if shadow or entry is None or entry.module != suggestion.module:
            return _no(text, stage), state
        renewed = replace(entry, until=adoption.until)
        return _no(f"{text}; what holds is renewed", stage), _adopt(state, suggestion, stage, renewed, before)
    conflict = _conflict(state, suggestion, stage, now, config)
    if conflict:
        return _no(conflict, stage), state
    summary = f"{moved:.0%} of the work of stage {stage} goes elsewhere; {suggestion.reason}"
    if shadow:
        return _no(f"in shadow, would have been adopted: {summary}", stage), state
    outcome = Outcome(
        adopted=True, reason=f"adopted: {summary}", stage=stage, weights=after, revision=facts.revision + 1
    )
    return outcome, changed


def _conflict(
    state: ArbitrationState, suggestion: PolicySuggestion, stage: int, now: float, config: ArbitrationConfig
) -> str:
    """Which module's change of this stage is too recent to be replaced by this one; empty if none is."""
    where = (suggestion.job, stage)
    adoptions = [adoption for key, adoption in state.adopted.items() if key == where]
    adoptions += [adoption for key, adoption in state.avoided.items() if key[:2] == where]
    own = (config.precedence.get(suggestion.module, 0), suggestion.confidence)
    for other in adoptions:
        if now - other.at >= config.cooldown_s:
            continue
        rest = f"cool-down of stage {stage} for another {config.cooldown_s - (now - other.at):.1f} s"
        if other.module == suggestion.module:
            return rest
        theirs = (config.precedence.get(other.module, 0), other.confidence)
        if own <= theirs:
            figures = f"confidence {other.confidence:.2f} against {own[1]:.2f}"
            return f"{rest}: {other.module} prevails with {figures}"
    return ""


# --- weights -----------------------------------------------------------------------------------------
def _weights(suggestion: PolicySuggestion) -> dict[str, float]:
    """The weights of one suggestion, scaled to a mean of 1.

    An instance that the module does not know has weight 1, and so counts as an average one.
    """
    if isinstance(suggestion.action, SetWeights):
        weights = suggestion.action.weights
        mean = sum(weights.values()) / len(weights)
        return {sid: round(weight / mean, 4) for sid, weight in weights.items()}
    return {}


def _stage(suggestion: PolicySuggestion, facts: JobFacts) -> int:
    if isinstance(suggestion.action, SetWeights | MoveInstance):
        return suggestion.action.stage
    assert isinstance(suggestion.action, AvoidInstance)
    sid = suggestion.action.sid
    return next(stage for stage, sids in facts.active.items() if sid in sids)


def _adopt(
    state: ArbitrationState,
    suggestion: PolicySuggestion,
    stage: int,
    adoption: ActiveSuggestion,
    before: Mapping[str, float],
) -> ArbitrationState:
    """The state with this suggestion in force; the first one of a stage saves the weights before as base."""
    where = (suggestion.job, stage)
    base = state.base if where in state.base else {**state.base, where: before}
    if isinstance(suggestion.action, AvoidInstance):
        avoided = {**state.avoided, (*where, suggestion.action.sid): adoption}
        return replace(state, base=base, avoided=avoided)
    return replace(state, base=base, adopted={**state.adopted, where: adoption})


def _in_force(state: ArbitrationState, suggestion: PolicySuggestion, stage: int) -> ActiveSuggestion | None:
    if isinstance(suggestion.action, AvoidInstance):
        return state.avoided.get((suggestion.job, stage, suggestion.action.sid))
    return state.adopted.get((suggestion.job, stage))


def _table(state: ArbitrationState, job: str, stage: int, facts: JobFacts) -> dict[str, float]:
    """All weights of a stage by the state: base, adopted weights, avoided instances at 0.

    If no other instance is left (the others have died since), avoided instances keep their weights.
    """
    base = state.base.get((job, stage), facts.weights.get(stage, {}))
    adopted = state.adopted.get((job, stage))
    weights = {**base, **(adopted.weights if adopted is not None else {})}
    table = {sid: weights.get(sid, 1.0) for sid in sorted(facts.active.get(stage, ()))}
    spared = {sid: 0.0 if (job, stage, sid) in state.avoided else weight for sid, weight in table.items()}
    return spared if any(weight > 0 for weight in spared.values()) else table


# --- helpers -----------------------------------------------------------------------------------------
def _keep(state: ArbitrationState, key: Key, standing: ModuleReputation) -> ArbitrationState:
    return replace(state, modules={**state.modules, key: standing})


def _no(reason: str, stage: int | None = None) -> Outcome:
    return Outcome(adopted=False, reason=reason, stage=stage)


def _name(suggestion: PolicySuggestion) -> str:
    return f"{suggestion.module} {suggestion.version}"


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {sid: weight / total if total > 0 else 0.0 for sid, weight in weights.items()}
