"""Keeps what modules have learnt: one writer per state, by compare-and-set (ADR-0100).

The bucket `learnt` is the truth and nothing of it is in memory, so a new orchestrator goes on at once. Each
state that is kept is also published on the stream LEARNT: a recorded run holds the states that suggestions
were made from, and a running module learns there that a person has replaced its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import KeyValueEntry
from entities.orchestrator.policy.module_reputation import Key
from schemas import names
from schemas.envelope import Envelope
from schemas.errors import BadInput, Conflict, NotFound, Overloaded, OverQuota
from schemas.learnt_state import (
    DirectLearnt,
    KeepLearnt,
    LearntQuery,
    LearntSource,
    LearntState,
    LearntStates,
    canonical_json,
    digest_of,
    parsed_json,
)
from schemas.module_status import version_token
from schemas.policy import ModuleState

log = get_logger("orchestrator")

CURRENT, ASIDE = "current", "aside"
MOST_VERSIONS = 16
"""Versions of a module whose states are kept: the last that wrote, and those that run."""
MOST_OF_OWNER = 64
"""States that are kept of all modules of one user; of the mesh's own, any number."""
KEEPS_PER_S = 4.0
"""Most states a second that are kept of one module, over a long time: it suggests twice a second at most."""
KEEPS_AT_ONCE = 8


class KeepRates:
    """How often each module may still have its state kept (token bucket). Pure."""

    def __init__(self) -> None:
        self._levels: dict[tuple[str, str], tuple[float, float]] = {}

    def wait_s(self, owner: str, module: str, now: float) -> float:
        """Seconds until it may; 0: now, and that is counted."""
        level, at = self._levels.get((owner, module), (float(KEEPS_AT_ONCE), now))
        level = min(float(KEEPS_AT_ONCE), level + max(0.0, now - at) * KEEPS_PER_S)
        wait_s = 0.0 if level >= 1 else (1 - level) / KEEPS_PER_S
        self._levels[owner, module] = (level if wait_s else level - 1, now)
        return wait_s


def entries_to_forget(
    states: Sequence[LearntState], state: LearntState, running: Container[Key]
) -> list[LearntState]:
    """The states that make room for one more: those written longest ago, of versions that do not run. Pure.

    Args:
        states: All that are kept of the owner, current ones.
        state: The one more.
        running: The versions that run, by module and version.

    Raises:
        OverQuota: There is no room, since all others run.
    """
    forgotten: list[LearntState] = []

    def make_room(among: Sequence[LearntState], most: int, whose: str) -> None:
        excess = len(among) + 1 - most
        idle = [one for one in among if (one.module, one.version) not in running]
        if excess > len(idle):
            raise OverQuota(
                f"{state.module} {state.version}: {len(among) - len(idle)} running versions of {whose} "
                f"have a state, {most} are allowed; end some"
            )
        forgotten.extend(sorted(idle, key=lambda one: one.at)[: max(0, excess)])

    make_room([one for one in states if one.module == state.module], MOST_VERSIONS, state.module)
    if state.owner != names.MESH:
        rest = [one for one in states if one not in forgotten]
        make_room(rest, MOST_OF_OWNER, f"{state.owner}'s modules")
    return forgotten


class LearntStateService:
    """Serves modules' learnt states during one term.

    Args:
        bus: The orchestrator's connection.
        standings: The states of all running versions of modules, by name and version.
        owner_of: The owner of a version of a module.
    """

    def __init__(
        self, bus: Bus, standings: Callable[[], dict[Key, ModuleState]], owner_of: Callable[[str, str], str]
    ) -> None:
        self._bus = bus
        self._standings = standings
        self._owner_of = owner_of
        self._bucket = bus.bucket(subjects.LEARNT_RECORD)
        self._rates = KeepRates()

    async def query(self, message: LearntQuery, envelope: Envelope) -> LearntStates:
        """The state that a starting module goes on with; none if nothing is kept.

        Of its own version, whatever its schema: a misfit is the module's to say. Without one, the last state
        of another version with the same schema.
        """
        own = await self._current(message.owner, message.module, message.version)
        if own is not None:
            return LearntStates(states=(own.message,))
        entries = await self._bucket.entries(owner=message.owner, module=message.module, place=CURRENT)
        alike = [
            entry.message
            for entry in entries
            if entry.message.schema_version == message.schema_version and not entry.message.damage
        ]
        last = max(alike, key=lambda state: (state.at, state.version), default=None)
        return LearntStates(states=() if last is None else (last,))

    async def keep(self, message: KeepLearnt, envelope: Envelope) -> LearntState:
        """Keeps a module's state; repeated, it changes nothing.

        Raises:
            BadInput: It is damaged, too large, or not the revision after the expected one.
            NotFound: No such version of the owner's is registered (yet).
            Overloaded: It comes too often; try again after `retry_after_s`.
            OverQuota: The owner has too many states of running versions.
            Conflict: Another revision is kept than the expected one.
        """
        state = message.state
        if state.damage:
            raise BadInput(f"{state.module} {state.version}: {state.damage}", module=state.module)
        if state.revision != message.expected + 1:
            raise BadInput(f"{state.module}: revision {state.revision} does not follow {message.expected}")
        known = (state.module, state.version) in self._standings()
        if not known or self._owner_of(state.module, state.version) != state.owner:
            raise NotFound(
                f"{state.module} {state.version}: no such module of {state.owner}'s is registered",
                module=state.module,
            )
        wait_s = self._rates.wait_s(state.owner, state.module, time.monotonic())
        if wait_s:
            raise Overloaded(
                f"{state.module}: its state is kept at most {KEEPS_PER_S:g} times a second",
                module=state.module,
                retry_after_s=wait_s,
            )
        present = await self._current(state.owner, state.module, state.version)
        if present is not None and present.message == state:
            return state  # asked again
        revision = 0 if present is None else present.message.revision
        if revision != message.expected:
            kept = f"revision {revision}" + ("" if present is None else f" by {present.message.by}")
            raise Conflict(
                f"{state.module} {state.version}: {kept} is kept, not {message.expected}", module=state.module
            )
        if message.misfit and present is not None:
            await self._put_aside(present.message, state, message.misfit)
        await self._write(state, present)
        return state

    async def direct(self, message: DirectLearnt, envelope: Envelope) -> LearntStates:
        """Shows a module's states, or replaces one for a person; a running module takes it over at once.

        Those of the owner whose module runs come first; of a module that was retired they stay within reach.

        Raises:
            NotFound: Nothing is kept, and no such version runs.
            BadInput: Several versions, or modules of several owners, have a state and it is not said whose is
                meant; or the data are no plain data.
        """
        if message.reset or message.data is not None:
            await self._replace(message, await self._owner(message))
        entries = await self._bucket.entries(module=message.module)
        wanted = None if message.version is None else version_token(message.version)
        states: dict[str, list[LearntState]] = {CURRENT: [], ASIDE: []}
        first = self._owner_of(message.module, message.version or "")

        def order(entry: KeyValueEntry) -> tuple[bool, str, str]:
            return entry.message.owner != first, entry.message.owner, entry.message.version

        for entry in sorted(entries, key=order):
            if wanted in (None, version_token(entry.message.version)):
                states[entry.key.rpartition(".")[2]].append(entry.message)
        return LearntStates(states=tuple(states[CURRENT]), aside=tuple(states[ASIDE]))

    async def _owner(self, message: DirectLearnt) -> str:
        """Whose state is replaced: that of the module that runs, else the only one that is kept."""
        module, version = message.module, message.version
        if any(name == module and version in (None, running) for name, running in self._standings()):
            return self._owner_of(module, version or "")
        entries = await self._bucket.entries(module=module, place=CURRENT)
        owners: set[str] = {
            entry.message.owner for entry in entries if version in (None, entry.message.version)
        }
        if len(owners) > 1:
            raise BadInput(
                f"{module}: modules of {', '.join(sorted(owners))} have left a state; run the one that is "
                "meant, or name a --version that only one of them had",
                module=module,
            )
        return owners.pop() if owners else self._owner_of(module, version or "")

    async def _replace(self, message: DirectLearnt, owner: str) -> None:
        version = await self._version(message, owner)
        data = "" if message.data is None else message.data
        if data:
            try:
                if canonical_json(parsed_json(data)) != data:
                    raise ValueError("it is not in canonical form")
            except ValueError as error:
                raise BadInput(f"{message.module}: the state is no canonical JSON: {error}") from None
        present = await self._current(owner, message.module, version)
        now = time.time()
        state = LearntState(
            owner=owner,
            module=message.module,
            version=version,
            schema_version=message.schema_version
            if data or present is None
            else present.message.schema_version,
            revision=1 if present is None else present.message.revision + 1,
            digest=digest_of(data),
            data=data,
            at=now,
            through=now,
            source=LearntSource.TRAINED if data else LearntSource.RESET,
            by=message.user,
            reason=message.reason,
        )
        if state.damage:  # its text may have fewer characters than bytes
            raise BadInput(f"{message.module}: {state.damage}", module=message.module)
        if present is not None and present.message.data:
            await self._put_aside(present.message, state, f"replaced by {message.user}")
        await self._write(state, present)
        log.info(
            "learnt state replaced", module=state.module, version=version, by=state.by, source=state.source
        )

    async def _version(self, message: DirectLearnt, owner: str) -> str:
        if message.version is not None:
            return message.version
        entries = await self._bucket.entries(owner=owner, module=message.module, place=CURRENT)
        versions: set[str] = {entry.message.version for entry in entries}
        versions |= {version for module, version in self._standings() if module == message.module}
        if not versions:
            raise NotFound(
                f"no module {message.module} runs, and nothing that it learnt is kept; name a --version",
                module=message.module,
            )
        if len(versions) > 1:
            raise BadInput(f"{message.module}: which version? there are {', '.join(sorted(versions))}")
        return versions.pop()

    async def _current(self, owner: str, module: str, version: str) -> KeyValueEntry | None:
        return await self._bucket.get(
            leader=True, owner=owner, module=module, version=version_token(version), place=CURRENT
        )

    async def _put_aside(self, former: LearntState, state: LearntState, reason: str) -> None:
        """Keeps the former state beside the one that takes its place, until the next one is put aside."""
        aside = former.model_copy(update={"reason": reason})
        await self._bucket.put(aside, **_tokens(state), place=ASIDE)
        log.warning("learnt state put aside", module=state.module, version=state.version, reason=reason)

    async def _write(self, state: LearntState, present: KeyValueEntry | None) -> None:
        if present is None:
            await self._make_room(state)
            await self._bucket.create(state, **_tokens(state), place=CURRENT)
        else:
            await self._bucket.update(state, revision=present.revision, **_tokens(state), place=CURRENT)
        await self._bus.publish(subjects.LEARNT_STATE, state, owner=state.owner, module=state.module)

    async def _make_room(self, state: LearntState) -> None:
        """Forgets what was written longest ago: nobody fills the disk by naming modules and versions."""
        of_module: dict[str, Any] = {"module": state.module} if state.owner == names.MESH else {}
        entries = await self._bucket.entries(owner=state.owner, place=CURRENT, **of_module)
        keys = {id(entry.message): entry.key.split(".") for entry in entries}
        states = [entry.message for entry in entries]
        for former in entries_to_forget(states, state, self._standings()):
            owner, module, version, _ = keys[id(former)]
            for place in (CURRENT, ASIDE):
                await self._bucket.delete(owner=owner, module=module, version=version, place=place)


def _tokens(state: LearntState) -> dict[str, Any]:
    return {"owner": state.owner, "module": state.module, "version": version_token(state.version)}
