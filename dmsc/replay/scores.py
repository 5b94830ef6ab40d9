"""Scores of modules: read from the mesh's stream as modules published them, or computed from a record."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from bus import subjects
from dmsc.replay.recordings import Archive, connected, open_recording
from dmsc.replay.session import Key, Session
from dmsc.state.settings import BusAddress
from schemas.errors import BadInput, BusUnreachable, NotFound
from schemas.policy import PolicyScore, PolicySwitch


@dataclass(slots=True)
class Scores:
    """Scores by (module, version), and switches of versions as (seconds since the epoch, switch)."""

    by_version: dict[Key, list[PolicyScore]] = field(default_factory=dict)
    switches: list[tuple[float, PolicySwitch]] = field(default_factory=list)

    def of(self, module: str) -> Scores:
        """The scores of one module. Raises `NotFound` if it has none."""
        if all(key[0] != module for key in self.by_version):
            known = ", ".join(sorted({key[0] for key in self.by_version})) or "none"
            raise NotFound(f"there are no scores of {module}; there are of: {known}", module=module)
        return Scores(
            {key: scores for key, scores in self.by_version.items() if key[0] == module},
            [(at, switch) for at, switch in self.switches if switch.module == module],
        )


async def live_scores(address: BusAddress, jobs: Sequence[str] = ()) -> Scores:
    """All scores and switches in the mesh's streams."""
    scores = Scores()
    async with connected(address) as bus:
        async with aclosing(bus.history(subjects.POLICY_SCORE)) as items:
            async for item in items:
                score = item.message
                if isinstance(score, PolicyScore) and (not jobs or score.job in jobs):
                    scores.by_version.setdefault((score.module, score.version), []).append(score)
        async with aclosing(bus.history(subjects.POLICY_SWITCH)) as items:
            async for item in items:
                if isinstance(item.message, PolicySwitch):
                    scores.switches.append((item.envelope.sent_at, item.message))
    return scores


async def recorded_scores(run: str, address: BusAddress | None, archive: Archive) -> Scores:
    """Compute the scores of all suggestions in a record, whether they were published then or not."""
    session = Session(None)
    scores = Scores()
    async with open_recording(run, address, archive) as recording:
        async for frame in recording.frames:
            session.feed(frame)
            if frame.row is subjects.POLICY_SWITCH:
                message, _ = frame.open()
                assert isinstance(message, PolicySwitch)
                scores.switches.append((frame.at, message))
    scores.by_version = session.finish().scores
    return scores


async def find_scores(
    run: str | None, address: BusAddress | None, archive: Archive, jobs: Sequence[str] = ()
) -> Scores:
    """The scores of a recorded run, or of the mesh at `address` if no run is named.

    Raises:
        BadInput: Both a run and jobs are named; a record has only one job.
        BusUnreachable: No run was named and no mesh runs.
    """
    if run is not None:
        if jobs:
            raise BadInput("--job chooses among a mesh's jobs; a record has only its own")
        return await recorded_scores(run, address, archive)
    if address is None:
        raise BusUnreachable("no mesh runs here: start one with `dmsc up`, or score a record with --run FILE")
    return await live_scores(address, jobs)
