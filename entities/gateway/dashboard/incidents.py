"""The time line: events of jobs, faults, and suggestions with their decisions. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque

from entities.gateway.dashboard.rows import Row, describe, fault_row
from schemas.fault import FAULT_OVER, FaultRecord
from schemas.job import JobEvent
from schemas.policy import PolicyDecision, PolicySuggestion, PolicySwitch, scope_of

EVENTS = 500
FAULTS = 300
DECISIONS = 200
SUGGESTIONS = 1000
"""Undecided suggestions that are kept; a decision on one that was dropped is shown without its details."""
_OVER = frozenset(state.value for state in FAULT_OVER)
_SILENT = frozenset({"step", "instances", "weights", "sample"})


class Incidents:
    """The latest incidents of each kind. Each may arrive twice: from a stream, and as it happens."""

    def __init__(self) -> None:
        self.events: deque[Row] = deque(maxlen=EVENTS)
        self.faults: OrderedDict[str, Row] = OrderedDict()
        self.decisions: deque[Row] = deque(maxlen=DECISIONS)
        self._known: OrderedDict[str, None] = OrderedDict()
        self._suggested: OrderedDict[str, PolicySuggestion] = OrderedDict()

    def take_event(self, event: JobEvent, event_id: str) -> Row | None:
        """Adds a row to the time line; returns None if the event is shown elsewhere or is known already."""
        if event.kind in _SILENT or not self._is_new(event_id):
            return None
        text = event.text
        if event.kind == "validation" and event.validation_loss is not None:
            text = text or f"loss {event.validation_loss:.4f}"
        row = {
            "id": event_id,
            "at": round(event.at, 2),
            "kind": "alert" if event.warning else event.kind,
            "job": event.job,
            "state": None if event.state is None else event.state.value,
            "text": text,
        }
        if event.alert is not None:
            row |= {"raised": event.alert.raised, "text": text or event.alert.text}
        self.events.append(row)
        return row

    def take_fault(self, fault: FaultRecord) -> Row | None:
        """Stores the fault's state as a row; returns None if it is not newer than the known one."""
        existing = self.faults.get(fault.id)
        row = fault_row(fault)
        if existing is not None:
            # Two records within a millisecond are usual: a retry, and the fault's end.
            over = existing["state"] in _OVER and existing["changed_at"] == row["changed_at"]
            if existing == row or over or existing["changed_at"] > row["changed_at"]:
                return None
        self.faults[fault.id] = row
        self.faults.move_to_end(fault.id)
        while len(self.faults) > FAULTS:
            self.faults.popitem(last=False)
        return row

    def take_suggestion(self, suggestion: PolicySuggestion, suggestion_id: str) -> None:
        self._suggested[suggestion_id] = suggestion
        while len(self._suggested) > SUGGESTIONS:
            self._suggested.popitem(last=False)

    def take_decision(self, decision: PolicyDecision, decision_id: str, at: float) -> Row | None:
        """Adds the decision on a suggestion. An equal decision on a repeated suggestion is only counted."""
        if not self._is_new(decision_id):
            return None
        suggestion = self._suggested.pop(decision.suggestion, None)
        row: Row = {
            "id": decision_id,
            "at": round(at, 2),
            "module": decision.module,
            "version": decision.version,
            "job": decision.job,
            "adopted": decision.adopted,
            "reason": decision.reason,
            "revision": decision.policy_revision,
            "wish": "" if suggestion is None else describe(suggestion.action),
            "scope": "" if suggestion is None else suggestion.scope or scope_of(suggestion.action),
            "confidence": None if suggestion is None else round(suggestion.confidence, 2),
            "why": "" if suggestion is None else suggestion.reason,
            "times": 1,
        }
        for existing in reversed(self.decisions):
            if existing["module"] == row["module"] and existing["job"] == row["job"]:
                if all(existing[name] == row[name] for name in ("version", "adopted", "reason", "wish")):
                    existing |= {"at": row["at"], "times": existing["times"] + 1, "why": row["why"]}
                    return existing
                break
        self.decisions.append(row)
        return row

    def take_switch(self, switch: PolicySwitch, switch_id: str, at: float) -> Row | None:
        """Adds a row for a change of a module's active version; None if it is known already."""
        if not self._is_new(switch_id):
            return None
        verb = "rolled back to" if switch.rollback else "switched to"
        row = {
            "id": switch_id,
            "at": round(at, 2),
            "kind": "policy",
            "job": None,
            "state": None,
            "text": f"{switch.module} {verb} {switch.version} (from {switch.previous}) by {switch.by}: "
            f"{switch.reason}",
        }
        self.events.append(row)
        return row

    def _is_new(self, incident_id: str) -> bool:
        if incident_id in self._known:
            return False
        self._known[incident_id] = None
        while len(self._known) > 4 * (EVENTS + DECISIONS):
            self._known.popitem(last=False)
        return True
