"""One job that is followed: what was said of it on the bus, its processes, and what it came to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from bus import subjects
from bus.subject_row import Subject
from bus.tap.live_tap import Tap
from bus.tap.message import TappedMessage
from entities.orchestrator.job_state.context import StepTimes
from schemas.base import Message
from schemas.job import JobEvent, JobRecord, JobSpec, JobState, StepResult
from schemas.registry import ServiceRecord
from schemas.step import Member, StepStatus, StepStatusReply
from tests.integration.mesh.own_mesh import Witness
from tests.integration.mesh.pass_gates import Gates, Hold
from tests.patience import PATIENCE_S
from tests.waiting import beside, eventually

TAPPED = 1_000_000
NO_ANSWER = f"within {StepTimes().state_s:g} s"
"""Said where an order's deadline was what ended it."""


@dataclass(frozen=True, slots=True)
class Said:
    """A message about the job. `sid`: whom or whose, as the subject names it; `answer`: to a request."""

    row: Subject
    sid: str
    sender: str
    message: Any
    answer: bool


@dataclass(eq=False)
class FollowedJob:
    """A running job. Units are named without the job's id: `s0-r1`, `data-r0`."""

    client: Witness
    gates: Gates
    spec: JobSpec
    expected: str
    """SHA-256 of the weights."""
    job: str = ""
    said: dict[Subject, list[Said]] = field(default_factory=dict)
    """By row, in order."""
    records: dict[str, dict[str, ServiceRecord]] = field(default_factory=dict)
    """By SID and incarnation, the latest of each; incarnations in the order in which they came."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    # --- what is seen ---------------------------------------------------------------------------------
    def note(self, tapped: TappedMessage) -> None:
        message, row = tapped.message, tapped.row
        if message is None or row is None or tapped.envelope is None:
            return
        if isinstance(message, ServiceRecord) and message.job is not None and row is subjects.REGISTRY_RECORD:
            self.records.setdefault(message.sid, {})[message.incarnation] = message
        sid = tapped.tokens.get("sid", "")
        said = Said(row, sid, tapped.envelope.sender.name, message, bool(tapped.answers))
        self.said.setdefault(row, []).append(said)
        self._news.set()

    def sid(self, unit: str) -> str:
        return f"{self.job}-{unit}"

    def of(
        self, row: Subject, unit: str = "", *, answer: bool = False, step: int | None = None
    ) -> list[Message]:
        """Messages of a row, addressed to (or answered by) a unit."""
        return [
            said.message
            for said in self.said.get(row, ())
            if said.answer is answer
            and (not unit or said.sid == self.sid(unit))
            and getattr(said.message, "job", self.job) == self.job
            and (step is None or getattr(said.message, "step", None) == step)
        ]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Looks again whenever something new was said."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pytest.fail(f"{what}: not within {PATIENCE_S:.0f} s")

    async def until_said(
        self, row: Subject, unit: str = "", *, answer: bool = False, step: int | None = None
    ) -> Any:
        """The first such message."""
        kind = "answer to " if answer else ""
        where = f" of step {step}" if step is not None else ""
        await self.until(
            lambda: bool(self.of(row, unit, answer=answer, step=step)), f"{kind}{row.name} {unit}{where}"
        )
        return self.of(row, unit, answer=answer, step=step)[0]

    # --- processes ------------------------------------------------------------------------------------
    def record(self, unit: str, number: int = -1) -> ServiceRecord:
        """Of its newest incarnation, or another one."""
        return list(self.records[self.sid(unit)].values())[number]

    def pid(self, unit: str) -> int:
        return self.record(unit).endpoint.pid

    def member(self, unit: str) -> Member:
        return Member(sid=self.sid(unit), incarnation=self.record(unit).incarnation)

    def units(self) -> list[str]:
        return sorted(sid.removeprefix(f"{self.job}-") for sid in self.records if sid.startswith(self.job))

    def pids(self, unit: str) -> list[int]:
        """Of all its incarnations."""
        return [record.endpoint.pid for record in self.records[self.sid(unit)].values()]

    def agent(self, unit: str) -> int:
        """The process of the node agent that a unit runs under."""
        return self.client.mesh.processes[f"agent-{self.record(unit).endpoint.cluster}"].pid

    def kill(self, *units: str) -> None:
        """All of them live until now."""
        pids = [self.pid(unit) for unit in units]
        for pid in pids:
            assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def hold(self, *units: str, direction: str, step: int, before: int = 0) -> Hold:
        """Their passes of this step wait at the gate."""
        pids = [self.pid(unit) for unit in units]
        return self.gates.hold(*pids, direction=direction, step=step, before=before)

    async def all_held(self, *units: str, step: int) -> None:
        """Returns once each of them waits in a forward pass of this step."""
        holds = [self.hold(unit, direction="forward", step=step) for unit in units]
        for hold in holds:
            await hold.reached()

    async def held_alone(self, unit: str, step: int) -> Hold:
        """Returns once the unit waits in a backward pass of this step, of which all else is done."""
        hold = self.hold(unit, direction="backward", step=step)
        await hold.reached()
        await self.until_all_but_held(unit, step)
        return hold

    @contextlib.contextmanager
    def frozen(self, *pids: int) -> Iterator[None]:
        """Stopped from here on; whoever lives at the end goes on."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in reversed(pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    # --- where a unit is ------------------------------------------------------------------------------
    async def status(self, unit: str, step: int) -> StepStatusReply:
        """The unit's own account of a step."""
        attempt = max((message.attempt for message in self.of(subjects.STEP_BEGIN)), default=0)
        query = StepStatus(job=self.job, epoch=1, step=step, attempt=attempt)
        reply = await self.client.bus.request(subjects.STEP_STATUS, query, job=self.job, sid=self.sid(unit))
        assert isinstance(reply, StepStatusReply)
        return reply

    async def until_open(self, unit: str, step: int) -> None:
        """The unit has applied the steps before, by its own account."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (await self.status(unit, step)).version < step:
                    self._news.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._news.wait(), 0.2)
        except TimeoutError:
            pytest.fail(f"step {step} open at {unit}: not within {PATIENCE_S:.0f} s")

    def applied(self, unit: str, version: int) -> bool:
        """The unit has said that it is at this version, or a later one."""
        answers = self.of(subjects.STEP_COMMIT, unit, answer=True)
        return any(getattr(answer, "version", -1) >= version for answer in answers)

    def claimed(self, unit: str, step: int) -> set[int]:
        """Microbatches that the unit's newest incarnation has said to be in its sum."""
        member = self.member(unit)
        return {
            claim.microbatch
            for claim in self.of(subjects.STEP_CLAIM, unit, step=step)
            if claim.owner == member
        }

    async def until_all_but_held(self, held: str, step: int) -> None:
        """Every microbatch of a stage is in the sum of another replica, or waits at this one, `held`.

        That one is asked again and again: its last microbatch may reach it after the others have summed
        theirs, and nobody says so.
        """
        stage = held.split("-")[0]
        others = [unit for unit in self.units() if unit.startswith(f"{stage}-") and unit != held]

        async def complete() -> bool:
            assert not self.claimed(held, step)
            summed = sum(len(self.claimed(unit, step)) for unit in others)
            waiting = (await self.status(held, step)).waiting
            return summed > 0 and summed + len(waiting) == self.spec.training.microbatches

        await eventually(complete, f"{', '.join(others)} sum all that is not {held}'s")

    # --- the end --------------------------------------------------------------------------------------
    async def check(self, *, lost: Iterable[str] = (), back: bool = False) -> JobRecord:
        """DONE, with the undisturbed job's weights; every step once, in order; nothing lost, nothing doubled.

        Args:
            lost: units that were lost, and they alone.
            back: all went back to a checkpoint in between: steps behind it were committed again.
        """
        async with asyncio.timeout(PATIENCE_S):
            record = await self.client.ended(self.job)
        events = [event async for event in self.client.events(self.job)]
        began = events[0].at
        history = [f"{event.at - began:.2f} {event.kind} {event.text}" for event in events if event.text]
        print("\n".join(history))
        assert record.state is JobState.DONE, (record.reason, history)
        assert record.weights is not None
        # a loss is noticed, not waited for
        assert not [line for line in history if NO_ANSWER in line], history
        results = [event.result for event in events if event.result is not None]
        self._check_steps(results, events, back=back)
        assert record.weights.sha256 == self.expected, history
        ran = {unit: self.pids(unit) for unit in self.units()}
        others = {unit: pids for unit, pids in ran.items() if unit not in set(lost)}
        assert all(len(set(pids)) == 1 for pids in others.values()), (ran, history)
        assert record.epoch == 1
        if not back:
            assert (record.recoveries > 0) is bool(set(lost)), history
        return record

    def _check_steps(self, results: list[StepResult], events: list[JobEvent], *, back: bool) -> None:
        training = self.spec.training
        expected = list(range(training.steps))
        if back:
            texts = [event.text for event in events if "all back to step" in event.text]
            assert len(texts) == 1, [event.text for event in events if event.kind == "recovery"]
            version = int(texts[0].rsplit(" ", 1)[1])
            pairs = itertools.pairwise(results)
            reached = next(one.step for one, after in pairs if after.step != one.step + 1)
            expected = [*range(reached + 1), *range(version, training.steps)]
        told = [event.text for event in events if event.text]
        assert [result.step for result in results] == expected, told
        every = training.microbatches * self.spec.parallel.stages
        assert all(sum(result.shares.values()) == every for result in results), results


@contextlib.asynccontextmanager
async def following(
    client: Witness, gates: Gates, spec: JobSpec, expected: str
) -> AsyncIterator[FollowedJob]:
    """A job that was submitted, under eyes that were open before; all its units are known.

    Behind the first step it computes nothing before the block waits for something.
    """
    followed = FollowedJob(client, gates, spec, expected)
    async with Tap(client.bus, [">", "$KV.>"], replies=True, limit=TAPPED) as tap:

        async def listen() -> None:
            async for tapped in tap:
                followed.note(tapped)

        async with beside(listen()):
            try:
                gates.close()
                followed.job = await client.submit(spec)
                await followed.until_said(subjects.STEP_BEGIN)
                gates.begin()
                yield followed
            finally:
                gates.open_all()
        assert tap.dropped == 0
