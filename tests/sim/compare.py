"""The step machine beside the one of an earlier revision: the same events, and the same effects?

    python -m tests.sim.compare --before REVISION [--schedules 200] [--answers 2000] [--recorded FILE ...]

The earlier package comes out of git. Each event that a machine gets, in schedules of `tests/sim` and of
`tests.sim.answers`, is given to the earlier one, too. Effects must be equal, and so must what others look at:
phase, step, attempt, history, members and ledger. `record` writes the events of real runs to files.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from io import BytesIO
from pathlib import Path
from typing import Any

from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.step_ledger import StepLedger, UpdateRule
from entities.orchestrator.transaction.step_machine import StepMachine

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "entities.orchestrator.transaction"
FORMER = "former_transaction"
"""The import name of the earlier package."""
OPTIONS = ("job", "epoch", "microbatches", "clip_norm", "step", "attempt", "generation", "tied")


class Different(AssertionError):
    """The two machines do not agree."""


@dataclasses.dataclass(frozen=True)
class FormerPackage:
    """The earlier package: its machine, and its classes of events."""

    machine: type[Any]
    events: Any

    def known(self, options: dict[str, Any]) -> dict[str, Any]:
        """Without the options that came later."""
        return {name: options[name] for name in options if name in signature(self.machine).parameters}

    def event(self, event: ev.Event) -> Any:
        values = (getattr(event, name) for name in _fields(type(event)))
        return getattr(self.events, type(event).__name__)(*values)


def load(revision: str) -> FormerPackage:
    """Imports the package as it is in a git revision.

    Raises:
        CalledProcessError: git or the revision is not there.
    """
    folder = PACKAGE.replace(".", "/")
    archive = subprocess.run(
        ["git", "archive", revision, folder], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory() as home, tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(home, filter="data")
        return import_copy(Path(home), Path(home) / folder)


def import_copy(home: Path, source: Path = ROOT / PACKAGE.replace(".", "/")) -> FormerPackage:
    """Imports a copy of the package, made in `home`, under the name `FORMER`."""
    target = home / FORMER
    target.mkdir()
    for file in source.glob("*.py"):
        (target / file.name).write_text(file.read_text("utf-8").replace(PACKAGE, FORMER), "utf-8")
    for name in [name for name in sys.modules if name.split(".")[0] == FORMER]:
        del sys.modules[name]
    importlib.invalidate_caches()
    sys.path.insert(0, str(home))
    try:
        machine = importlib.import_module(f"{FORMER}.step_machine").StepMachine
        return FormerPackage(machine, importlib.import_module(f"{FORMER}.step_events"))
    finally:
        sys.path.remove(str(home))


# --- side by side -------------------------------------------------------------------------------------------
class Tape:
    """What one machine draws from its surroundings, for the other one to draw again."""

    def __init__(self) -> None:
        self.drawn: list[Any] = []

    def note(self, value: Any) -> Any:
        self.drawn.append(value)
        return value

    def again(self) -> Iterator[Any]:
        while True:
            if not self.drawn:
                raise Different("the other machine draws more")
            yield self.drawn.pop(0)


def _options(options: dict[str, Any], numbers: Tape, pauses: Tape) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a machine is made of, apart from its surroundings; and these, with all that it draws on tapes."""
    wants = options["pauses"]
    drawn = options.get("transfers") or itertools.count(1)
    surroundings = {
        "transfers": (numbers.note(number) for number in drawn),
        "pauses": lambda step: pauses.note(wants(step)),
    }
    members = {"stages": [tuple(members) for members in options["stages"]], "data": tuple(options["data"])}
    return {**{name: options[name] for name in OPTIONS if name in options}, **members}, surroundings


def _surroundings(numbers: Tape, pauses: Tape) -> dict[str, Any]:
    """Those of a machine that draws again what is on the tapes."""
    answers = pauses.again()
    return {"transfers": numbers.again(), "pauses": lambda step: next(answers)}


@contextmanager
def side_by_side(former: FormerPackage) -> Iterator[Counter[str]]:
    """While it is open, each machine has an earlier one beside it. Counts events and effects.

    A machine raises `Different` from `decide` as soon as the two do not agree.
    """
    tally: Counter[str] = Counter()
    begin, decide = StepMachine.__init__, StepMachine.decide

    def init(machine: Any, **given: Any) -> None:
        machine.tapes = Tape(), Tape()
        options, surroundings = _options(given, *machine.tapes)
        begin(machine, **options, **surroundings)
        machine.former = former.machine(**former.known(options), **_surroundings(*machine.tapes))
        tally["machines"] += 1

    def both(machine: Any, event: ev.Event, now: float) -> list[ev.Effect]:
        earlier = machine.former
        if earlier.attempt != machine.attempt and not machine.history:
            earlier.attempt = machine.attempt  # its owner has set where the job goes on
        effects, error = _outcome(lambda: decide(machine, event, now))
        former_effects, former_error = _outcome(lambda: earlier.decide(former.event(event), now))
        tally["events"] += 1
        tally[f"event {type(event).__name__}"] += 1
        for effect in effects:
            tally["effects"] += 1
            tally[f"effect {type(effect).__name__}"] += 1
        if type(error) is not type(former_error):
            raise Different(f"{event}: {error!r}, earlier {former_error!r}") from error
        if [_plain(effect) for effect in effects] != [_plain(effect) for effect in former_effects]:
            raise Different(f"{event}: {effects}, earlier {former_effects}")
        seen, former_seen = _reading(machine), _reading(earlier)
        if seen != former_seen:
            names = [name for name in seen if seen[name] != former_seen[name]]
            raise Different(f"after {event}: {names}")
        if any(tape.drawn for tape in machine.tapes):
            raise Different(f"after {event}: the earlier machine draws fewer numbers")
        if error is not None:
            raise error
        return effects

    with _replaced(__init__=init, decide=both):
        yield tally


@contextmanager
def _replaced(**methods: Callable[..., Any]) -> Iterator[None]:
    """While it is open, the machine has these methods."""
    originals = {name: getattr(StepMachine, name) for name in methods}
    try:
        for name, method in methods.items():
            setattr(StepMachine, name, method)
        yield
    finally:
        for name, method in originals.items():
            setattr(StepMachine, name, method)


def _outcome(work: Callable[[], list[Any]]) -> tuple[list[Any], Exception | None]:
    try:
        return work(), None
    except Exception as error:  # compared, and raised again
        return [], error


@cache
def _fields(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def _plain(effect: Any) -> tuple[Any, ...]:
    """An effect without the classes of its package."""
    values = (getattr(effect, name) for name in _fields(type(effect)))
    return (
        type(effect).__name__,
        *(_ledger(value) if type(value).__name__ == StepLedger.__name__ else value for value in values),
    )


def _ledger(ledger: Any) -> tuple[Any, ...]:
    values = (getattr(ledger, name) for name in _fields(type(ledger)))
    return tuple(
        dataclasses.astuple(value) if type(value).__name__ == UpdateRule.__name__ else value
        for value in values
    )


def _reading(machine: Any) -> dict[str, Any]:
    """What others look at."""
    stages = range(len(machine.stages))
    return {
        **{name: getattr(machine, name) for name in ("phase", "step", "attempt", "history", "dead")},
        **{name: getattr(machine, name) for name in ("stages", "data", "generations", "settled")},
        "formed": [machine.is_formed(stage) for stage in stages],
        "newcomers": [
            (member, machine.stage_of(member), machine.transfer_of(member)) for member in machine.newcomers
        ],
        "ledger": _ledger(machine.ledger),
    }


# --- recorded runs ------------------------------------------------------------------------------------------
@contextmanager
def record(folder: Path) -> Iterator[None]:
    """While it is open, each machine of this process writes what it is given to a file of its own."""
    begin, decide = StepMachine.__init__, StepMachine.decide

    def init(machine: Any, **given: Any) -> None:
        machine.tapes = Tape(), Tape()
        options, surroundings = _options(given, *machine.tapes)
        begin(machine, **options, **surroundings)
        machine.file = (folder / f"{os.getpid()}-{id(machine)}.events").open("wb")
        pickle.dump(options, machine.file)

    def noted(machine: Any, event: ev.Event, now: float) -> list[ev.Effect]:
        attempt = machine.attempt
        try:
            return decide(machine, event, now)
        finally:
            pickle.dump((attempt, event, now, *(tape.drawn for tape in machine.tapes)), machine.file)
            machine.file.flush()
            for tape in machine.tapes:
                tape.drawn = []

    with _replaced(__init__=init, decide=noted):
        yield


def replay(file: Path) -> StepMachine:
    """Gives a recorded run's events to a machine, and returns it."""
    numbers, pauses = Tape(), Tape()
    with file.open("rb") as recorded:
        machine = StepMachine(**pickle.load(recorded), **_surroundings(numbers, pauses))
        while True:
            try:
                attempt, event, now, numbers.drawn, pauses.drawn = pickle.load(recorded)
            except EOFError:
                return machine
            if not machine.history:
                machine.attempt = attempt  # its owner has set where the job goes on
            machine.decide(event, now)


# --- the command --------------------------------------------------------------------------------------------
def main() -> int:
    from tests.sim.answers import Answers
    from tests.sim.test_step_transaction import PLANS
    from tests.sim.world import World

    parser = argparse.ArgumentParser(prog="python -m tests.sim.compare", description=__doc__)
    parser.add_argument("--before", required=True, metavar="REVISION")
    parser.add_argument("--schedules", type=int, default=200, help="of each kind of plan")
    parser.add_argument("--answers", type=int, default=2000, help="schedules of `tests.sim.answers`")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--recorded", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.schedules)
    schedules = 0
    with side_by_side(load(options.before)) as tally:
        for kind, plan in PLANS.items():
            for seed in seeds:
                World(seed, plan).run()
                schedules += 1
            print(f"{kind}: {schedules} schedules, {tally['events']} events, {tally['effects']} effects")
        for seed in range(options.first, options.first + options.answers):
            Answers(seed).run()
            schedules += 1
        print(f"answers: {schedules} schedules, {tally['events']} events, {tally['effects']} effects")
        for file in options.recorded:
            replay(file)
            schedules += 1
    for name, count in sorted(tally.items()):
        print(f"{count:10d} {name}")
    print(f"{schedules} schedules and runs: no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
