"""The base class of policies: at most three methods, `subscribes`, `on_<event>` and `decide` (draft §4.2).

    class Fairer(Policy):
        name = "fairer"

        def decide(self, view: JobView, now: float) -> Suggestions:
            ...
            return self.set_weights(view, stage, {sid: 1.0}, reason="…", confidence=0.8)

The events are the rows of `bus.subjects` that functional modules receive: `on_instance_sample(self, sample,
at)` takes the row "instance sample", and so on for each name in `EVENTS`. Most policies need none of them:
the kit adds every message to the `JobView` that `decide` gets. `reads` names rows to fetch from instances'
local stores; the answers come to `on_store_rows`. `infers` names inputs for the policy's `model`, which runs
in a process of its own; the results come to `on_inference`. A policy with `on_fault` is asked what to do
about a fault at hand, and answers within milliseconds.

`decide` is pure: its result depends on the view and on `now` alone, so that a replay of a recorded run gives
the same suggestions. A policy may have attributes of its own if only `on_<event>` methods set them: after a
crash the kit makes a new object and feeds it the recorded events of the last minutes again. What it learnt
over a longer time is kept on the bus if it has a `state_version`, `learnt_state` and `restore` (ADR-0100).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from bus import subjects
from bus.subject_row import Subject
from policies.kit.inference import Inference
from policies.kit.store_reads import StoreRead
from policies.kit.view import JobView
from schemas.actions import (
    Action,
    AvoidInstance,
    CheckpointNow,
    ExpectFailures,
    Migrate,
    MoveInstance,
    NoAction,
    Recut,
    RollBack,
    Scale,
    SetAlgorithm,
    SetQueueOrder,
    SetRate,
    SetReduction,
    SetTraffic,
    SetWeights,
    SetWindow,
    UseBackup,
    scope_of,
)
from schemas.base import Message, is_token
from schemas.changes import Forecast
from schemas.envelope import EntityKind
from schemas.fault_choices import FaultAction, FaultAnswer, FaultCosts, FaultQuestion, Replace, Retry, Wait
from schemas.policy import PolicySuggestion
from schemas.recut import Cuts
from schemas.store import Scalar, StoreQuery, StoreTable

Suggestions = PolicySuggestion | Sequence[PolicySuggestion] | None
"""What `decide` may return."""

EVENTS: dict[str, Subject] = {
    row.name.replace(" ", "_"): row
    for row in subjects.SUBJECTS
    if row.bucket is None
    and row.reply is None
    and row.receivers & {EntityKind.FUNCTIONAL_MODULE}
    and row is not subjects.LEARNT_STATE
    and row is not subjects.FAULT_QUESTION
}
"""Event name → row: all rows that a functional module may subscribe to, by the table's own directions."""

STORE_ANSWER = "on_store_rows"
"""The method that gets the answers to `reads`: `on_store_rows(self, rows: StoreRows, at)`."""

INFERENCE = "on_inference"
"""The method that gets the model's results: `on_inference(self, result: Inferred, at)`."""

FAULT = "on_fault"
"""The method that is asked about a fault at hand:
`on_fault(self, fault: FaultQuestion, view: JobView) -> FaultAnswer | None`.
It is pure, like `decide`: `fault.at` is the time; `view.faults` has earlier faults."""

ALWAYS: tuple[Subject, ...] = (
    subjects.INSTANCE_SAMPLE,
    subjects.QOS_REPORT,
    subjects.ADVERTISEMENT,
    subjects.POLICY_DECISION,
    subjects.JOB_EVENT,
    subjects.JOB_TOPOLOGY,
)
"""Rows that every module takes in, because the view is made from them."""


class Policy:
    """Base of all policies. Set `name` and write `decide`; everything else has a sensible default.

    Attributes:
        name: The module's name; one subject token. Several versions may run side by side.
        version: Any text; change it when decisions would differ.
        every_s: Seconds between two calls of `decide` for one job. Smaller reacts sooner, costs more.
        state_version: Version of the form of `learnt_state`, from 1; 0: it keeps none.
    """

    name: ClassVar[str] = ""
    version: ClassVar[str] = "1"
    every_s: ClassVar[float] = 1.0
    state_version: ClassVar[int] = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.name and not is_token(cls.name):
            raise TypeError(f"{cls.__name__}.name is {cls.name!r}: use letters, digits, - and _ only")
        for attribute in dir(cls):
            answers = (STORE_ANSWER, INFERENCE, FAULT)
            if attribute.startswith("on_") and attribute[3:] not in EVENTS and attribute not in answers:
                events = ", ".join([*sorted(EVENTS), *(answer[3:] for answer in answers)])
                raise TypeError(f"{cls.__name__}.{attribute}: no such event; there are: {events}")

    def subscribes(self) -> tuple[Subject, ...]:
        """Rows to take in besides `ALWAYS`: by default those with an `on_<event>` method."""
        return tuple(row for event, row in EVENTS.items() if hasattr(self, f"on_{event}"))

    @property
    def answers_faults(self) -> bool:
        """Whether it has a say in what is done about a fault at hand."""
        return hasattr(self, FAULT)

    def decide(self, view: JobView, now: float) -> Suggestions:
        """The suggestions for this job now, if any.

        Args:
            view: The job as seen so far; read only.
            now: Seconds since the epoch; in a replay the record's time.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decide method")

    def reads(self, view: JobView, now: float) -> Sequence[StoreRead]:
        """Reads of local stores, asked for after `decide`; answers come to `on_store_rows`, or never."""
        return ()

    def learnt_state(self) -> Any:
        """What it has learnt, as plain data (dict, list, text, finite numbers), at most 256 KiB as JSON.

        Only `on_<event>` methods change it, never `decide`: then a replay of the events gives the same state.
        Pure; the kit calls it between other calls.
        """
        raise NotImplementedError(f"{type(self).__name__} has a state_version, but no learnt_state method")

    def restore(self, state: Any) -> None:
        """Goes on from what `learnt_state` returned, in this process or another; replaces what it has learnt.

        What it took in of the last minutes beside that (samples, members) stays. It raises any error, before
        it changes anything, if the state does not fit.
        """
        raise NotImplementedError(f"{type(self).__name__} has a state_version, but no restore method")

    def drift(self) -> str:
        """Why what it learnt no longer fits what happens, in words; empty while it does. Pure like `decide`.

        While it says so, the kit halves the confidence of its suggestions, and tells the mesh.
        `policies.numerics.drift.ErrorDrift` notices it with a stated rate of false alarms.
        """
        return ""

    def handler(self, row: Subject) -> Callable[[Message, float], None] | None:
        """The `on_<event>` method for this row, if the policy has one."""
        name = STORE_ANSWER if row is subjects.STORE_QUERY else f"on_{row.name.replace(' ', '_')}"
        method: Callable[[Message, float], None] | None = getattr(self, name, None)
        return method

    @classmethod
    def model(cls) -> Callable[[Any], Any]:
        """Makes the model, a function of `infer`'s inputs. Called once, in its own process; may use torch."""
        raise NotImplementedError(f"{cls.__name__} infers, but has no model method")

    def infers(self, view: JobView, now: float) -> Sequence[Inference]:
        """Inferences of the model, asked for after `decide`; results come to `on_inference`, or never."""
        return ()

    @property
    def has_model(self) -> bool:
        """Whether this policy needs a process for its model."""
        return any("model" in vars(cls) for cls in type(self).__mro__ if cls is not Policy)

    # --- helpers for reads and inferences -------------------------------------------------------------
    def read(
        self,
        view: JobView,
        sid: str,
        table: StoreTable,
        *,
        columns: tuple[str, ...] = (),
        where: Mapping[str, Scalar] | None = None,
        after_id: int = 0,
        limit: int = 100,
    ) -> StoreRead:
        """A read of the last `limit` rows of an instance's table, or the first ones after `after_id`."""
        query = StoreQuery(
            job=view.job,
            table=table,
            columns=columns,
            where=dict(where or {}),
            after_id=after_id,
            limit=limit,
            newest=after_id == 0,
        )
        return StoreRead(sid, query)

    def infer(self, view: JobView, key: str, inputs: Any) -> Inference:
        """An inference of the model on `inputs` (plain data or numpy arrays); `key` names its subject."""
        return Inference(view.job, key, inputs)

    # --- helpers for answers about a fault ------------------------------------------------------------
    def retry(
        self,
        fault: FaultQuestion,
        *,
        reason: str,
        confidence: float = 0.8,
        costs: FaultCosts = FaultCosts(),
    ) -> FaultAnswer:
        """Answers: ask the same instance again. Reported once more, it is replaced."""
        return self._answer(fault, Retry(), reason, confidence, costs)

    def wait(
        self,
        fault: FaultQuestion,
        for_s: float,
        *,
        reason: str,
        confidence: float = 0.8,
        costs: FaultCosts = FaultCosts(),
    ) -> FaultAnswer:
        """Answers: hold the replacement for at most so many seconds; `fault.most_wait_s` is the limit."""
        return self._answer(fault, Wait(for_s=for_s), reason, confidence, costs)

    def replace(
        self,
        fault: FaultQuestion,
        *,
        reason: str,
        avoid: Collection[str] = (),
        prefer: str | None = None,
        avoid_kinds: Collection[str] = (),
        confidence: float = 0.8,
        costs: FaultCosts = FaultCosts(),
    ) -> FaultAnswer:
        """Answers: replace it now, if possible not on these nodes (agents' SIDs) or kinds of devices."""
        action = Replace(avoid=tuple(sorted(avoid)), prefer=prefer, avoid_kinds=tuple(sorted(avoid_kinds)))
        return self._answer(fault, action, reason, confidence, costs)

    def _answer(
        self, fault: FaultQuestion, action: FaultAction, reason: str, confidence: float, costs: FaultCosts
    ) -> FaultAnswer:
        return FaultAnswer(
            module=self.name,
            version=self.version,
            job=fault.job,
            question=fault.id,
            action=action,
            confidence=confidence,
            reason=reason,
            costs=costs,
        )

    # --- helpers for suggestions ----------------------------------------------------------------------
    def set_weights(
        self,
        view: JobView,
        stage: int,
        weights: Mapping[str, float],
        *,
        forecast: Forecast | None = None,
        reason: str,
        confidence: float = 0.8,
        valid_s: float = 60.0,
    ) -> PolicySuggestion:
        """Suggests to spread a stage's microbatches by these relative weights (SID → weight ≥ 0)."""
        action = SetWeights(stage=stage, weights=dict(weights), forecast=forecast)
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=valid_s)

    def avoid(
        self,
        view: JobView,
        sid: str,
        *,
        forecast: Forecast | None = None,
        reason: str,
        confidence: float = 0.8,
        valid_s: float = 60.0,
    ) -> PolicySuggestion:
        """Suggests to send nothing to this instance while the suggestion is valid."""
        action = AvoidInstance(sid=sid, forecast=forecast)
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=valid_s)

    def use_backup(
        self,
        view: JobView,
        sid: str,
        backup: str,
        *,
        forecast: Forecast | None = None,
        reason: str,
        confidence: float = 0.8,
        valid_s: float = 60.0,
    ) -> PolicySuggestion:
        """Suggests that `backup`, of the same stage, get this instance's share while that is valid."""
        action = UseBackup(sid=sid, backup=backup, forecast=forecast)
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=valid_s)

    def move(
        self,
        view: JobView,
        sid: str,
        stage: int,
        forecast: Forecast,
        *,
        reason: str,
        confidence: float = 0.8,
        valid_s: float = 30.0,
    ) -> PolicySuggestion:
        """Suggests that this instance leave its stage, and that its slot host one of `stage` instead."""
        action = MoveInstance(sid=sid, stage=stage, forecast=forecast)
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=valid_s)

    def migrate(
        self,
        view: JobView,
        sid: str,
        forecast: Forecast,
        *,
        node: str | None = None,
        reason: str,
        confidence: float = 0.8,
        valid_s: float = 30.0,
    ) -> PolicySuggestion:
        """Suggests that this instance leave its slot for another one, of `node` (an agent's SID) if named."""
        action = Migrate(sid=sid, node=node, forecast=forecast)
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=valid_s)

    def scale(
        self,
        view: JobView,
        replicas: int,
        forecast: Forecast,
        *,
        reason: str,
        confidence: float = 0.8,
        valid_s: float = 600.0,
    ) -> PolicySuggestion:
        """Suggests so many replicas of each stage, within `parallel.replicas: {min, want, max}`."""
        action = Scale(replicas=replicas, forecast=forecast)
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=valid_s)

    def recut(
        self,
        view: JobView,
        cuts: Cuts | None,
        forecast: Forecast,
        *,
        reason: str,
        confidence: float = 0.8,
        valid_s: float = 60.0,
    ) -> PolicySuggestion:
        """Suggests other layers for the stages; None: those that are best by the speeds that they show."""
        revision = None if view.graph is None else view.graph.revision
        action = Recut(cuts=cuts, revision=revision, forecast=forecast)
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=valid_s)

    def set_window(
        self,
        view: JobView,
        stage: int,
        in_flight: int,
        forecast: Forecast,
        *,
        reason: str,
        confidence: float = 0.8,
        valid_s: float = 600.0,
    ) -> PolicySuggestion:
        """Suggests how many microbatches a sender may have open at one receiver of a stage."""
        action = SetWindow(stage=stage, in_flight=in_flight, forecast=forecast)
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=valid_s)

    def set_rate(
        self,
        view: JobView,
        per_s: float,
        forecast: Forecast,
        *,
        reason: str,
        confidence: float = 0.8,
        valid_s: float = 600.0,
    ) -> PolicySuggestion:
        """Suggests how many microbatches a second the first stage is sent at most, by all senders."""
        action = SetRate(per_s=per_s, forecast=forecast)
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=valid_s)

    def set_reduction(
        self,
        view: JobView,
        stage: int,
        forecast: Forecast,
        *,
        parts: Mapping[str, float] | None = None,
        order: Sequence[str] = (),
        reason: str,
        confidence: float = 0.8,
        valid_s: float = 600.0,
    ) -> PolicySuggestion:
        """Suggests how much of a stage's sum each replica adds up for all (`parts`), and the ring's order."""
        action = SetReduction(stage=stage, parts=dict(parts or {}), order=tuple(order), forecast=forecast)
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=valid_s)

    def set_algorithm(
        self,
        view: JobView,
        algorithm: str,
        forecast: Forecast,
        *,
        reason: str,
        confidence: float = 0.8,
        valid_s: float = 600.0,
    ) -> PolicySuggestion:
        """Suggests one of the built-in routing algorithms (`schemas.routing.ALGORITHMS`)."""
        action = SetAlgorithm(algorithm=algorithm, forecast=forecast)
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=valid_s)

    def checkpoint_now(
        self, view: JobView, *, reason: str, confidence: float = 0.8, valid_s: float = 30.0
    ) -> PolicySuggestion:
        """Suggests a checkpoint at the end of the open step."""
        action = CheckpointNow()
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=valid_s)

    def queue_order(
        self,
        view: JobView,
        jobs: Sequence[str],
        *,
        reason: str,
        confidence: float = 0.8,
        valid_s: float = 60.0,
    ) -> PolicySuggestion:
        """Suggests in which order waiting jobs should start, as far as the queue's classes allow it.

        Jobs that it does not name come behind those of their class that it names.
        """
        action = SetQueueOrder(jobs=tuple(jobs))
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=valid_s)

    def expect_failures(
        self, view: JobView, between_s: float, *, reason: str, confidence: float = 0.8, valid_s: float = 600.0
    ) -> PolicySuggestion:
        """Suggests to expect a failure of the job every `between_s` seconds, and to space checkpoints so."""
        action = ExpectFailures(between_s=between_s)
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=valid_s)

    def roll_back(
        self, view: JobView, service: str, version: str, *, reason: str, confidence: float = 0.8
    ) -> PolicySuggestion:
        """Suggests that a service's version, whose job this is, give its traffic back to the stable one."""
        action = RollBack(service=service, version=version)
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=60.0)

    def set_traffic(
        self, view: JobView, action: SetTraffic, *, reason: str, confidence: float = 0.8
    ) -> PolicySuggestion:
        """Suggests other shares of a service's traffic; this job is one of its versions."""
        return self.suggest(view, action, reason=reason, confidence=confidence, valid_s=60.0)

    def note(
        self, view: JobView, text: str, *, confidence: float = 0.5, valid_s: float = 60.0
    ) -> PolicySuggestion:
        """A note without an action: kept on the stream, never adopted."""
        return self.suggest(view, NoAction(note=text), reason=text, confidence=confidence, valid_s=valid_s)

    def suggest(
        self, view: JobView, action: Action, *, reason: str, confidence: float, valid_s: float
    ) -> PolicySuggestion:
        """A suggestion of any action, with module, version and `input_revision` (the last step seen)."""
        return PolicySuggestion(
            module=self.name,
            version=self.version,
            job=view.job,
            action=action,
            confidence=confidence,
            reason=reason,
            input_revision=view.step,
            valid_s=valid_s,
            scope=scope_of(action),
        )
