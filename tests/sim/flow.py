"""Steps of one job with given service times, in the simulator of `dmsc simulate`, without overheads.

A microbatch takes a third of its service time forward, the rest backward, as padded devices do. It measures
steps, bubbles and shares, so that a figure of `benchmarks/routing.py` can be looked at without a mesh, and
within milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dmsc.simulation.instances import StageInstance
from dmsc.simulation.scenarios.scenario import Overheads, Scenario
from dmsc.simulation.world import World

NO_OVERHEADS = dict.fromkeys(Overheads.model_fields, 0.0)


@dataclass(kw_only=True)
class Step:
    """What one step took, in seconds, and who did it."""

    seconds: float
    shares: Counter[str]
    busy_s: dict[str, float]


class Flow:
    """One job. `services[s][r]`: seconds per microbatch of replica r of stage s."""

    def __init__(
        self,
        services: Sequence[Sequence[float]],
        *,
        microbatches: int,
        algorithm: str = "expected-completion",
        data: int = 1,
        hop_s: float = 0.003,
        noise: float = 0.02,
        seed: int = 0,
    ) -> None:
        def time(part: float) -> dict[str, object]:
            drawn = {"distribution": "gamma", "cv": noise} if noise else {}
            return {"mean_ms": 1e3 * part, **drawn}

        stages = [
            {
                "replicas": len(replicas),
                "forward_ms": time(1 / 3),
                "backward_ms": time(2 / 3),
                "speeds": [1 / seconds for seconds in replicas],
            }
            for replicas in services
        ]
        job = {
            "name": "j",
            "steps": 1000,
            "warmup_steps": 0,
            "microbatches": microbatches,
            "stages": stages,
            "data_instances": data,
        }
        scenario = {
            "name": "flow",
            "links": [{"between": ["a", "a"], "latency_ms": 0}],
            "jobs": [job],
            "routing": {"algorithm": algorithm, "every_s": 1e6},
            "overheads": NO_OVERHEADS | {"hop_ms": 1e3 * hop_s},
        }
        self.microbatches = microbatches
        self._world = World(Scenario.model_validate(scenario), seed, Path())
        self.job = self._world.jobs["j"]
        self._world.kernel.step()

    @property
    def stages(self) -> dict[str, StageInstance]:
        return {sid: one for sid, one in self.job.by_sid.items() if isinstance(one, StageInstance)}

    def set(self, sid: str, seconds: float) -> None:
        """From now on the instance takes so long for a microbatch."""
        self.stages[sid].speed = 1 / seconds

    def step(self, number: int) -> Step:
        """Runs one step to its end."""
        progress = self.job.progress
        busy, shares = {sid: one.busy_s for sid, one in self.stages.items()}, progress.shares.copy()
        while len(progress.steps) <= number:
            assert self.job.kernel.step(), "nothing is left to happen"
        done = progress.steps[number]
        return Step(
            seconds=done.ended_s - done.began_s,
            shares=progress.shares - shares,
            busy_s={sid: one.busy_s - busy[sid] for sid, one in self.stages.items()},
        )

    def bound(self) -> float:
        """Microbatches per second that the slowest stage can do: min over stages Σ speed."""
        speeds: Counter[int] = Counter()
        for one in self.stages.values():
            speeds[one.stage] += one.speed
        return min(speeds.values())

    def efficiency(self, steps: range) -> list[float]:
        """Of each step: what was done per second, as a part of `bound`."""
        return [self.microbatches / self.step(number).seconds / self.bound() for number in steps]
