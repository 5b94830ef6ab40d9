"""What routing by measured load is worth: throughput beside the bound min over stages Σ speed.

    python benchmarks/routing.py [--only unequal,random,change,bubble] [--rounds 3] [--seeds 20] [--json]

Devices are padded (`workers/models/padded.py`): a microbatch is mostly a wait, whose length a script of the
slot changes while the job runs, so that four devices of any speed fit on two cores. All sections run in one
mesh.

- `unequal`: one stage of four replicas, first equal, then one of them 4× slower: the default algorithm and
  `round-robin` in turn, every other round in reverse; the other algorithms in the first round. `round-robin`
  is the static equal split: it gives all the same number.
- `random`: speeds drawn from 1–8×, one draw per seed, all in one job.
- `change`: one of four becomes 4× slower in mid-run, and well again: each step beside the bound that holds
  then; when it was reported as slow, and whether anyone else was.
- `bubble`: a pipeline of four stages with one replica each: idle part beside (p-1)/(m+p-1).

An instance's speed is 1 / the median of what its claims say a microbatch took (forward plus backward), so
what its device does beside waiting is part of its speed; the transaction, the hops, and idle instances are
what is lost. A step ends with whole microbatches: the slow one of four does 1 in 13, and half a microbatch of
its own too many is 5 % of a step of 128. M is 256, so that this does not hide the result; a step then takes
three to four seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.harness.command import bench, command, say, some_of
from benchmarks.harness.emulation import EmulatedSlots, slots_of
from benchmarks.harness.figures import Figure, at_least, at_most
from benchmarks.harness.jobs import done, job
from benchmarks.harness.meshes import BenchMesh, new_folder, open_mesh
from bus.subjects import STEP_CLAIM
from dmsc.process.composition import node_name
from schemas.job import JobSpec
from schemas.routing import ALGORITHMS, DEFAULT_ALGORITHM
from schemas.step import MicrobatchClaim

STATIC = "round-robin"
BASE_MS = 24.0
"""What a device waits per microbatch at pace 1, forward plus backward."""
WARMUP = 2
PAD_MS = BASE_MS / 3
"""Per block: the wait forward, half of the one backward."""

EQUAL = (2.0, 2.0, 2.0, 2.0)
ONE_SLOW = (2.0, 2.0, 2.0, 8.0)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Paces of the replicas (by stage and replica), and for how many steps; `skip` come before those."""

    paces: tuple[float, ...]
    skip: int
    steps: int


@dataclass(kw_only=True)
class Run:
    """What a job did: seconds per step, and milliseconds per microbatch by step and instance."""

    job: str
    phases: Sequence[Phase]
    microbatches: int
    seconds: dict[int, float] = field(default_factory=dict)
    took_ms: dict[int, dict[str, list[float]]] = field(default_factory=dict)

    def measured(self, number: int) -> range:
        first = sum(phase.skip + phase.steps for phase in self.phases[:number])
        return range(
            first + self.phases[number].skip, first + self.phases[number].skip + self.phases[number].steps
        )

    def bound(self, steps: range) -> float:
        """Microbatches per second: min over stages Σ 1 / median of what a microbatch took."""
        took: dict[str, list[float]] = {}
        for step in steps:
            for sid, each in self.took_ms.get(step, {}).items():
                took.setdefault(sid, []).extend(each)
        stages: dict[str, float] = {}
        for sid, each in took.items():
            stage = sid.rsplit("-", 2)[1]
            stages[stage] = stages.get(stage, 0.0) + 1e3 / statistics.median(each)
        return min(stages.values())

    def rate(self, steps: range) -> float:
        """Microbatches per second."""
        return self.microbatches * len(steps) / sum(self.seconds[step] for step in steps)

    def shares(self, number: int) -> str:
        """Who did how many in the last step of a phase."""
        step = self.took_ms[self.measured(number)[-1]]
        return "/".join(str(len(step[sid])) for sid in sorted(step))

    def efficiency(self, number: int) -> float:
        steps = self.measured(number)
        return self.rate(steps) / self.bound(steps)


class Bench:
    """One mesh, its client, and the scripts of its slots."""

    def __init__(self, mesh: BenchMesh, slots: EmulatedSlots) -> None:
        self.client = mesh.client
        self._bus = mesh.bus
        self._slots = slots
        self._data = mesh.folder / "data.bin"
        self._data.write_bytes(random.Random(0).randbytes(1 << 20))

    async def run(
        self,
        phases: Sequence[Phase],
        *,
        algorithm: str = DEFAULT_ALGORITHM,
        stages: int = 1,
        replicas: int = 4,
        microbatches: int = 256,
        pad_ms: float = PAD_MS,
    ) -> Run:
        """Runs a job through its phases."""
        steps = sum(phase.skip + phase.steps for phase in phases)
        spec = job(
            "bench-routing",
            steps=steps,
            microbatches=microbatches,
            layers=stages,
            width=16,
            heads=2,
            context=16,
            pad_ms=pad_ms,
            source=self._data,
            parallel={"stages": stages, "replicas": replicas, "segmentation": "uniform"},
            routing={"algorithm": algorithm},
        )
        self._slots.rest()
        name = (await self.client.submit(JobSpec.model_validate(spec))).job
        begins = [sum(phase.skip + phase.steps for phase in phases[:number]) for number in range(len(phases))]
        run = Run(job=name, phases=phases, microbatches=microbatches)
        await self._set(name, phases[0].paces)
        async for event in self.client.events(name):
            if event.result is not None:
                run.seconds[event.result.step] = event.result.step_s
                if event.result.step + 1 in begins:
                    await self._set(name, phases[begins.index(event.result.step + 1)].paces)
        done(await self.client.job(name))
        async for recorded in self._bus.history(STEP_CLAIM, job=name):
            claim = recorded.message
            assert isinstance(claim, MicrobatchClaim)
            at = run.took_ms.setdefault(claim.step, {}).setdefault(claim.owner.sid, [])
            at.append(claim.forward_ms + claim.backward_ms)
        return run

    async def _set(self, name: str, paces: Sequence[float]) -> None:
        """Gives the slot of each replica its pace, as soon as all are placed."""
        while True:
            record = await self.client.job(name)
            if record.graph is not None and record.graph.placements:
                break
            await asyncio.sleep(0.05)
        slots = slots_of(record)
        self._slots.set_speeds({slots[sid]: 1 / pace for sid, pace in zip(sorted(slots), paces, strict=True)})


def figure(
    section: str, name: str, value: float, bar: tuple[str, bool] | None = None, note: str = ""
) -> Figure:
    text, kept = bar or ("", None)
    return Figure(section=section, name=name, value=value, bar=text, kept=kept, note=note)


# --- sections ---------------------------------------------------------------------------------------------
async def unequal(bench: Bench, options: argparse.Namespace) -> list[Figure]:
    """All algorithms, in turn: four equal replicas, then one of them 4× slower."""
    phases = [Phase(paces=EQUAL, skip=WARMUP, steps=4), Phase(paces=ONE_SLOW, skip=1, steps=3)]
    runs: dict[str, list[Run]] = {name: [] for name in ALGORITHMS}
    pair = (DEFAULT_ALGORITHM, STATIC)
    for number in range(options.rounds):
        for name in ALGORITHMS if number == 0 else pair if number % 2 == 0 else pair[::-1]:
            run = await bench.run(phases, algorithm=name)
            runs[name].append(run)
            say(
                f"round {number + 1}: {name:22} {run.efficiency(0):.3f} of the bound, "
                f"one 4× slower {run.efficiency(1):.3f}; {run.shares(0)}, {run.shares(1)}"
            )

    def beside_static(name: str, phase: int) -> float:
        return statistics.median(
            run.rate(run.measured(phase)) / static.rate(static.measured(phase))
            for run, static in zip(runs[name], runs[STATIC], strict=False)
        )

    found = []
    for name in ALGORITHMS:
        part = statistics.median(run.efficiency(1) for run in runs[name])
        times, equal = beside_static(name, 1), beside_static(name, 0)
        alone = statistics.median(run.efficiency(0) for run in runs[name])
        note = f"{alone:.3f} of the bound"
        if name == DEFAULT_ALGORITHM:
            found += [
                figure("unequal", f"{name}: part of the bound", part, at_least(part, 0.95)),
                figure("unequal", f"{name}: beside static", times, at_least(times, 2.9)),
                figure("equal", f"{name}: beside static", equal, at_least(equal, 0.99), note),
            ]
        else:
            found += [
                figure("unequal", f"{name}: part of the bound", part, note=f"{times:.2f}× static"),
                figure("equal", f"{name}: beside static", equal, note=note),
            ]
    return found


async def draws(bench: Bench, options: argparse.Namespace) -> list[Figure]:
    """Speeds of 1–8×, one draw per seed."""
    phases = []
    for seed in range(options.seeds):
        speeds = [random.Random(f"speeds {seed} {replica}").uniform(1, 8) for replica in range(4)]
        phases.append(Phase(paces=tuple(8 / speed for speed in speeds), skip=1 if seed else WARMUP, steps=2))
    run = await bench.run(phases)
    parts = [run.efficiency(number) for number in range(len(phases))]
    for seed, part in enumerate(parts):
        say(f"seed {seed}: {part:.3f}, {run.bound(run.measured(seed)):.0f} microbatches/s at most")
    note = f"{len(parts)} seeds"
    mean, worst = statistics.mean(parts), min(parts)
    return [
        figure("random", "mean part of the bound", mean, at_least(mean, 0.93), note),
        figure("random", "worst part of the bound", worst, at_least(worst, 0.85), note),
    ]


async def change(bench: Bench, options: argparse.Namespace) -> list[Figure]:
    """One of four becomes 4× slower in mid-run, then well again."""
    phases = [
        Phase(paces=EQUAL, skip=WARMUP, steps=4),
        Phase(paces=ONE_SLOW, skip=0, steps=8),
        Phase(paces=EQUAL, skip=0, steps=8),
    ]
    run = await bench.run(phases)
    found = []
    for number, name in ((1, "4× slower"), (2, "well again")):
        steps = run.measured(number)
        bound = run.bound(steps[2:])
        parts = [run.rate(range(step, step + 1)) / bound for step in steps]
        say(f"{name}: {' '.join(f'{part:.2f}' for part in parts)} of the bound, step by step")
        share = [len(run.took_ms[step].get(f"{run.job}-s0-r3", [])) for step in steps]
        say(f"its microbatches: {share}")
        rest = [statistics.mean(parts[place:]) for place in range(len(parts))]
        settled = next(
            (place for place, part in enumerate(rest) if min(part, parts[place]) >= 0.9), len(parts)
        )
        note = f"then {rest[settled]:.3f} on average" if settled < len(parts) else "not reached"
        label = f"{name}: steps until ≥ 0.9 of the new bound"
        found.append(figure("change", label, settled, at_most(settled, 5), note))
    faults = [fault for fault in await bench.client.faults(run.job) if fault.kind == "slow"]
    rightly = [fault for fault in faults if fault.task.sid == f"{run.job}-s0-r3"]
    for fault in faults:
        say(f"step {fault.task.step}: {fault.log[0] if fault.log else fault.reason}")
    first = min((fault.task.step or 0 for fault in rightly), default=10**6) - run.measured(1)[0]
    wrong = len(faults) - len(rightly)
    found.append(figure("change", "reported as slow after, steps", first, at_most(first, 5)))
    found.append(figure("change", "healthy ones blamed", wrong, at_most(wrong, 0)))
    return found


async def bubble(bench: Bench, options: argparse.Namespace) -> list[Figure]:
    """Four stages with one replica each."""
    stages, found = 4, []
    for microbatches in (8, 16, 32):
        phases = [Phase(paces=(8.0,) * stages, skip=WARMUP, steps=4)]
        run = await bench.run(phases, stages=stages, replicas=1, microbatches=microbatches)
        steps = run.measured(0)
        busy_s = sum(sum(map(sum, run.took_ms[step].values())) for step in steps) / 1e3
        idle = 1 - busy_s / stages / sum(run.seconds[step] for step in steps)
        least = (stages - 1) / (microbatches + stages - 1)
        note = f"idle {idle:.3f}, (p-1)/(m+p-1) is {least:.3f}"
        points = 100 * (idle - least)
        found.append(figure("bubble", f"m={microbatches}: points above", points, at_most(points, 3), note))
    return found


SECTIONS = {"unequal": unequal, "random": draws, "change": change, "bubble": bubble}


async def measure(options: argparse.Namespace) -> list[Figure]:
    """All sections asked for, in one mesh."""
    found = []
    with new_folder() as scripts:
        async with open_mesh("a", tell=say, emulate_slots=("1",) * 4, emulation=scripts) as mesh:
            bench = Bench(mesh, EmulatedSlots(scripts, "a", node_name()))
            for section in options.only:
                found += await SECTIONS[section](bench, options)
    return found


def lines(figures: Sequence[Figure]) -> Iterator[str]:
    for row in figures:
        mark = {None: " ", True: "✓", False: "✗"}[row.kept]
        yield f"{mark} {row.section:8} {row.name:44} {row.value:8.3f}  {row.bar:8} {row.note}"


if __name__ == "__main__":
    arguments = command(
        __doc__,
        rounds=(3, "of the default algorithm and the static split"),
        seeds=(20, "draws of random speeds"),
    )
    arguments.add_argument(
        "--only", type=some_of(SECTIONS), default=tuple(SECTIONS), help="sections, with commas between"
    )
    bench(arguments, measure, lines)
