"""Carries a sweep out: reads its jobs from a gateway, and does what `schedule.decide` says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dmsc.client.async_client import AsyncClient
from dmsc.sweeps.results import SweepResult, last_objective, objective_at, reported, result_of
from dmsc.sweeps.schedule import SweepAction, SweepPlan, TrialView, decide
from dmsc.sweeps.sweep_file import Sweep
from dmsc.sweeps.trials import SweepTrial, array_spec
from schemas.arrays import array_name
from schemas.curve import StepCurve
from schemas.errors import BadInput, Conflict, NotFound, OverQuota, Unavailable
from schemas.job import ENDED, JobRecord, JobState

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class SweepTimes:
    """How often a sweep looks at its jobs, in seconds."""

    poll_s: float = 0.5  # a trial runs on for about so long beyond its rung
    away_s: float = 2.0  # between attempts while no gateway answers


class SweepDriver:
    """Runs one sweep. `say` is told what happens, a line each."""

    def __init__(
        self,
        client: AsyncClient,
        sweep: Sweep,
        trials: Sequence[SweepTrial],
        say: Say,
        times: SweepTimes = SweepTimes(),
    ) -> None:
        self._client = client
        self._sweep = sweep
        self._trials = trials
        self._say = say
        self._times = times
        self._plan = SweepPlan(
            trials=len(trials),
            minimise=sweep.spec.objective.mode == "min",
            rungs=sweep.spec.rungs,
            factor=sweep.spec.factor,
        )
        self._array = ""
        self._records: dict[int, JobRecord] = {}
        self._curves: dict[int, StepCurve] = {}
        self._at_rung: dict[int, dict[int, float]] = {}
        self._measured: set[int] = set()  # those that have ended, and whose curve is complete
        self._told: set[str] = set()

    async def run(self, *, resume: bool) -> SweepResult:
        """Run the sweep to its end. `resume`: go on with its jobs that exist.

        Raises:
            Conflict: The sweep has jobs already, and `resume` is not set.
            BadInput: No trial reports the objective.
        """
        await self._find()
        if self._records and not resume:
            raise Conflict(
                f"sweep {self._sweep.name} ({self._sweep.digest}) has {len(self._records)} jobs already: "
                "--resume goes on with them; --name or another `seed:` makes another sweep"
            )
        if not self._records:
            await self._submit()
        while True:
            try:
                if await self._once():
                    return self.result()
            except Unavailable as error:
                self._say_once(f"no gateway answers ({error.text}); trying again")
                await asyncio.sleep(self._times.away_s)
            await asyncio.sleep(self._times.poll_s)

    async def cancel(self) -> int:
        """Cancel the sweep's jobs that have not ended; return how many."""
        await self._find()
        going = [record for record in self._records.values() if record.state not in ENDED]
        if going:
            await self._client.cancel_array(self._array, reason=f"sweep {self._sweep.name} was cancelled")
        return len(going)

    def result(self) -> SweepResult:
        """The result so far."""
        sweep = self._sweep
        return result_of(
            sweep.name, sweep.digest, sweep.spec.objective, self._trials, self._records, self._curves
        )

    # --- what is there ----------------------------------------------------------------------------------
    async def _find(self) -> None:
        """Finds the sweep's array by its name, among those of this user; of several, the newest."""
        user = (await self._client.whoami()).user
        for record in await self._client.jobs(user=user):
            place = record.array
            if place is None or array_name(record.spec.name) != self._sweep.array_name:
                continue
            if place.array != self._array:
                self._array, self._records = place.array, {}
            self._records[place.index] = record

    async def _submit(self) -> None:
        """Submits all trials, or none, as one array: the queue lets so many run at a time."""
        key = f"sweep-{self._sweep.array_name}"  # submitted again after a crash, it is the same array
        spec = array_spec(self._sweep, self._trials)
        try:
            array = await self._client.submit_array(spec, idempotency_key=key, code=self._sweep.code)
        except OverQuota as error:
            raise OverQuota(f"{error.text}: max_parallel of the sweep", **error.fields) from None
        self._array = array.array
        await self._find()
        for member in array.members:
            if member.index not in self._records:  # the gateway has not heard of it yet
                self._records[member.index] = await self._client.job(member.job)
        self._say(f"{array.array}: {array.size} trials, {self._sweep.spec.max_parallel} at a time")

    async def _once(self) -> bool:
        """Looks at the jobs and does what is due; returns whether the sweep is over."""
        there = {member.index: member.state for member in (await self._client.array(self._array)).members}
        for trial, record in list(self._records.items()):
            waits = there.get(trial) is JobState.QUEUED is record.state
            if record.state not in ENDED and not self._rests(record) and not waits:
                self._records[trial] = await self._client.job(record.job)
                self._tell(trial)
            await self._measure(trial)
        self._check_objective()
        views = {trial: self._view(trial) for trial in self._records}
        decision = decide(self._plan, views)
        for action in decision.actions:
            await self._carry_out(action)
        return decision.over

    def _rests(self, record: JobRecord) -> bool:
        return record.state is JobState.PARKED and bool(record.held) and record.ends_as is None

    async def _measure(self, trial: int) -> None:
        """Fetches the trial's curve if it has passed a rung, or ended, since the last time."""
        record = self._records[trial]
        known = self._at_rung.setdefault(trial, {})
        state = _outcome(record)
        ended = state in ENDED
        due = [rung for rung in self._plan.rungs if rung not in known and (ended or rung <= record.step)]
        if trial in self._measured or not (due or ended):
            return
        curve = await self._client.curve(record.job, points=20_000)
        objective = self._sweep.spec.objective
        for rung in due:
            value = objective_at(curve, rung, objective)
            if value is None and state is JobState.DONE and record.step <= rung:
                value = last_objective(curve, objective)  # it ended by itself, earlier
            if value is not None:
                known[rung] = value
        self._curves[trial] = curve
        if ended:
            self._measured.add(trial)

    def _check_objective(self) -> None:
        metric = self._sweep.spec.objective.metric
        for trial, record in self._records.items():
            curve = self._curves.get(trial)
            if _outcome(record) is not JobState.DONE or curve is None:
                continue
            if last_objective(curve, self._sweep.spec.objective) is None:
                names = ", ".join(reported([curve]))
                raise BadInput(
                    f"{self._sweep.file}: objective.metric: {metric} was never reported by {record.job}, "
                    f"which is done; it reported {names} (--cancel ends the sweep's jobs)"
                )

    def _view(self, trial: int) -> TrialView:
        record = self._records[trial]
        own = bool(record.held) and self._reason in record.held
        return TrialView(state=_outcome(record), at_rung=self._at_rung.get(trial, {}), stopped=own)

    # --- what is done -----------------------------------------------------------------------------------
    @property
    def _reason(self) -> str:
        return f"sweep {self._sweep.name}-{self._sweep.digest}"

    async def _carry_out(self, action: SweepAction) -> None:
        trial, reason = action.trial, f"{self._reason}: {action.reason}"
        job = self._records[trial].job
        try:
            if action.kind == "park":
                self._records[trial] = await self._client.park(job, reason=reason)
            elif action.kind == "resume":
                self._records[trial] = await self._client.resume(job)
            else:
                self._records[trial] = await self._client.cancel(job, reason=reason)
        except (Conflict, NotFound):  # it ended meanwhile, or changed: the next look shows how
            self._records[trial] = await self._client.job(job)
            return
        self._say(f"trial {trial} {job}: {action.reason}")

    def _tell(self, trial: int) -> None:
        record = self._records[trial]
        if record.state is JobState.RUNNING:
            values = ", ".join(f"{path}={value}" for path, value in self._trials[trial].values.items())
            self._say_once(f"trial {trial} {record.job}: {values}")
        if record.state in ENDED:
            self._say(f"trial {trial} {record.job}: {record.state}, step {record.step}: {record.reason}")
        elif record.held and self._reason not in record.held:
            self._say_once(f"trial {trial} {record.job}: {record.held}; the sweep goes on when it is resumed")

    def _say_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._say(line)


def _outcome(record: JobRecord) -> JobState:
    """The state of a job, or how it ends, where that is certain already."""
    return record.ends_as or record.state
