"""What a chaos run of a service cost: waits of clients, goodput, and answers that were not as undisturbed.

Pure. Wait     the longest time that a client of an answer under way waited for its next piece, of those times
               that overlap with the time from a fault to the next one.
Goodput        pieces of answers per second ÷ those of the undisturbed run.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from dmsc.chaos import plot
from dmsc.chaos.report import InjectedFault, quantile
from dmsc.chaos.services.load import AnswerVerdict, LoadAnswer, judge, pieces_per_s

MOST_LISTED = 5
"""Wrong answers that are listed; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class FaultWait:
    """What one fault cost the answers under way; `wait_s` is that of the one that waited longest."""

    fault: int
    kind: str
    wait_s: float
    answers: int


@dataclass(frozen=True, kw_only=True)
class ServiceChaosReport:
    """All results. `references`: the undisturbed answers, by the number of their request."""

    service: str
    version: str
    job: str
    exact: bool
    inexact_because: str = ""
    seed: int
    every: str
    clients: int
    faults: tuple[InjectedFault, ...]
    references: tuple[LoadAnswer, ...]
    answers: tuple[LoadAnswer, ...]

    @property
    def verdicts(self) -> Counter[AnswerVerdict]:
        """How many answers there were of each kind."""
        return Counter(judge(answer, self.references[answer.request]) for answer in self.answers)

    @property
    def goodput(self) -> float | None:
        """Of the undisturbed run's pieces per second; None if nothing came then."""
        clean = pieces_per_s(self.references)
        return pieces_per_s(self.answers) / clean if clean else None

    @property
    def clean_wait_s(self) -> float | None:
        """The median time between two pieces of the undisturbed run."""
        waits = [end - begin for answer in self.references for begin, end in answer.waits]
        return quantile(waits, 0.5) if waits else None

    def waits(self) -> tuple[FaultWait, ...]:
        """What each fault cost that hit while somebody was answered."""
        fired = sorted((fault for fault in self.faults if fault.fired), key=lambda fault: fault.at)
        found = []
        for place, fault in enumerate(fired):
            until = fired[place + 1].at if place + 1 < len(fired) else math.inf
            open_then = [answer for answer in self.answers if answer.began <= fault.at < answer.ended]
            waits = [
                end - begin
                for answer in open_then
                for begin, end in answer.waits
                if end > fault.at and begin < until
            ]
            if waits:
                found.append(
                    FaultWait(
                        fault=fault.number,
                        kind=fault.kind.value,
                        wait_s=max(waits),
                        answers=len(open_then),
                    )
                )
        return tuple(found)

    def wait_s(self, q: float, kind: str | None = None) -> float | None:
        """The `q`-quantile (0..1) of the faults' waits, or of those of one kind; None without any."""
        values = [each.wait_s for each in self.waits() if kind in (None, each.kind)]
        return quantile(values, q) if values else None

    def problems(self) -> list[str]:
        """The problems of the run, one line each; empty if the mesh has kept all its promises."""
        lines = []
        wrong = [
            (answer, verdict)
            for answer in self.answers
            if (verdict := judge(answer, self.references[answer.request])) is not AnswerVerdict.EQUAL
        ]
        for answer, verdict in wrong[:MOST_LISTED]:
            what = answer.error or _difference(answer, self.references[answer.request])
            lines.append(f"request {answer.request} {verdict.value}: {what}")
        if len(wrong) > MOST_LISTED:
            lines.append(f"{len(wrong) - MOST_LISTED} more answers are not as undisturbed")
        if not self.exact and any(verdict is AnswerVerdict.OTHER for _, verdict in wrong):
            why = self.inexact_because or "it did not say why"
            lines.append(
                f"{self.service}@{self.version} is not exact ({why}): its answers depend on who computes "
                "them, also without faults"
            )
        lines += [
            f"fault {fault.number} did not fire: {fault.missed}" for fault in self.faults if fault.failed
        ]
        if not any(fault.fired for fault in self.faults):
            lines.append("no fault fired")
        elif not self.waits():
            lines.append("no fault fired while somebody was answered: ask for more --tokens or --clients")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The report for `--json`. Times are seconds; `at` counts from the first request."""
        began = self._began
        verdicts = self.verdicts
        return {
            "service": self.service,
            "version": self.version,
            "job": self.job,
            "exact": self.exact,
            "inexact_because": self.inexact_because,
            "seed": self.seed,
            "every": self.every,
            "clients": self.clients,
            "problems": self.problems(),
            "faults": [
                {
                    **asdict(fault),
                    "at": round(fault.at - began, 3),
                    "kind": fault.kind.value,
                    "fired": fault.fired,
                }
                for fault in self.faults
            ],
            "answers": len(self.answers),
            **{verdict.value: verdicts[verdict] for verdict in AnswerVerdict},
            "pieces": sum(len(answer.arrivals) for answer in self.answers),
            "clean": {"pieces_per_s": pieces_per_s(self.references), "wait_p50_s": self.clean_wait_s},
            "waits": {
                "count": len(self.waits()),
                **{f"p{round(100 * q)}_s": self.wait_s(q) for q in (0.5, 0.95, 1.0)},
                "each": [asdict(each) for each in self.waits()],
            },
            "goodput": self.goodput,
        }

    @property
    def _began(self) -> float:
        return min((answer.began for answer in self.answers), default=0.0)

    # --- for people ---------------------------------------------------------------------------------------
    def rows(self) -> list[tuple[str, str, str]]:
        """The rows of the table: figure, value, remark."""
        fired = [fault for fault in self.faults if fault.fired]
        missed = len(self.faults) - len(fired)
        kinds = Counter(fault.kind.value for fault in fired)
        what = ", ".join(f"{times} {kind}" for kind, times in sorted(kinds.items()))
        clean_s, verdicts = self.clean_wait_s, self.verdicts
        table = [
            ("faults", str(len(fired)), f"{what}; {missed} missed" if missed else what),
            ("answers", str(len(self.answers)), f"of {self.clients} clients at a time, as undisturbed"),
            ("clean piece", "–" if clean_s is None else f"{clean_s:.3f} s", "between two pieces, p50"),
        ]
        for name, q in (("wait p50", 0.5), ("wait p95", 0.95), ("wait worst", 1.0)):
            wait_s = self.wait_s(q)
            if wait_s is not None:
                table.append((name, f"{wait_s:.2f} s", "the longest of the answers under way, per fault"))
        each = {wait.kind for wait in self.waits()}
        for kind in sorted(each) if len(each) > 1 else ():
            table.append((f"  {kind} p50", f"{self.wait_s(0.5, kind) or 0:.2f} s", ""))
        if self.goodput is not None:
            table.append(("goodput", f"{self.goodput:.2f}", "of the undisturbed run"))
        for verdict in (AnswerVerdict.SHORT, AnswerVerdict.LONG, AnswerVerdict.OTHER, AnswerVerdict.FAILED):
            table.append((verdict.value, str(verdicts[verdict]), "answers"))
        compared = sum(bool(answer.digests) and all(answer.digests) for answer in self.answers)
        table.append(("digests", str(compared), "answers whose logits were compared token by token"))
        return table

    def closing(self, width: int = 72) -> list[str]:
        """The lines below the table: pieces per second over time, and the verdict."""
        kinds = dict.fromkeys(fault.kind for fault in self.faults if fault.fired)
        letters = ", ".join(f"{plot.LETTERS[kind]} {kind.value}" for kind in kinds)
        rates, span = self.rates(width)
        lines = []
        if rates:
            top = max(*rates, pieces_per_s(self.references))
            curve = plot.drawn(rates, top, self.faults, span)
            lines = [f"pieces of answers/s over time ({letters})", *curve]
        problems = self.problems()
        return lines + ([f"✗ {line}" for line in problems] or ["✓ nothing lost, nothing doubled"])

    def rates(self, columns: int) -> tuple[list[float], tuple[float, float]]:
        """Pieces per second in equal slices of the run, and its begin and end; empty without any."""
        arrivals = [at for answer in self.answers for at in answer.arrivals]
        began, ended = self._began, max(arrivals, default=0.0)
        if ended <= began or columns < 1:
            return [], (began, ended)
        slice_s = (ended - began) / columns
        counts = Counter(min(int((at - began) / slice_s), columns - 1) for at in arrivals)
        return [counts[column] / slice_s for column in range(columns)], (began, ended)


def _difference(answer: LoadAnswer, reference: LoadAnswer) -> str:
    """Where an answer is another one, in words."""
    if answer.text != reference.text:
        return f"{answer.text[-24:]!r} beside {reference.text[-24:]!r}"
    if len(answer.digests) != len(reference.digests):
        return f"{len(answer.digests)} tokens beside {len(reference.digests)}, though the text is the same"
    pairs = enumerate(zip(answer.digests, reference.digests, strict=True))
    first = next((place for place, (own, other) in pairs if own and other and own != other), None)
    if first is None:
        return f"it ends by {answer.finish or 'nothing'} beside {reference.finish}"
    return f"the text is the same, the logits of token {first} are others"


def svg(report: ServiceChaosReport) -> str:
    """The SVG: pieces/s over seconds, the undisturbed run's rate as a dashed line, a line per fault."""
    rates, (began, ended) = report.rates(240)
    slice_s = (ended - began) / max(1, len(rates))
    points = [
        (began + place * slice_s + side, rate) for place, rate in enumerate(rates) for side in (0.0, slice_s)
    ]
    fired = sum(fault.fired for fault in report.faults)
    wrong = sum(times for verdict, times in report.verdicts.items() if verdict is not AnswerVerdict.EQUAL)
    title = f"{report.service}@{report.version}: {fired} faults, {len(report.answers)} answers, {wrong} wrong"
    clean = pieces_per_s(report.references)
    return plot.drawn_svg(title, points, (began, ended), report.faults, clean, "pieces/s")
