"""A job's alerts: loss spike, gradient norm, straggler, temperature, underperforming instance.

Pure; `job.training` publishes them. The input is each decided step, the Type 5 reports of the job's clusters,
and what node agents judge (MIC). The job's record holds the raised
alerts: a new orchestrator goes on with them and with the usual values that they name, and learns all other
usual values anew.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import median

from entities.detection.fail_slow import FailSlow, FailSlowConfig
from entities.orchestrator.monitoring.hardware_risk import WARM_C
from entities.orchestrator.monitoring.outlier_detector import OutlierChange, OutlierConfig, OutlierDetector
from schemas.alert import Alert, AlertKind
from schemas.fault import ClusterReport
from schemas.job import StepResult
from schemas.signals import QosReport
from schemas.step import MicrobatchClaim
from schemas.task_graph import TaskGraph

COOL_C = WARM_C - 5.0
"""Temperature below which the alert of a device that was too warm is cleared."""
CONFIRM = 5
"""Steps in a row in which an instance must be slow: one pause moves the median of a few microbatches."""
HOT_REPORTS = 3
"""Reports in a row, one a second, before a device is called too warm."""

LOSS = OutlierConfig()
LOG_NORM = OutlierConfig(floor=0.0, least=0.1)
"""For the logarithm of the norm, because norms vary by factors. The least deviation is then 10 %."""


class Alerts:
    """The alerts of one job. Each call returns the alerts that it raised or cleared."""

    def __init__(self, raised: Iterable[Alert] = ()) -> None:
        """`raised`: alerts of an earlier orchestrator that are not cleared yet."""
        self._loss = OutlierDetector(LOSS)
        self._norm = OutlierDetector(LOG_NORM)
        self._slow = FailSlow(FailSlowConfig(confirm=CONFIRM))
        self._incarnations: dict[str, str] = {}
        self._computed: Counter[str] = Counter()
        self._warm: dict[str, int] = defaultdict(int)
        self._raised = {(alert.kind, alert.subject): alert for alert in raised}
        self._inherited: dict[str, float] = {}  # usual times of SIDs that were slow under that orchestrator
        self.counted: Counter[AlertKind] = Counter()
        for alert in self._raised.values():
            self._inherit(alert)

    def _inherit(self, alert: Alert) -> None:
        usual = alert.usual
        if usual is None:
            return
        if alert.kind is AlertKind.LOSS_SPIKE:
            self._loss.resume(usual)
        elif alert.kind is AlertKind.GRADIENT_NORM:
            self._norm.resume(math.log(usual) if usual > 0 else 0.0)
        elif alert.kind is AlertKind.STRAGGLER:
            self._inherited[alert.subject] = usual

    @property
    def raised(self) -> tuple[Alert, ...]:
        """The alerts that are not cleared."""
        return tuple(self._raised.values())

    def decided(
        self, result: StepResult, claims: Iterable[MicrobatchClaim], graph: TaskGraph | None = None
    ) -> list[Alert]:
        """A step was decided.

        Args:
            result: What came of it.
            claims: All claims of that step.
            graph: Its units have the layers that they had in that step; None: layers stay as they are.
        """
        changes = []
        turn = self._loss.observe(result.loss)
        if turn is not None:
            changes.append(_of_step(AlertKind.LOSS_SPIKE, "loss", turn, result.step, result.loss, turn.usual))
        norm = result.gradient_norm
        turn = self._norm.observe(math.log(norm) if norm > 0 else norm if math.isnan(norm) else 0.0)
        if turn is not None:
            usual = math.exp(turn.usual)
            changes.append(_of_step(AlertKind.GRADIENT_NORM, "gradient norm", turn, result.step, norm, usual))
        changes += self._stragglers(result, claims, graph)
        return [self._note(alert) for alert in changes]

    def _stragglers(
        self, result: StepResult, claims: Iterable[MicrobatchClaim], graph: TaskGraph | None
    ) -> Iterable[Alert]:
        """Instances that became slower than before while others did not (`entities.detection.fail_slow`)."""
        took: dict[tuple[str, str], list[float]] = defaultdict(list)
        stage_of: dict[str, int] = {}
        for claim in claims:
            took[claim.owner.sid, claim.owner.incarnation].append(claim.forward_ms + claim.backward_ms)
            stage_of[claim.owner.sid] = claim.stage
        yield from self._left(result, dict(took.keys()))
        for (sid, incarnation), times in sorted(took.items()):
            self._computed[sid] += len(times)
            if sid in self._inherited:
                self._slow.resume(sid, incarnation, self._inherited.pop(sid))
            units = () if graph is None else graph.stage(stage_of[sid])
            work_ms = units[0].requirements.reference_ms if units else 0.0
            verdict = self._slow.observe(sid, incarnation, median(times), self._computed[sid], work_ms)
            if verdict is not None:
                yield Alert(
                    kind=AlertKind.STRAGGLER,
                    subject=sid,
                    raised=verdict.slow,
                    step=result.step,
                    value=median(times),
                    usual=verdict.usual_ms,
                    text=verdict.evidence,
                )

    def _left(self, result: StepResult, working: dict[str, str]) -> Iterable[Alert]:
        """Clears alerts of stragglers that left or were replaced. `working`: SID → incarnation."""
        known = self._incarnations
        for sid in sorted({*known, *self._inherited}):
            same = sid in self._inherited or working.get(sid, known[sid]) == known[sid]
            if sid in result.shares and same:
                continue
            self._slow.forget(sid)
            self._computed.pop(sid, None)
            self._inherited.pop(sid, None)
            known.pop(sid, None)
            for kind in (AlertKind.STRAGGLER, AlertKind.UNDERPERFORMING):
                if (kind, sid) in self._raised:
                    text = f"the one that was slow as {sid} is gone"
                    yield Alert(kind=kind, subject=sid, raised=False, step=result.step, text=text)
        known.update(working)

    def reported(self, report: QosReport | ClusterReport, step: int) -> list[Alert]:
        """A Type 5 report of one of the job's clusters (its hottest device), or a judgement of the MIC."""
        if isinstance(report, ClusterReport):
            return self._judged(report, step)
        warm = report.temperature_c
        if warm is None:
            return []
        present = self._raised.get((AlertKind.TEMPERATURE, report.cluster))
        self._warm[report.cluster] = self._warm[report.cluster] + 1 if warm >= WARM_C else 0
        if present is None and self._warm[report.cluster] >= HOT_REPORTS:
            text = f"a device in cluster {report.cluster} is at {warm:.0f} °C (from {WARM_C:.0f} on too warm)"
        elif present is not None and warm < COOL_C:
            text = f"the devices in cluster {report.cluster} are below {COOL_C:.0f} °C again"
        else:
            return []
        alert = Alert(
            kind=AlertKind.TEMPERATURE,
            subject=report.cluster,
            raised=present is None,
            step=step,
            value=warm,
            usual=WARM_C,
            text=text,
        )
        return [self._note(alert)]

    def _judged(self, report: ClusterReport, step: int) -> list[Alert]:
        """Whether an instance is slower than the plan expects."""
        raised = report.condition == "underperforming"
        key = (AlertKind.UNDERPERFORMING, report.sid)
        if raised == (key in self._raised):
            return []
        alert = Alert(
            kind=AlertKind.UNDERPERFORMING,
            subject=report.sid,
            raised=raised,
            step=step,
            value=report.slowness,
            usual=1.0,
            text=report.evidence,
        )
        return [self._note(alert)]

    def _note(self, alert: Alert) -> Alert:
        key = alert.kind, alert.subject
        if alert.raised:
            self._raised[key] = alert
            self.counted[alert.kind] += 1
        else:
            self._raised.pop(key, None)
        return alert


def _of_step(kind: AlertKind, name: str, turn: OutlierChange, step: int, value: float, usual: float) -> Alert:
    if turn.raised:
        text = f"{name} {value:.4g} at step {step}, usually {usual:.4g}"
        text += f" (z {turn.z:.0f})" if math.isfinite(turn.z) else ""
    else:
        text = f"{name} {value:.4g} at step {step} is usual again"
    finite = value if math.isfinite(value) else None
    return Alert(kind=kind, raised=turn.raised, step=step, value=finite, usual=usual, text=text)
