"""Arbitration (draft §4.2, §5.2): functional modules suggest, the orchestrator (SMO) decides and says why.

Pure: `arbitrate(state, suggestion, facts, now) -> (outcome, state)`. The orchestrator keeps the state,
carries adopted weights out as a `CommunicationPolicy`, and puts each answer on the stream as a
`PolicyDecision`.

What is checked, in this order; the first that fails gives the reason:

1. the module: not suspended, not flooding, registered in this version, enabled for the job;
2. the job: running here, of the module's owner where it has one, and the suggestion neither expired nor
   derived from long ago;
3. sense: known stage and instances, finite non-negative weights, someone left to do the work;
4. worth: it is confident enough, changes something, the job's objective and budget allow it, and nobody of
   the same or a higher rank holds the knob (`knobs`);
5. shadow, or a job that is only advised: the module gets the answer that it would have got, and nothing is
   adopted.

The orchestrator's own loop suggests like a module (`own`): it is registered nowhere, and not limited in rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from entities.orchestrator.policy import module_reputation
from entities.orchestrator.policy.arbitration_state import ArbitrationState, knob_key
from entities.orchestrator.policy.knobs import ActiveSuggestion, as_weights, held_by, rank, taken
from entities.orchestrator.policy.module_reputation import STRANGERS, Key, ModuleReputation, ReputationConfig
from entities.orchestrator.policy.suggestion_rules import (
    JobFacts,
    changes_nothing,
    forbidden_by_job,
    lag_of,
    nonsense_in,
    shares_of,
    weights_in_force,
)
from schemas import names
from schemas.actions import (
    CUT,
    Action,
    Detour,
    MoveInstance,
    NoAction,
    RouteAction,
    SetQueueOrder,
    SetReduction,
    SetWeights,
    SetWindow,
    place_knob,
    route_knob,
    scope_of,
    value_of,
    weights_knob,
)
from schemas.automation import Automation
from schemas.errors import BadInput
from schemas.policy import ModuleLifecycle, ModuleState, PolicySuggestion


@dataclass(frozen=True, kw_only=True, slots=True)
class ArbitrationConfig:
    """The limits by which suggestions are adopted."""

    min_confidence: float = 0.5
    """0…1. Lower adopts more and worse suggestions."""

    cooldown_s: float = 5.0
    """Seconds for which adopted weights of one (job, stage) stay: routes that change faster than queues drain
    only oscillate. Another module of higher rank may still replace them."""

    min_share_change: float = 0.01
    """A suggestion that moves at most this part of a stage's work is declined. The part is the sum over all
    instances, not the largest change of one share, which is always small where there are many instances."""

    max_lag_steps: int = 20
    """Most steps between the job's present step and the step from which a suggestion was derived."""

    max_valid_s: float = 600.0
    """Seconds; a longer validity is reduced to this, so that suggestions of a dead module end."""

    precedence: Mapping[str, int] = field(default_factory=dict)
    """Module name → precedence, 0 if not named; it is compared before confidence."""

    standing: ReputationConfig = field(default_factory=ReputationConfig)

    fault_answer_s: float = 0.05
    """Seconds that modules have to say what to do about a fault at hand: small against any recovery. Nobody
    is waited for while no module has said that it answers."""

    late_answers: int = 3
    """Answers about faults in a row that did not come in time, after which a module is not waited for."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_confidence <= 1:
            raise BadInput(f"arbitration: min_confidence is {self.min_confidence}; give 0…1")
        if self.standing.burst < 1 or self.standing.rate_per_s <= 0:
            raise BadInput("arbitration: burst must be at least 1 and rate_per_s above 0")


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
    passed_on: Action | None = None
    valid_s: float = 0.0
    answer: bool = True
    suspended: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Lapse:
    """The validity of an adopted suggestion has ended: the stage gets these weights, or the knob is free.

    `routes`: of a stage the knobs that ended, with the module that held each.
    """

    job: str
    reason: str
    stage: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    knob: str = ""
    routes: tuple[tuple[str, str], ...] = ()


def register(
    state: ArbitrationState,
    lifecycle: ModuleLifecycle,
    now: float,
    config: ReputationConfig = ReputationConfig(),
) -> ArbitrationState:
    """Notes the state that a module reports; suggestions of unregistered modules are declined."""
    return replace(state, modules=module_reputation.register(state.modules, lifecycle, now, config))


def arbitrate(
    state: ArbitrationState,
    suggestion: PolicySuggestion,
    facts: JobFacts | None,
    now: float,
    *,
    sid: str | None = None,
    received_at: float | None = None,
    config: ArbitrationConfig | None = None,
    own: bool = False,
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
        own: the orchestrator's own loop suggests it.

    Returns:
        The outcome with its reason, and the new state.
    """
    config = config or ArbitrationConfig()
    if own:
        nonsense, myself = nonsense_in(suggestion, facts), ModuleReputation(state=ModuleState.ACTIVE)
        return _judge(state, suggestion, myself, facts, now, received_at, nonsense, config)
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
        if facts is None or facts.automation is Automation.ACT:
            standing = module_reputation.judged(
                standing,
                adopted=outcome.adopted,
                nonsense=bool(nonsense),
                lagging=lag_of(suggestion, facts) > config.max_lag_steps,
            )
        else:  # nothing of it could be adopted: nothing is held against the module
            nonsense = ""
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
    routes: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for where, entry in state.adopted.items():
        if entry.until <= now:
            reasons.setdefault(where, []).append(f"the weights of {entry.module} lapsed")
            routes.setdefault(where, []).append((weights_knob(where[1]), entry.module))
    for (job, stage, sid), entry in state.avoided.items():
        if entry.until <= now:
            reasons.setdefault((job, stage), []).append(f"{entry.module} no longer avoids {sid}")
            routes.setdefault((job, stage), []).append((route_knob(sid), entry.module))
    free = [(key, entry) for key, entry in state.held.items() if entry.until <= now]
    if not reasons and not free:
        return [], state
    state = replace(
        state,
        held={key: entry for key, entry in state.held.items() if entry.until > now},
        adopted={key: entry for key, entry in state.adopted.items() if entry.until > now},
        avoided={key: entry for key, entry in state.avoided.items() if entry.until > now},
    )
    lapses = [
        Lapse(
            job=job,
            stage=stage,
            weights=_table(state, job, stage, facts[job]),
            reason="; ".join(why),
            routes=tuple(routes[job, stage]),
        )
        for (job, stage), why in reasons.items()
        if job in facts
    ]
    lapses += [
        Lapse(job=job, knob=knob, reason=_lapsed(knob, entry.module))
        for (job, knob), entry in free
        if job in facts or not job
    ]
    in_force = {*state.adopted, *((job, stage) for job, stage, _ in state.avoided)}
    return lapses, replace(state, base={key: entry for key, entry in state.base.items() if key in in_force})


def _lapsed(knob: str, module: str) -> str:
    """What is told of a knob that nobody holds any more. Places and cuts stay as they are."""
    stays = knob == CUT or knob.startswith(place_knob(""))
    return f"{knob}: {module} holds it no longer" if stays else f"{knob}: what {module} set lapsed"


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
    if isinstance(suggestion.action, SetQueueOrder) and suggestion.owner != names.MESH:
        return _no(
            "the order of the queue concerns all users: only the mesh's own modules may suggest it"
        ), state
    if isinstance(suggestion.action, NoAction):
        return _no("an observation, nothing to adopt"), state
    if facts.automation is Automation.OFF:
        return _no(
            f"automation of job {job} is off: nothing is adopted (`dmsc policy automation {job} act`, "
            "`dmsc policy automation act`)"
        ), state
    if nonsense:
        return _no(nonsense), state
    if age > suggestion.valid_s:
        return _no(f"expired: valid for {suggestion.valid_s:.1f} s, considered after {age:.1f} s"), state
    if lag_of(suggestion, facts) > config.max_lag_steps:
        return _no(f"derived from step {suggestion.input_revision}, the job is at {facts.step}"), state
    if suggestion.confidence < config.min_confidence:
        least = f"{config.min_confidence:.2f}"
        text = f"confidence {suggestion.confidence:.2f} is below {least}"
        return _no(text, _stage(suggestion, facts)), state
    if forbidden := forbidden_by_job(suggestion, facts):
        return _no(forbidden), state
    watched = standing.state is ModuleState.SHADOW
    held_back = "in shadow" if watched else "advice" if facts.automation is Automation.ADVISE else ""
    if isinstance(suggestion.action, RouteAction):
        return _weigh(state, suggestion, held_back, facts, now, age, config)
    return _pass_on(state, suggestion, held_back, facts, now, age, config)


def _pass_on(
    state: ArbitrationState,
    suggestion: PolicySuggestion,
    held_back: str,
    facts: JobFacts,
    now: float,
    age: float,
    config: ArbitrationConfig,
) -> tuple[Outcome, ArbitrationState]:
    """Passes an action on to the job's run, which judges its worth (`membership.job_actions`)."""
    action, stage = suggestion.action, _stage(suggestion, facts)
    valid_s = min(suggestion.valid_s, config.max_valid_s) - age
    knob = knob_key(suggestion)
    holder = state.held.get(knob)
    if conflict := taken(suggestion, holder, now, config.precedence):
        return _no(conflict, stage), state
    fresh = held_by(suggestion, now, now + valid_s)
    if changes_nothing(action, facts):
        text = f"would change nothing: {knob[1] or scope_of(action)} is {value_of(action)} already"
        if held_back or holder is None or holder.module != suggestion.module:
            return _no(text, stage), state
        renewed = replace(state, held={**state.held, knob: replace(fresh, at=holder.at)})
        return _no(f"{text}; what holds is renewed", stage), renewed
    if held_back:
        outcome = Outcome(
            adopted=False,
            reason=f"{held_back}, would have been passed on: {suggestion.reason}",
            stage=stage,
            passed_on=action,
        )
        return outcome, state
    outcome = Outcome(
        adopted=True,
        reason=f"passed on: {suggestion.reason}",
        stage=stage,
        passed_on=action,
        valid_s=valid_s,
    )
    return outcome, replace(state, held={**state.held, knob: fresh}) if knob[1] else state


def _weigh(
    state: ArbitrationState,
    suggestion: PolicySuggestion,
    held_back: str,
    facts: JobFacts,
    now: float,
    age: float,
    config: ArbitrationConfig,
) -> tuple[Outcome, ArbitrationState]:
    """Decides whether a sensible suggestion is worth a change of routes, and computes the new weights."""
    stage = _stage(suggestion, facts)
    assert stage is not None
    until = now - age + min(suggestion.valid_s, config.max_valid_s)
    adoption = held_by(suggestion, now, until, as_weights(suggestion))
    before = weights_in_force(facts, stage)
    changed = _adopt(state, suggestion, stage, adoption, before)
    after = _table(changed, suggestion.job, stage, facts)
    shares_before, shares_after = shares_of(before), shares_of(after)
    changes = [abs(shares_after.get(sid, 0.0) - share) for sid, share in shares_before.items()]
    moved = sum(changes) / 2
    if moved <= config.min_share_change:
        least = f"{config.min_share_change:.0%}"
        text = f"would change nothing: at most {least} of the work of stage {stage} would go elsewhere"
        entry = _in_force(state, suggestion, stage)
        if held_back or entry is None or entry.module != suggestion.module:
            return _no(text, stage), state
        renewed = replace(entry, until=adoption.until)
        return _no(f"{text}; what holds is renewed", stage), _adopt(state, suggestion, stage, renewed, before)
    conflict = _conflict(state, suggestion, stage, now, config)
    if conflict:
        return _no(conflict, stage), state
    summary = f"{moved:.0%} of the work of stage {stage} goes elsewhere; {suggestion.reason}"
    if held_back:
        return _no(f"{held_back}, would have been adopted: {summary}", stage), state
    outcome = Outcome(
        adopted=True, reason=f"adopted: {summary}", stage=stage, weights=after, revision=facts.revision + 1
    )
    return outcome, changed


def _conflict(
    state: ArbitrationState, suggestion: PolicySuggestion, stage: int, now: float, config: ArbitrationConfig
) -> str:
    """Who holds this knob, or whose change of this stage is too recent; empty if nobody."""
    where = (suggestion.job, stage)
    if held := taken(suggestion, _in_force(state, suggestion, stage), now, config.precedence):
        return held
    adoptions = [adoption for key, adoption in state.adopted.items() if key == where]
    adoptions += [adoption for key, adoption in state.avoided.items() if key[:2] == where]
    own = rank(suggestion.module, suggestion.confidence, config.precedence)
    for other in adoptions:
        if now - other.at >= config.cooldown_s:
            continue
        rest = f"cool-down of stage {stage} for another {config.cooldown_s - (now - other.at):.1f} s"
        if other.module == suggestion.module:
            return rest
        theirs = rank(other.module, other.confidence, config.precedence)
        if own <= theirs:
            figures = f"confidence {other.confidence:.2f} against {own[2]:.2f}"
            return f"{rest}: {other.module} prevails with {figures}"
    return ""


# --- weights -----------------------------------------------------------------------------------------
def _stage(suggestion: PolicySuggestion, facts: JobFacts) -> int | None:
    match suggestion.action:
        case SetWeights(stage=stage) | MoveInstance(stage=stage) | SetWindow(stage=stage):
            return stage
        case SetReduction(stage=stage):
            return stage
        case Detour(sid=sid):
            return next(stage for stage, sids in facts.active.items() if sid in sids)
    return None


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
    if isinstance(suggestion.action, Detour):
        avoided = {**state.avoided, (*where, suggestion.action.sid): adoption}
        return replace(state, base=base, avoided=avoided)
    return replace(state, base=base, adopted={**state.adopted, where: adoption})


def _in_force(state: ArbitrationState, suggestion: PolicySuggestion, stage: int) -> ActiveSuggestion | None:
    if isinstance(suggestion.action, Detour):
        return state.avoided.get((suggestion.job, stage, suggestion.action.sid))
    return state.adopted.get((suggestion.job, stage))


def _table(state: ArbitrationState, job: str, stage: int, facts: JobFacts) -> dict[str, float]:
    """All weights of a stage by the state: base, adopted weights, avoided instances at 0.

    A backup has the weight of the instance that it stands for beside its own. If no other instance is left
    (the others have died since), avoided instances keep their weights.
    """
    base = state.base.get((job, stage), facts.weights.get(stage, {}))
    adopted = state.adopted.get((job, stage))
    weights = {**base, **(adopted.weights if adopted is not None else {})}
    table = {sid: weights.get(sid, 1.0) for sid in sorted(facts.active.get(stage, ()))}
    avoided = {sid: state.avoided[job, stage, sid] for sid in table if (job, stage, sid) in state.avoided}
    spared = {sid: 0.0 if sid in avoided else weight for sid, weight in table.items()}
    for sid, entry in avoided.items():
        if entry.backup in spared and entry.backup not in avoided:
            spared[entry.backup] += table[sid]
    return spared if any(weight > 0 for weight in spared.values()) else table


# --- helpers -----------------------------------------------------------------------------------------
def _keep(state: ArbitrationState, key: Key, standing: ModuleReputation) -> ArbitrationState:
    return replace(state, modules={**state.modules, key: standing})


def _no(reason: str, stage: int | None = None) -> Outcome:
    return Outcome(adopted=False, reason=reason, stage=stage)


def _name(suggestion: PolicySuggestion) -> str:
    return f"{suggestion.module} {suggestion.version}"
