"""What happened, for the time line: events of jobs, faults, suggestions and what became of them. Pure."""

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
"""Suggestions that wait to be decided; a decision that comes later is shown without them."""
_OVER = frozenset(state.value for state in FAULT_OVER)
_SILENT = frozenset({"step", "instances", "weights", "sample"})


class Incidents:
    """The latest of each. Everything may be told twice: from a stream and as it happens."""

    def __init__(self) -> None:
        self.events: deque[Row] = deque(maxlen=EVENTS)
        self.faults: OrderedDict[str, Row] = OrderedDict()
        self.decisions: deque[Row] = deque(maxlen=DECISIONS)
        self._known: OrderedDict[str, None] = OrderedDict()
        self._suggested: OrderedDict[str, PolicySuggestion] = OrderedDict()

    def take_event(self, event: JobEvent, event_id: str) -> Row | None:
        """A line of the time line, or None: what is shown elsewhere, or is known."""
        if event.kind in _SILENT or not self._is_new(event_id):
            return None
        text = event.text
        if event.kind == "validation" and event.validation_loss is not None:
            text = text or f"loss {event.validation_loss:.4f}"
        row = {
            "id": event_id,
            "at": round(event.at, 2),
            "kind": event.kind,
            "job": event.job,
            "state": None if event.state is None else event.state.value,
            "text": text,
        }
        if event.alert is not None:
            row |= {"raised": event.alert.raised, "text": text or event.alert.text}
        self.events.append(row)
        return row

    def take_fault(self, fault: FaultRecord) -> Row | None:
        """The fault as it now stands; None where a later word of it is known."""
        known = self.faults.get(fault.id)
        row = fault_row(fault)
        if known is not None:
            # Two words within a millisecond are usual: it is tried again, and that was its end.
            over = known["state"] in _OVER and known["changed_at"] == row["changed_at"]
            if known == row or over or known["changed_at"] > row["changed_at"]:
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
        """What became of a suggestion. The same again only counts: a module repeats what it still wants."""
        if not self._is_new(decision_id):
            return None
        asked = self._suggested.pop(decision.suggestion, None)
        row: Row = {
            "id": decision_id,
            "at": round(at, 2),
            "module": decision.module,
            "version": decision.version,
            "job": decision.job,
            "adopted": decision.adopted,
            "reason": decision.reason,
            "revision": decision.policy_revision,
            "wish": "" if asked is None else describe(asked.action),
            "scope": "" if asked is None else asked.scope or scope_of(asked.action),
            "confidence": None if asked is None else round(asked.confidence, 2),
            "why": "" if asked is None else asked.reason,
            "times": 1,
        }
        for known in reversed(self.decisions):
            if known["module"] == row["module"] and known["job"] == row["job"]:
                if all(known[name] == row[name] for name in ("version", "adopted", "reason", "wish")):
                    known |= {"at": row["at"], "times": known["times"] + 1, "why": row["why"]}
                    return known
                break
        self.decisions.append(row)
        return row

    def take_switch(self, switch: PolicySwitch, switch_id: str, at: float) -> Row | None:
        """Another version of a module is active."""
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

    def _is_new(self, one: str) -> bool:
        if one in self._known:
            return False
        self._known[one] = None
        while len(self._known) > 4 * (EVENTS + DECISIONS):
            self._known.popitem(last=False)
        return True
