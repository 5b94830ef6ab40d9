"""Keeps what a module has learnt on the bus, and brings it back after a start (ADR-0100).

The orchestrator writes for the module, by compare-and-set: of two processes of one version, one is the
writer. The other learns on without keeping it, and tries again when the writer may have gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.handlers import Subscription
from policies.kit.policy import Policy
from schemas.envelope import Envelope
from schemas.errors import BadInput, Conflict, DmscError
from schemas.learnt_state import KeepLearnt, LearntQuery, LearntSource, LearntState, digest_of

log = get_logger("module")


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTimes:
    """When a module's state is kept, in seconds."""

    every_s: float = 10.0
    """From one write to the next, where it suggests nothing meanwhile: a killed module forgets at most
    what it learnt since."""

    retry_s: float = 10.0
    """Until a state is sent again after nobody answered."""

    takeover_s: float = 60.0
    """Until a process that is not the writer tries again to be it: the writer may have gone."""


class StateKeeper:
    """The learnt state of one module on the bus.

    Args:
        bus: The module's connection.
        policy: The policy that learns.
        owner: The user in whose name it suggests.
        times: When it is kept.
        answer_s: Seconds that the orchestrator may take to answer.
        hurry: Called when a state comes that the policy has to go on from (`take_pending`).
    """

    def __init__(
        self,
        bus: Bus,
        policy: Policy,
        owner: str,
        times: StateTimes,
        *,
        answer_s: float,
        hurry: Callable[[], None],
    ) -> None:
        self._times = times
        self._pending: LearntState | None = None
        self._hurry = hurry
        self.revision = 0
        """The revision that is kept of this version; 0: none."""
        self._bus = bus
        self._policy = policy
        self._owner = owner
        self._answer_s = answer_s
        self._known = False
        self._kept = ""
        self._misfit = ""
        self._again_at = 0.0
        self._reported: set[str] = set()

    def take_pending(self) -> LearntState | None:
        """A state that the policy has to go on from, once: a person has replaced the kept one, or another
        process of this version has written on."""
        pending, self._pending = self._pending, None
        return pending

    def _make_pending(self, state: LearntState) -> None:
        self._pending = state
        self._hurry()

    @property
    def enabled(self) -> bool:
        return self._policy.state_version > 0

    async def subscribe(self) -> Subscription:
        """Learns from now on that a person has replaced the state."""
        return await self._bus.subscribe(
            subjects.LEARNT_STATE, self._replaced, owner=self._owner, module=self._policy.name
        )

    async def load(self) -> LearntState | None:
        """The state to go on from; None: nothing is kept, it does not fit, or nobody answers.

        A state that does not fit is named in one line, and kept aside when the next one is written.
        """
        policy = self._policy
        query = LearntQuery(
            owner=self._owner,
            module=policy.name,
            version=policy.version,
            schema_version=policy.state_version,
        )
        try:
            reply = await self._bus.command(
                subjects.LEARNT_QUERY,
                query,
                deadline_s=self._answer_s,
                owner=self._owner,
                module=policy.name,
            )
        except DmscError as error:
            self._say("learnt state not read, going on without", error.text)
            return None
        self._known = True
        state = reply.states[0] if reply.states else None
        if state is None or state.version != policy.version:
            self.revision, self._kept = 0, ""  # none of this version is kept (any more)
        else:
            self.revision = state.revision
        if state is None:
            return None
        if state.schema_version != policy.state_version:
            self.refuse(
                state, f"schema version {state.schema_version}, this module reads {policy.state_version}"
            )
            return None
        if (state.owner, state.module) != (self._owner, policy.name):
            self.refuse(state, f"it is of {state.owner}'s {state.module}")
            return None
        if state.damage:
            self.refuse(state, state.damage)
            return None
        return state

    def refuse(self, state: LearntState, reason: str) -> None:
        """Says that a kept state does not fit; it is put aside when the next one is written."""
        self._misfit = reason[:400]
        log.warning(
            "learnt state does not fit, it is kept aside and the module starts empty",
            module=self._policy.name,
            version=state.version,
            revision=state.revision,
            reason=reason,
        )

    def restored(self, state: LearntState) -> None:
        """The policy goes on from this state."""
        if state.version == self._policy.version:
            self.revision, self._kept = state.revision, state.data
        log.info(
            "learnt state restored",
            module=self._policy.name,
            version=state.version,
            revision=state.revision,
            digest=state.digest[:12],
            source=state.source.value,
            age_s=round(time.time() - state.at, 1),
        )

    async def keep(self, data: str, through: float) -> None:
        """Keeps a state, if it is another one than before. `through`: as in `LearntState`."""
        now = time.time()
        if data == self._kept or now < self._again_at or self._pending is not None:
            return
        if not self._known and await self._missed():
            return
        state = LearntState(
            owner=self._owner,
            module=self._policy.name,
            version=self._policy.version,
            schema_version=self._policy.state_version,
            revision=self.revision + 1,
            digest=digest_of(data),
            data=data,
            at=now,
            through=through,
            by=self._bus.sender.incarnation,
        )
        message = KeepLearnt(
            owner=self._owner,
            module=self._policy.name,
            state=state,
            expected=self.revision,
            misfit=self._misfit,
        )
        try:
            await self._bus.command(
                subjects.KEEP_LEARNT,
                message,
                deadline_s=self._answer_s,
                owner=self._owner,
                module=self._policy.name,
            )
        except Conflict as error:
            await self._overtaken(state, error.text)
        except DmscError as error:
            self._again_at = now + self._times.retry_s
            self._say("learnt state not kept, going on", error.text)
            if isinstance(error, BadInput):
                self._kept = data  # the same one is refused again
        else:
            self.revision, self._kept, self._misfit = state.revision, data, ""
            self._reported.clear()

    async def _missed(self) -> bool:
        """Whether a state is kept that could not be read at the start: the policy goes on from that one."""
        kept = await self.load()
        if kept is not None:
            self._make_pending(kept)
        if not self._known:
            self._again_at = time.time() + self._times.retry_s
        return kept is not None or not self._known

    async def _overtaken(self, mine: LearntState, reason: str) -> None:
        """Another state is kept than expected: by this process, by a person, or by another process."""
        kept = await self.load()
        if kept is None or kept.version != mine.version:
            self._again_at = time.time() + self._times.retry_s
            return
        if kept.by == mine.by and kept.source is LearntSource.LEARNT:
            self._kept = kept.data  # the answer to an earlier write was lost
            return
        self._make_pending(kept)
        if kept.source is LearntSource.LEARNT:
            self._again_at = time.time() + self._times.takeover_s
            self._say("another process of this module keeps what it learns, this one does not", reason)

    async def _replaced(self, state: LearntState, envelope: Envelope) -> None:
        if state.version != self._policy.version or state.source is LearntSource.LEARNT:
            return
        if state.revision <= self.revision:
            return
        self.revision = state.revision
        if state.damage or (state.data and state.schema_version != self._policy.state_version):
            self.refuse(state, state.damage or f"schema version {state.schema_version}")
        else:
            self._make_pending(state)

    def _say(self, what: str, reason: str) -> None:
        """One line in the log; not again until a state was kept."""
        if what not in self._reported:
            self._reported.add(what)
            log.warning(what, module=self._policy.name, reason=reason)
